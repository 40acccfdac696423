"""`measure_noise`: train a workload for some steps, and say where its batch stands beside the critical one.

Promises:
- the training is real: the workload's own data, loss and optimizer, stepped by an Accumulator;
- the answer is that of the last half of the run, and the trend shows the whole of it;
- what was left out of the measurement, and why, is in the result.
"""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchwright.accumulate.accumulator import Accumulator
from batchwright.device.device import open_device
from batchwright.errors import BatchwrightError
from batchwright.noise.best_batch import best_batch
from batchwright.noise.noise_scale import NoiseScale
from batchwright.noise.ramp import gamma_of
from batchwright.noise.training import split_of, training
from batchwright.noise.verdict import judge
from batchwright.units import counted, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rich.console import RenderableType

    from batchwright.accumulate.step import Step
    from batchwright.noise.best_batch_result import BestBatch
    from batchwright.noise.critical_batch import CriticalBatch
    from batchwright.noise.verdict import Verdict
    from batchwright.workload import Workload


@dataclass(frozen=True)
class TrendPoint:
    """The critical batch and the loss at a step of the run."""

    step: int
    samples: int
    loss: float
    critical_batch: CriticalBatch

    def to_dict(self) -> dict[str, Any]:
        """Return the point as plain data."""
        return {"step": self.step, "samples": self.samples, "loss": self.loss, **self.critical_batch.to_dict()}


