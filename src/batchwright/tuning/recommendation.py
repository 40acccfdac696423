"""The recommendation: micro-batch, accumulation, effective batch, learning rate, and what would change them.

Pure arithmetic over what a run has measured.

Promises:
- an effective batch that was asked for is kept, and what would be better is said beside it;
- without a critical batch or without times nothing is made up: what is missing, and what stands in for it, is told;
- every answer says what it rests on, and the range that is as good.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from batchwright.noise.best_batch import best_batch
from batchwright.noise.efficiency import soonest_batch, time_to_loss
from batchwright.planning.plan import plan
from batchwright.units import counted

if TYPE_CHECKING:
    from batchwright.noise.best_batch_result import BestBatch
    from batchwright.noise.critical_batch import CriticalBatch
    from batchwright.planning.plan import Plan
    from batchwright.planning.times import TimeModel
    from batchwright.tuning.known import Known
    from batchwright.tuning.other_setups import Change

# The curve of the report goes so many doublings to either side of the answer.
_DOUBLINGS = 4


@dataclass(frozen=True)
class Choice:
    """What was found, before it is written down."""

    plan: Plan
    best: BestBatch | None
    critical: CriticalBatch | None
    critical_from: str | None
    reasons: tuple[str, ...]
    assumes: tuple[str, ...]
    source: str


@dataclass(frozen=True)
class Advised:
    """The recommendation as it stands in a run."""

    name: str
    on: str
    choice: Choice
    learning_rate: dict[str, Any] | None
    seconds_per_step: float | None
    time_to_target: tuple[dict[str, Any], ...]
    changes: tuple[Change, ...] = ()
    configs: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data: the section `recommendation` of a run."""
        made, best = self.choice.plan, self.choice.best
        speed = None if self.seconds_per_step is None else made.effective_batch / self.seconds_per_step
        return {
            "schema": 1,
            "source": self.choice.source,
            "name": self.name,
            "on": self.on,
            "devices": made.devices,
            "micro_batch": made.micro_batch,
            "accumulation": made.accumulation,
            "effective_batch": made.effective_batch,
            "range_within_5_percent": None if best is None else list(best.range_within_5_percent),
            "best_effective_batch": None if best is None else best.value,
            "learning_rate": self.learning_rate,
            "critical_batch": None if self.choice.critical is None else self.choice.critical.to_dict(),
            "critical_batch_from": self.choice.critical_from,
            "seconds_per_step": self.seconds_per_step,
            "samples_per_second": speed,
            "time_to_target": list(self.time_to_target),
            "reasons": list(self.choice.reasons),
            "assumes": list(self.choice.assumes),
            "changes": [asdict(change) for change in self.changes],
            "configs": self.configs,
            "notes": list(self.notes),
        }


def choose(
    known: Known,
    *,
    devices: int,
    effective_batch: int | None,
    critical: CriticalBatch | None,
    critical_from: str | None,
) -> Choice:
    """Choose the split from what is known."""
    fits, times = known.micro_batch, known.times
    reasons, assumes = [], []
    largest = fits or known.fastest_micro_batch or 1
    if fits is None:
        assumes.append(f"what fits was not measured: micro-batches up to {largest:,} are taken to fit")
    best = None
    in_samples = None if critical is None else critical.in_samples()
    if in_samples is not None and times is not None:
        best = soonest(in_samples, times, devices, largest)
    if effective_batch is not None:
        wanted = effective_batch
        reasons.append(f"an effective batch of {wanted:,} was asked for")
        if best is not None:
            low, high = best.range_within_5_percent
            inside = "is as good" if low <= wanted <= high else f"takes {best.time_ratio(wanted):.2f} times as long"
            reasons.append(f"{best.value:,} would reach the loss soonest; {wanted:,} {inside}")
    elif best is not None:
        wanted = best.in_micro_batches or best.value
        low, high = best.range_within_5_percent
        reasons.append(
            f"{counted(best.value, 'sample')} per step would reach the loss soonest at a critical batch of "
            f"{in_samples}; {low:,} to {high:,} are within 5 %"
        )
    else:
        wanted = largest * devices
        what = "the critical batch" if critical is None else "how long a step takes"
        assumes.append(f"{what} was not measured: the effective batch is one micro-batch on each device, not a choice")
    made = plan(wanted, micro_batch=largest, devices=devices, samples=known.samples, times=times)
    if fits is not None:
        reasons.append(f"micro-batch {fits:,} fits; {known.why_no_larger}")
    is_timed = times is not None and times.covers(made.micro_batch)
    if times is not None and not is_timed:
        timed = sorted(point.micro_batch for point in times.points)
        assumes.append(f"a micro-batch of {made.micro_batch:,} is outside those timed, {timed[0]:,} to {timed[-1]:,}")
    is_measured = best is not None and fits is not None and is_timed
    source = "measured" if is_measured else "predicted"
    return Choice(made, best, in_samples or critical, critical_from, tuple(reasons), tuple(assumes), source)


def soonest(critical: CriticalBatch, times: TimeModel, devices: int, largest: int) -> BestBatch:
    """Return the best batch: one pass of each device where that holds it, else micro-batches of the largest size."""
    in_one_pass = best_batch(critical, times, devices=devices, largest=largest * devices)
    if in_one_pass.value < largest * devices:
        return in_one_pass
    return best_batch(critical, times, devices=devices, micro_batch=largest)


def curve(choice: Choice) -> tuple[dict[str, Any], ...]:
    """Return the time to the loss by batch, each relative to the best batch, with the ends of the critical batch."""
    best = choice.best
    if best is None or choice.critical is None:
        return ()
    line = best.step_seconds
    sizes = sorted({max(round(best.value * 2 ** (step / 2)), 1) for step in range(-2 * _DOUBLINGS, 2 * _DOUBLINGS + 1)})

    def ratio(size: int, critical: float) -> float | None:
        if not math.isfinite(critical):
            return None
        soonest = soonest_batch(critical, line.fixed, line.per_sample, least=1, most=2**31)
        return time_to_loss(size, critical, line.fixed, line.per_sample) / time_to_loss(
            soonest, critical, line.fixed, line.per_sample
        )

    rows = []
    for size in sizes:
        ends = [r for r in (ratio(size, choice.critical.low), ratio(size, choice.critical.high)) if r is not None]
        middle = best.time_ratio(size)
        rows.append(
            {"effective_batch": size, "ratio": middle, "low": min([middle, *ends]), "high": max([middle, *ends])}
        )
    return tuple(rows)
