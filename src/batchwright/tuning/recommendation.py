"""The recommendation: micro-batch, accumulation, effective batch, learning rate, and what would change them.

Pure arithmetic over what a run has measured.

Promises:
- an effective batch that was asked for is kept, as nearly as equal micro-batches allow, and a better one is said;
- without a critical batch or without times nothing is made up: what is missing, and what stands in for it, is told;
- every answer says what it rests on, and the range that is as good.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from batchwright.noise.critical_batch import figure
from batchwright.planning.plan import plan
from batchwright.tuning.time_by_batch import TimeByBatch
from batchwright.units import counted

if TYPE_CHECKING:
    from batchwright.noise.critical_batch import CriticalBatch
    from batchwright.planning.plan import Plan
    from batchwright.tuning.known import Known
    from batchwright.tuning.other_setups import Change

# The curve of the report goes so many doublings to either side of the answer.
_DOUBLINGS = 4


@dataclass(frozen=True)
class Choice:
    """What was found, before it is written down."""

    plan: Plan
    by_batch: TimeByBatch | None
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
        made, by_batch = self.choice.plan, self.choice.by_batch
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
            "range_within_5_percent": None if by_batch is None else list(by_batch.as_good),
            "best_effective_batch": None if by_batch is None else by_batch.soonest,
            "time_over_soonest": None if by_batch is None else by_batch.over_soonest(made.effective_batch),
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
    in_samples = None if critical is None else critical.in_samples()
    used = None if in_samples is None else value_used(in_samples)
    by_batch = None
    if used is not None and times is not None:
        by_batch = TimeByBatch(used, times, devices, largest, known.samples)
    elif in_samples is not None and used is None:
        assumes.append(f"the critical batch is not known yet: {in_samples}")
        critical = in_samples = None
    if effective_batch is not None:
        wanted = effective_batch
        reasons.append(f"an effective batch of {wanted:,} was asked for")
    elif by_batch is not None:
        wanted = by_batch.soonest
    else:
        wanted = min(largest * devices, known.samples or largest * devices)
        what = "the critical batch" if in_samples is None else "how long a step takes"
        assumes.append(f"{what} was not measured: the effective batch is one micro-batch on each device, not a choice")
    made = plan(wanted, micro_batch=largest, devices=devices, samples=known.samples, times=times)
    if made.effective_batch != wanted:
        reasons.append(f"{made.effective_batch:,} is the nearest to {wanted:,} in equal micro-batches")
    if known.samples is not None and made.effective_batch > known.samples:
        assumes.append(f"the data holds {counted(known.samples, 'sample')}, fewer than one step of this batch takes")
    if by_batch is not None:
        reasons.append(_why_soonest(by_batch, made, in_samples))
    if fits is not None:
        reasons.append(f"micro-batch {fits:,} fits; {known.why_no_larger}")
    is_timed = times is not None and times.covers(made.micro_batch)
    if times is not None and not is_timed:
        timed = sorted(point.micro_batch for point in times.points)
        assumes.append(f"a micro-batch of {made.micro_batch:,} is outside those timed, {timed[0]:,} to {timed[-1]:,}")
    if times is not None and devices > known.timed_devices:
        is_timed = False
        told = counted(known.timed_devices, "device")
        assumes.append(f"{told} ran, {devices:,} were asked for: what they take to talk to each other is left out")
    is_resolved = in_samples is not None and in_samples.resolved
    source = "measured" if by_batch is not None and fits is not None and is_timed and is_resolved else "predicted"
    return Choice(made, by_batch, in_samples or critical, critical_from, tuple(reasons), tuple(assumes), source)


def value_used(critical: CriticalBatch) -> float | None:
    """Return the number to reckon with: the estimate, its lower end where that is infinite, or None."""
    if not critical.resolved and critical.low <= 0:
        return None
    value = critical.value if math.isfinite(critical.value) else critical.low
    return value if value > 0 else None


def _why_soonest(by_batch: TimeByBatch, made: Plan, critical: CriticalBatch | None) -> str:
    low, high = by_batch.as_good
    about = (
        f"{critical}"
        if critical is not None and critical.resolved
        else f"about {figure(by_batch.critical)}: {critical}"
    )
    told = (
        f"{counted(by_batch.soonest, 'sample')} per step would reach the loss soonest at a critical batch of {about}; "
        f"{low:,} to {high:,} are within 5 %"
    )
    if low <= made.effective_batch <= high:
        return told
    return f"{told}, {made.effective_batch:,} takes {by_batch.over_soonest(made.effective_batch):.2f} times as long"


def curve(choice: Choice) -> tuple[dict[str, Any], ...]:
    """Return the time to the loss by batch, each relative to the best batch, with the ends of the critical batch."""
    by_batch, critical = choice.by_batch, choice.critical
    if by_batch is None or critical is None:
        return ()
    best, most = by_batch.soonest, by_batch.samples or math.inf
    steps = range(-2 * _DOUBLINGS, 2 * _DOUBLINGS + 1)
    sizes = sorted({max(round(best * 2 ** (step / 2)), 1) for step in steps} | {choice.plan.effective_batch})
    ends = [replace(by_batch, critical=end) for end in (critical.low, critical.high) if 0 < end < math.inf]
    rows = []
    for size in (size for size in sizes if size <= most):
        ratios = [each.over_soonest(size) for each in (by_batch, *ends)]
        rows.append({"effective_batch": size, "ratio": ratios[0], "low": min(ratios), "high": max(ratios)})
    return tuple(rows)