@dataclass(frozen=True)
class NoiseRun:
    """A short training run, and what its gradients say of the batch in use."""

    name: str
    critical_batch: CriticalBatch
    effective_batch: int
    micro_batch: int
    accumulation: int
    ranks: int
    steps: int
    history: tuple[TrendPoint, ...]
    verdict: Verdict
    by_group: Mapping[str, CriticalBatch]
    seconds_per_step: float
    """The median."""
    gamma: float | None
    """What a batch that follows the critical batch could buy; 1 for nothing. None where the trend is not resolved."""
    best: BestBatch | None = None
    """The batch that reaches the loss soonest, where step times were handed in."""
    skipped: Mapping[str, int] | None = None
    notes: tuple[str, ...] = ()
    source: str = "measured"

    @property
    def recommendation(self) -> str:
        """What to do, in one line."""
        if self.best is None:
            return self.verdict.recommendation
        first, last = self.best.range_within_5_percent
        return (
            f"an effective batch of {self.best.value:,} reaches the loss soonest; {first:,} to {last:,} are within 5 %"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the run as plain data, the same as `batchwright noise --json` prints."""
        return {
            "schema": 1,
            "source": self.source,
            "name": self.name,
            "critical_batch": self.critical_batch.to_dict(),
            "effective_batch": self.effective_batch,
            "micro_batch": self.micro_batch,
            "accumulation": self.accumulation,
            "devices": self.ranks,
            "steps": self.steps,
            "observations": self.critical_batch.observations,
            "steps_needed": self.critical_batch.steps_needed,
            "history": [point.to_dict() for point in self.history],
            "by_group": {name: each.to_dict() for name, each in self.by_group.items()},
            "seconds_per_step": self.seconds_per_step,
            "gamma": self.gamma,
            "verdict": self.verdict.to_dict(),
            "recommendation": self.recommendation,
            "best_batch": None if self.best is None else self.best.to_dict(),
            "skipped": dict(self.skipped or {}),
            "notes": list(self.notes),
        }

    def __rich__(self) -> RenderableType:
        from batchwright.report.noise_text import draw_noise

        return draw_noise(self)

    def _repr_html_(self) -> str:
        from batchwright.report.html import table_to_html
        from batchwright.report.noise_text import noise_columns, noise_remarks, summarize_noise

        return table_to_html(summarize_noise(self), noise_columns(self), noise_remarks(self))


def measure_noise(
    workload: Workload,
    *,
    effective_batch: int,
    steps: int = 200,
    micro_batch: int | None = None,
    on: str = "cpu",
    shape: Mapping[str, Any] | None = None,
    every: int = 1,
    clip_norm: float | None = None,
    unit: str | None = None,
    times: Any = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> NoiseRun:
    """Train for some steps at an effective batch, and measure the critical one.

    >>> import torch
    >>> from batchwright.workload import Workload
    >>> workload = Workload(
    ...     model=lambda: torch.nn.Linear(8, 1),
    ...     batch=lambda n: torch.randn(n, 8),
    ...     loss=lambda model, batch: (model(batch) - batch.sum(1, keepdim=True)).pow(2).mean(),
    ...     optimizer=lambda params: torch.optim.SGD(params, lr=1e-3),
    ... )
    >>> run = measure_noise(workload, effective_batch=32, steps=40)
    >>> run.micro_batch, run.accumulation, run.critical_batch.observations, run.critical_batch.resolved
    (8, 4, 20, True)
    """
    whole_number(effective_batch, "effective batch")
    steps = whole_number(steps, "steps")
    device = open_device(on).torch_device  # type: ignore[attr-defined]  # a simulated card cannot train
    with training(workload, device=device, shape=shape, seed=seed) as trained:
        size, accumulation = split_of(effective_batch, micro_batch, trained.ranks)
        assert workload.loss is not None, "training() has refused a workload without one"
        accumulator = Accumulator(
            trained.model,
            list(trained.optimizers),
            accumulation,
            clip_norm=clip_norm,
            scaler=None if workload.scaler is None else workload.scaler(),
        )
        noise = NoiseScale(
            accumulator,
            every=every,
            window=None,
            unit=unit or (None if workload.units is None else "units"),
            population=None if workload.data is None else len(workload.data),
        )
        done: list[Step] = []
        seconds: list[float] = []
        batches = itertools.islice(trained.batches(size), steps * accumulation)
        start = said = time.monotonic()
        for batch in accumulator.micro_batches(batches, weight=workload.units):
            step = accumulator.backward(workload.loss(trained.model, batch))
            if step is None:
                continue
            if not done:
                noise.average_over(max(steps // 2, 1) * step.units / every)
            done.append(step)
            now = time.monotonic()
            seconds.append(now - start)
            start = now
            if now - said > 2 or len(done) == steps:
                said = now
                progress(
                    f"step {len(done):,} of {steps:,}, loss {step.loss:.4g}, critical batch {noise.critical_batch}"
                )
        noise.close()
        return _told(workload, noise, done, seconds, (size, accumulation, trained.ranks), trained.optimizers, times)


def _told(
    workload: Workload,
    noise: NoiseScale,
    done: Sequence[Step],
    seconds: Sequence[float],
    split: tuple[int, int, int],
    optimizers: Sequence[Any],
    times: Any,
) -> NoiseRun:
    critical = noise.critical_batch
    if critical is None:
        reasons = [f"{counted(number, 'step')}: {reason}" for reason, number in noise.skipped.items()]
        raise BatchwrightError(
            f"{counted(len(done), 'step')} gave no observation of the noise.", details=[*reasons, *noise.notes]
        )
    micro_batch, accumulation, ranks = split
    effective_batch = micro_batch * accumulation * ranks
    samples = critical.in_samples()
    group = optimizers[0].param_groups[0]
    verdict = judge(
        samples or critical,
        # Where nothing tells how many samples a unit has, both are in units.
        effective_batch if samples else sum(step.units for step in done) / len(done),
        optimizer=type(optimizers[0]).__name__,
        learning_rate=group.get("lr"),
        betas=group.get("betas"),
        weight_decay=group.get("weight_decay"),
        devices=ranks,
    )
    return NoiseRun(
        name=workload.name,
        critical_batch=critical,
        effective_batch=effective_batch,
        micro_batch=micro_batch,
        accumulation=accumulation,
        ranks=ranks,
        steps=len(done),
        history=_trend(noise, done, effective_batch),
        verdict=verdict,
        by_group=noise.by_group,
        seconds_per_step=statistics.median(seconds),
        gamma=gamma_of(noise.history),
        best=None if times is None else best_batch(samples or critical, times, devices=ranks),
        skipped=noise.skipped,
        notes=tuple(noise.notes),
    )


def _trend(noise: NoiseScale, done: Sequence[Step], effective_batch: int) -> tuple[TrendPoint, ...]:
    points, before = [], 0
    for point in noise.history:
        losses = [step.loss for step in done[before : point.step]]
        before = point.step
        mean = sum(losses) / len(losses)
        points.append(TrendPoint(point.step, point.step * effective_batch, mean, point.critical_batch))
    return tuple(points)
