"""`BatchRamp`: raise the batch as the critical batch rises, by accumulation alone.

Opt-in, and worth a thought before: gamma says what a batch that follows the trend can buy at most, and in one
published comparison an adaptive batch ended worse than a fixed one (arXiv:2602.03001: AdamW, 1B parameters, a loss of
2.8023 against 2.7701).

Promises:
- the micro-batch, and so the memory of a step, stays as it is; accumulation is doubled, never lowered;
- with step times it doubles when, over all critical batches that are likely now, twice the batch loses less time than
  the batch in use; without them, when the lower end of the interval is at twice that; both at two looks in a row, and
  not above the cap;
- every decision is kept with its reason, and logged under "batchwright".
"""

from __future__ import annotations

import logging
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from batchwright.errors import InvalidInputError
from batchwright.planning.best_batch import timed_steps
from batchwright.planning.critical_batch import CriticalBatch, figure, gamma
from batchwright.planning.learning_rate import learning_rate_change
from batchwright.planning.likely_time import LikelyTime
from batchwright.units import as_list, shortened, whole_number

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from batchwright.accumulate.accumulator import Accumulator
    from batchwright.accumulate.windows import Step
    from batchwright.noise.noise_scale import NoiseScale
    from batchwright.noise.observations import HistoryPoint


# Twice in a row, half a window apart: one lucky window is not enough.
_LOOKS = 2
_LOOKS_PER_WINDOW = 2
_RATES = ("lr", "initial_lr", "max_lr", "min_lr")

_log = logging.getLogger("batchwright")


