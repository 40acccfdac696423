"""Fits the constants of the model of time to published rows: by gradient, on the logarithm of true over predicted.

Promises:
- what is fitted is the formula of `timing/step_time.py`, and `check` compares the two on every row;
- a constant that the rows say little about stays near its prior, which is that of the first study of these rows;
- rows of one workload on one family of cards share their weight, so that a sweep does not count as many.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from batchwright.catalogue.speeds import CardSpeed, find_speed
from batchwright.timing.collectives import COLLECTIVES, Network
from batchwright.timing.constants import Constants, keys_of
from batchwright.timing.step_time import StepTime, time_step

if TYPE_CHECKING:
    from batchwright.trace.work import StepWork, Work
    from step_cases.published import Row

_STEPS, _RATE = 250, 0.04
# How far a constant may go from its prior before it costs as much as all rows being off by a tenth.
_LOOSE = 0.7
_NETWORK = Network.parse("1600Gb/s")
_HOST = ("forward", "backward", "optimizer")


@dataclass
class Sample:
    """One row with its work, counted."""

    row: Row
    step: StepWork
    speed: CardSpeed
    counts: Counter[Work] = field(default_factory=Counter)
    waiting: float = 0.0

    @staticmethod
    def of(row: Row, step: StepWork) -> Sample:
        """Count the work of a row."""
        counts: Counter[Work] = Counter()
        for work in step.entries:
            if work.kind not in COLLECTIVES and work.kind != "upload":
                counts[work._replace(phase="")] += 1
        return Sample(row, step, find_speed(row.card), counts)


@dataclass(frozen=True)
class Fitted:
    """Constants, and by how much software of 2018 to 2020 was slower."""

    constants: Constants
    old_device: float = 1.0
    old_host: float = 1.0

    def seconds(self, sample: Sample) -> float:
        """Predict a row by the very function that answers users."""
        return self.time(sample).seconds

    def time(self, sample: Sample) -> StepTime:
        """Predict a row with its interval."""
        speed, host = sample.speed, 1.0
        if sample.row.is_old:
            slower = {kind: rate / self.old_device for kind, rate in speed.sustained.items()}
            speed = replace(speed, sustained=slower, memory=speed.memory / self.old_device)
            host = self.old_host
        time = time_step(
            sample.step,
            speed,
            samples=1,
            devices=sample.row.devices,
            network=_NETWORK,
            constants=self.constants,
            host_factor=host,
        )
        assert isinstance(time, StepTime), time
        return time


class Fit:
    """The rows as arrays, and the parameters by their logarithms."""

    def __init__(self, samples: Sequence[Sample], prior: Constants) -> None:
        self.samples, self.prior = list(samples), prior
        self.names = [
            *(f"e:{name}" for name in prior.efficiency),
            *(f"p:{name}" for name in prior.passes),
            *(f"h:{phase}" for phase in prior.host_seconds),
            *("device", "q", "hp", "old_device", "old_host"),
        ]
        self.index = {name: number for number, name in enumerate(self.names)}
        values = [
            *prior.efficiency.values(),
            *prior.passes.values(),
            *prior.host_seconds.values(),
            *(prior.device_seconds, prior.flops_and_bytes, prior.host_and_device, 1.1, 2.0),
        ]
        self.start = torch.tensor(values, dtype=torch.float64).log()
        self._build()

    def _build(self) -> None:
        flops, num_bytes, kernels, count, owner, efficiency, passes = [], [], [], [], [], [], []
        none = len(self.names)  # an index of a constant 1
        for number, sample in enumerate(self.samples):
            for work, times in sample.counts.items():
                rate = sample.speed.sustained.get(work.number_format) or sample.speed.sustained["fp32"]
                flops.append(work.flops / rate)
                num_bytes.append(work.num_bytes / sample.speed.memory)
                kernels.append(work.kernels)
                count.append(times)
                owner.append(number)
                efficiency.append(self._find("e:", work, none) if work.flops else none)
                passes.append(self._find("p:", work, none))
        as_floats = _as_floats
        self.flops, self.bytes = as_floats(flops), as_floats(num_bytes)
        self.kernels, self.count = as_floats(kernels), as_floats(count)
        self.owner, self.efficiency, self.passes = map(torch.tensor, (owner, efficiency, passes))
        self.host = as_floats(
            [
                [
                    *(sum(w.kernels for w in s.step.entries if _phase(w) == phase) for phase in _HOST),
                    s.step.num_views,
                ]
                for s in self.samples
            ]
        )
        self.is_old = torch.tensor([s.row.is_old for s in self.samples])
        self.truth = as_floats([s.row.seconds for s in self.samples]).log()
        cells = Counter((s.row.workload, s.speed.family, s.row.precision) for s in self.samples)
        weights = [cells[s.row.workload, s.speed.family, s.row.precision] ** -0.5 for s in self.samples]
        self.weight = as_floats(weights) / sum(weights)

    def _find(self, kind: str, work: Work, none: int) -> int:
        return next((self.index[kind + key] for key in keys_of(work) if kind + key in self.index), none)

    def predict(self, logs: torch.Tensor, waiting: torch.Tensor) -> torch.Tensor:
        """Return the logarithm of the seconds of every row."""
        values = torch.cat([logs, torch.zeros(1, dtype=torch.float64)]).exp()
        at = self.index
        q, hp = values[at["q"]], values[at["hp"]]
        old = torch.where(self.is_old, values[at["old_device"]], torch.ones(1, dtype=torch.float64))
        flops = (self.flops / values[self.efficiency]) * old[self.owner]
        num_bytes = self.bytes * values[self.passes] * old[self.owner]
        tiny = 1e-30
        joined = ((flops + tiny) ** q + (num_bytes + tiny) ** q) ** (1 / q)
        each = self.count * (joined + self.kernels * values[at["device"]])
        device = torch.zeros(len(self.samples), dtype=torch.float64).index_add(0, self.owner, each)
        per = torch.stack([values[at[f"h:{phase}"]] for phase in (*_HOST, "view")])
        host = (self.host @ per) * torch.where(self.is_old, values[at["old_host"]], torch.ones(1, dtype=torch.float64))
        return ((device**hp + host**hp) ** (1 / hp) + waiting).log()

    def run(self) -> Fitted:
        """Fit, with what ranks wait for brought up to date in between."""
        logs = self.start.clone().requires_grad_(True)
        for steps in (_STEPS // 2, _STEPS // 2):
            fitted = self.fitted(logs.detach())
            waiting = torch.tensor([_waiting(s, fitted) for s in self.samples], dtype=torch.float64)
            optimizer = torch.optim.Adam([logs], lr=_RATE)
            for _ in range(steps):
                optimizer.zero_grad()
                error = self.predict(logs, waiting) - self.truth
                # Between least squares and least absolute errors: a row that is off by two is not four.
                loss = (self.weight * ((error / 0.1) ** 2 + 1).sqrt()).sum()
                loss = loss + 0.02 * (((logs - self.start) / _LOOSE) ** 2).sum()
                loss = loss + 5.0 * torch.relu(math.log(1.05) - logs[self.index["hp"]]) ** 2
                loss.backward()
                optimizer.step()
        return self.fitted(logs.detach())

    def fitted(self, logs: torch.Tensor) -> Fitted:
        """Return parameters as constants."""
        values = dict(zip(self.names, logs.exp().tolist(), strict=True))
        constants = replace(
            self.prior,
            efficiency={name: values[f"e:{name}"] for name in self.prior.efficiency},
            passes={name: values[f"p:{name}"] for name in self.prior.passes},
            host_seconds={phase: values[f"h:{phase}"] for phase in self.prior.host_seconds},
            device_seconds=values["device"],
            flops_and_bytes=max(values["q"], 1.0),
            host_and_device=max(values["hp"], 1.0),
        )
        return Fitted(constants, values["old_device"], values["old_host"])

    def check(self, fitted: Fitted) -> float:
        """Return the largest difference between this formula and the one that answers users, as a share."""
        logs = torch.tensor(
            [
                *fitted.constants.efficiency.values(),
                *fitted.constants.passes.values(),
                *fitted.constants.host_seconds.values(),
                *(fitted.constants.device_seconds, fitted.constants.flops_and_bytes),
                *(fitted.constants.host_and_device, fitted.old_device, fitted.old_host),
            ],
            dtype=torch.float64,
        ).log()
        waiting = torch.tensor([_waiting(s, fitted) for s in self.samples], dtype=torch.float64)
        ours = self.predict(logs, waiting).exp().tolist()
        differences = [abs(a / fitted.seconds(s) - 1) for a, s in zip(ours, self.samples, strict=True)]
        return float(max(differences))


def _as_floats(values: Sequence[Any]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _phase(work: Work) -> str:
    if work.kind in COLLECTIVES:
        return "none"
    return work.phase if work.phase in _HOST else "forward"


def _waiting(sample: Sample, fitted: Fitted) -> float:
    return 0.0 if sample.row.devices == 1 else float(fitted.time(sample).waiting_seconds)


def by_cell(samples: Sequence[Sample]) -> dict[tuple[str, str], list[Sample]]:
    """Return the samples by the cell that is judged together: a source on a family of cards."""
    cells: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for sample in samples:
        cells[sample.row.source, sample.speed.family].append(sample)
    return cells