@dataclass(frozen=True)
class RampDecision:
    """One change of the accumulation, and why."""

    step: int
    accumulation_before: int
    accumulation: int
    batch_before: float
    """The effective batch, in the unit of the critical batch."""
    batch: float
    learning_rate_factor: float
    critical_batch: CriticalBatch
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Return the decision as plain data."""
        return {**asdict(self), "critical_batch": self.critical_batch.to_dict()}

    def __str__(self) -> str:
        return f"step {self.step:,}: accumulation {self.accumulation_before} -> {self.accumulation}: {self.reason}"


class BatchRamp:
    """Double the accumulation when the critical batch has risen far enough; call `update` with every finished step.

    >>> import torch
    >>> from batchwright.accumulate.accumulator import Accumulator
    >>> from batchwright.noise.noise_scale import NoiseScale
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Linear(30, 1)
    >>> accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=1e-3), accumulation=2)
    >>> ramp = BatchRamp(NoiseScale(accumulator, window=800), max_accumulation=8)
    >>> loader = [torch.randn(4, 30) for _ in range(600)]
    >>> for micro in accumulator.micro_batches(loader):
    ...     step = accumulator.backward((model(micro) - micro.sum(1, keepdim=True)).pow(2).mean())
    ...     if step:
    ...         _ = ramp.update(step)
    >>> [(decision.accumulation_before, decision.accumulation) for decision in ramp.decisions]
    [(2, 4)]

    - `step_times`: seconds of whole steps by effective batch in samples, at the micro-batch in use. With them the ramp
      follows the batch that is soonest now; without them it waits until the critical batch is surely larger.
    - `adjust_learning_rate`: the rate of every parameter group is multiplied by the factor that goes with the change
      (without step times that at the lower end), and the base rates of the accumulator's schedulers with it.
    """

    def __init__(
        self,
        noise: NoiseScale,
        *,
        max_accumulation: int,
        step_times: Mapping[int, float] | None = None,
        adjust_learning_rate: bool = True,
    ) -> None:
        accumulator = noise.accumulator
        if accumulator is None:
            raise InvalidInputError(
                "a BatchRamp raises the accumulation of an Accumulator, and this NoiseScale watches a loop of its own.",
                remedy="BatchRamp(NoiseScale(accumulator), max_accumulation=...)",
            )
        self._noise = noise
        self._accumulator: Accumulator = accumulator
        self._check_accumulation()
        self.max_accumulation = whole_number(max_accumulation, "max_accumulation")
        self.decisions: list[RampDecision] = []
        self._step = None if step_times is None else timed_steps(step_times)
        self._adjusts = adjust_learning_rate
        self._looks = 0
        self._next_look: float | None = None
        self._stays = False
        # Said beforehand: near 1 there is little to gain, however the batch is raised.
        known = self.gamma
        _log.info("batch ramp: gamma %s", "is not known yet" if known is None else f"{known:.2f} so far")
        # The largest step since the last change, in units and in samples: the last of an epoch may be short.
        self._batch, self._samples = 0.0, 0

    @property
    def gamma(self) -> float | None:
        """What a batch that follows the trend seen so far could buy; 1 for nothing, None if no trend is known."""
        return gamma_of(self._noise.history)

    def update(self, step: Step) -> RampDecision | None:
        """Look at the critical batch after a step, and raise the accumulation if it is time."""
        self._batch = max(self._batch, step.units)
        self._samples = max(self._samples, step.samples or 0)
        window, units = self._noise.progress
        if window is None:
            return None
        if self._next_look is None or self._next_look > units + window:
            self._next_look = units + window / _LOOKS_PER_WINDOW
        if units < self._next_look:
            return None
        self._next_look = units + window / _LOOKS_PER_WINDOW
        critical = self._noise.critical_batch
        reason = None if critical is None or self._has_not_grown() else self._reason_to_raise(critical)
        if critical is None or reason is None:
            self._looks = 0
            return None
        self._looks += 1
        if self._looks < _LOOKS:
            return None
        before = self._check_accumulation()
        if 2 * before > self.max_accumulation:
            self._stay(f"the critical batch is {critical}, but accumulation {before} is at its cap")
            return None
        return self._raise(step, before, critical, reason)

    def _reason_to_raise(self, critical: CriticalBatch) -> str | None:
        """Why twice the batch is better now; None if it is not, or not surely."""
        if self._step is None:
            if critical.low < 2 * self._batch:
                return None
            least = f"at least {figure(critical.low)} {critical.unit}"
            return f"the critical batch is {least}, twice the {figure(self._batch)} in use or more"
        in_samples, now = critical.in_samples(), self._samples
        if in_samples is None or not now:
            self._stay("the samples of a step are not counted, and step times are by samples")
            return None
        if not 0 < in_samples.known_value < math.inf:
            return None
        likely = LikelyTime.of(in_samples, self._step)
        sooner = likely.over_soonest(now) / likely.over_soonest(2 * now)
        if sooner <= 1:
            return None
        return f"at {in_samples} twice the {now:,} samples in use get {sooner:.2f} times as far in the same time"

    def _has_not_grown(self) -> bool:
        """Whether the last doubling made no larger steps: an epoch ends before a window is full."""
        if not self.decisions or self._batch >= 1.75 * self.decisions[-1].batch_before:
            return False
        self._stay(f"steps stay at {figure(self._batch)} units: an epoch has no more micro-batches for one window")
        return True

    def _stay(self, reason: str) -> None:
        if not self._stays:
            _log.info("batch ramp: %s", reason)
        self._stays = True

    def _raise(self, step: Step, before: int, critical: CriticalBatch, reason: str) -> RampDecision:
        batch = self._batch
        factor = self._learning_rate_factor(batch, critical)
        for group in [group for one in as_list(self._accumulator.optimizer) for group in one.param_groups]:
            for rate in _RATES:
                if rate in group:
                    group[rate] = group[rate] * factor
        for scheduler in _flat(self._accumulator.schedulers):
            if hasattr(scheduler, "base_lrs"):
                scheduler.base_lrs = [rate * factor for rate in scheduler.base_lrs]
            if hasattr(scheduler, "max_lrs"):
                scheduler.max_lrs = [rate * factor for rate in scheduler.max_lrs]
        self._accumulator.accumulation = 2 * before
        gamma_text = "not known" if self.gamma is None else f"{self.gamma:.2f}"
        decision = RampDecision(
            step=step.number,
            accumulation_before=before,
            accumulation=2 * before,
            batch_before=batch,
            batch=2 * batch,
            learning_rate_factor=factor,
            critical_batch=critical,
            reason=f"{reason}, at {_LOOKS} looks in a row; gamma so far {gamma_text}",
        )
        self.decisions.append(decision)
        _log.info("batch ramp: step %d, accumulation %d -> %d: %s", step.number, before, 2 * before, decision.reason)
        # From here on gradients are of another schedule: what they say must be seen anew before the next change.
        self._noise.restart()
        self._looks, self._batch, self._samples = 0, 0.0, 0
        return decision

    def _learning_rate_factor(self, batch: float, critical: CriticalBatch) -> float:
        if not self._adjusts:
            return 1.0
        name = type(as_list(self._accumulator.optimizer)[0]).__name__
        factor = learning_rate_change(name, batch, 2 * batch, critical).factor
        if factor is None:
            return 1.0
        # As the decision: by the lower end, or by what is likely.
        return factor.low if self._step is None else factor.value

    def _check_accumulation(self) -> int:
        now = self._accumulator.accumulation
        if isinstance(now, bool) or not isinstance(now, int):
            raise InvalidInputError(
                f"a BatchRamp sets the accumulation itself; the Accumulator has {shortened(now)}.",
                remedy="Accumulator(model, optimizer, accumulation=4)",
            )
        return now

    def state_dict(self) -> dict[str, Any]:
        """Return where the ramp stands; learning rates are in the states of optimizer and scheduler."""
        return {
            "accumulation": self._accumulator.accumulation,
            "looks": self._looks,
            "next_look": self._next_look,
            "decisions": [{**asdict(d), "critical_batch": vars(d.critical_batch)} for d in self.decisions],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict()`, with its accumulation."""
        self._accumulator.accumulation = state["accumulation"]
        self._looks, self._next_look = state["looks"], state["next_look"]
        self.decisions = [
            RampDecision(**{**decision, "critical_batch": CriticalBatch(**decision["critical_batch"])})
            for decision in state["decisions"]
        ]


def gamma_of(history: Sequence[HistoryPoint]) -> float | None:
    """Return gamma over the resolved points of a run; None for fewer than two.

    Points are as many units apart; in steps of Smin a batch B makes 1/(B + b) of progress with each of them.
    """
    points = [point for point in history if point.critical_batch.resolved and point.critical_batch.value > 0]
    values = [point.critical_batch.value for point in points]
    return gamma(values, [1 / (p.batch + p.critical_batch.value) for p in points]) if len(points) > 1 else None


def _flat(schedulers: Sequence[Any]) -> Iterator[Any]:
    for scheduler in schedulers:
        yield scheduler
        yield from _flat(getattr(scheduler, "_schedulers", []))
