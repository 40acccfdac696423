"""The last two sections of a run: the plan and the recommendation, from what the others hold."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from batchwright.errors import BatchwrightError, NotExpressibleError
from batchwright.planning.critical_batch import figure
from batchwright.planning.dialects import FRAMEWORKS
from batchwright.planning.learning_rate import RecommendedRate, rate_by_rule, rate_from_branches
from batchwright.planning.plan import plan
from batchwright.planning.soonest import StepSeconds, TimeToLoss
from batchwright.tuning.run_file import Known, critical_from, is_done
from batchwright.units import LARGEST_COUNT, counted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batchwright.planning.critical_batch import CriticalBatch
    from batchwright.planning.plan import Plan
    from batchwright.tuning.request import Ask


# What would change the answer: twice the memory, twice the devices, checkpointing.
#
# Each is the recommendation made again with another limit: what fits follows from bytes per sample, how long it takes
# from the time model and the critical batch.

# A forward again, where forward and backward are three forwards.
_RECOMPUTING = 4 / 3
# What a model takes whatever the batch.
_FIXED_PARTS = ("weights", "gradients", "optimizer")


@dataclass(frozen=True)
class Change:
    """What another set-up would give."""

    change: str
    micro_batch: int | None = None
    accumulation: int | None = None
    effective_batch: int | None = None
    time_ratio: float | None = None
    """Time to the loss over that of the recommendation."""
    source: str = "predicted"
    note: str = ""


def what_would_change(known: Known, choice: Choice, *, keeps_batch: bool) -> tuple[Change, ...]:
    """Say what each would give; `keeps_batch` where an effective batch was asked for."""
    limit, fit = known.memory_line, choice.plan.max_micro_batch
    found = []
    if known.is_at_limit:
        found.append(Change("twice the memory", note=f"would change nothing: {known.why_no_larger}"))
    elif limit is None:
        found.append(Change("twice the memory", note="needs a limit, and what a sample takes: a fit, or the trace"))
    else:
        size = limit.largest(2 * limit.limit_bytes)
        note = f"micro-batch {size:,} would fit" + (", and larger ones were not asked for" * (size >= limit.limit))
        found.append(_made(known, choice, "twice the memory", note, largest=size, keeps_batch=keeps_batch))
    if known.times is None or choice.by_batch is None:
        found.append(Change("twice the devices", note="needs the critical batch and the time of a step"))
    else:
        note = "without what devices take to talk to each other"
        change = "twice the devices"
        found.append(_made(known, choice, change, note, largest=fit, times_devices=2, keeps_batch=keeps_batch))
    found.append(_checkpointing(known, choice, keeps_batch=keeps_batch))
    return tuple(found)


def _made(
    known: Known,
    choice: Choice,
    change: str,
    note: str,
    *,
    largest: int,
    keeps_batch: bool,
    times_devices: int = 1,
    slower: float = 1.0,
) -> Change:
    devices, now, times = choice.plan.devices * times_devices, choice.by_batch, known.times
    if times is not None:
        times = replace(times, alpha=times.alpha * slower, beta=times.beta * slower)
    then = None
    if now is not None and times is not None:
        then = replace(now, step=StepSeconds(times, devices, largest))
    if keeps_batch:
        wanted = choice.plan.effective_batch
    elif then is not None:
        wanted = then.soonest
    else:
        wanted = min(largest * devices, known.samples or largest * devices)  # as the recommendation itself
    made = plan(wanted, micro_batch=largest, devices=devices, samples=known.samples, times=times)
    ratio = None
    if now is not None and then is not None:
        ratio = then.at(made.effective_batch) / now.at(choice.plan.effective_batch)
    return Change(change, made.micro_batch, made.accumulation, made.effective_batch, ratio, "predicted", note)


def _checkpointing(known: Known, choice: Choice, *, keeps_batch: bool) -> Change:
    change, found, line = "activation checkpointing", known.section("estimate") or {}, known.memory_line
    traced = next((saving for saving in found.get("what_if", ()) if saving["change"] == change), None)
    if traced is None or not traced["peak_bytes"]:
        return Change(change, note=(traced or {}).get("note") or "was not traced")
    peak, at, whole = traced["peak_bytes"], found["micro_batch"], found["peak_bytes"]["allocated"]
    note = f"the peak at micro-batch {at:,} falls to {100 * peak / whole:.0f} %; recomputing taken as a third longer"
    if line is None:
        return Change(change, note=note)
    fixed = sum(found["parts"][name] or 0 for name in _FIXED_PARTS)
    share = max(peak - fixed, 0) / max(whole - fixed, 1)
    size = replace(line, bytes_per_sample=line.bytes_per_sample * share).largest(line.limit_bytes)
    note = f"micro-batch {size:,} would fit: {note}"
    return _made(known, choice, change, note, largest=size, slower=_RECOMPUTING, keeps_batch=keeps_batch)


# The recommendation: micro-batch, accumulation, effective batch, learning rate, and what would change them.
#
# Pure arithmetic over what a run has measured.
#
# Promises:
# - an effective batch that was asked for is kept, as nearly as equal micro-batches allow, and a better one is said;
# - without a critical batch or without times nothing is made up: what is missing, and what stands in for it, is told;
# - every answer says what it rests on, and the range that is as good.

# The curve of the report goes so many doublings to either side of the answer.
_DOUBLINGS = 4


@dataclass(frozen=True)
class Choice:
    """What was found, before it is written down."""

    plan: Plan
    by_batch: TimeToLoss | None
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
    learning_rate: RecommendedRate | None
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
            "learning_rate": None if self.learning_rate is None else self.learning_rate.to_dict(),
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
        by_batch = TimeToLoss(used, StepSeconds(times, devices, largest), most=known.samples or LARGEST_COUNT)
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
    return critical.known_value if critical.known_value > 0 else None


def _why_soonest(by_batch: TimeToLoss, made: Plan, critical: CriticalBatch | None) -> str:
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
    best = by_batch.soonest
    steps = range(-2 * _DOUBLINGS, 2 * _DOUBLINGS + 1)
    sizes = sorted({max(round(best * 2 ** (step / 2)), 1) for step in steps} | {choice.plan.effective_batch})
    ends = [replace(by_batch, critical=end) for end in (critical.low, critical.high) if 0 < end < math.inf]
    rows = []
    for size in (size for size in sizes if size <= by_batch.most):
        ratios = [each.over_soonest(size) for each in (by_batch, *ends)]
        rows.append({"effective_batch": size, "ratio": ratios[0], "low": min(ratios), "high": max(ratios)})
    return tuple(rows)


def recommend_rate(known: Known, choice: Choice) -> RecommendedRate | None:
    """Return the learning rate for the recommended batch, tuned by branches or by a rule; None if nothing tells it."""
    about, noise = known.section("workload") or {}, known.section("noise")
    rate, optimizer, batch = about.get("learning_rate"), about.get("optimizer"), choice.plan.effective_batch
    if rate is None:
        return None
    factors = {
        branch["batch"]: branch["learning_rate_factor"]
        for branch in (known.section("branches") or {}).get("branches", ())
        if branch["mean_steps"] is not None and branch["learning_rate_factor"]
    }
    if factors:
        return rate_from_branches(rate, factors, batch)
    if optimizer is None or noise is None or choice.critical is None:
        return None
    return rate_by_rule(rate, optimizer, noise["effective_batch"], batch, choice.critical)


# Beyond it a line is a rough picture of the step times.
_POOR = 0.15


def advise_run(run: dict[str, Any], ask: Ask) -> None:
    """Write the plan and the recommendation into a run."""
    known = Known(run)
    if known.nothing_fits or (known.micro_batch is None and known.times is None):
        reason = run["fit"]["skipped"] if known.nothing_fits else "neither what fits nor how long a step takes is known"
        run["plan"] = run["recommendation"] = {"skipped": reason}
        return
    critical, origin, note = _critical(run, known)
    try:
        choice = choose(
            known,
            devices=ask.devices,
            effective_batch=ask.effective_batch,
            critical=critical,
            critical_from=origin,
        )
    except BatchwrightError as error:
        run["plan"] = run["recommendation"] = {"skipped": f"failed: {error}"}
        return
    rate = recommend_rate(known, choice)
    advised = Advised(
        name=run["workload"]["name"],
        on=ask.on,
        choice=choice,
        learning_rate=rate,
        seconds_per_step=known.step_seconds(choice.plan),
        time_to_target=curve(choice),
        changes=what_would_change(known, choice, keeps_batch=ask.effective_batch is not None),
        configs=dict(_configs(choice.plan, None if rate is None else rate.recommended)),
        notes=tuple(text for text in (note, _no_rate(known, rate), _poor_line(known)) if text),
    )
    run["plan"], run["recommendation"] = choice.plan.to_dict(), advised.to_dict()


def _critical(run: dict[str, Any], known: Known) -> tuple[CriticalBatch | None, str | None, str]:
    """Return the critical batch, what it rests on, and what has to be said about it."""
    branches, scale = run["branches"], known.noise_scale
    measured = critical_from(branches["critical_batch"]) if is_done(branches) else None
    if measured is not None:
        if measured.resolved or scale is None:
            return measured, "branches", ""
        ratio = branches["ratio"]
        if ratio:
            # Few seeds give a ratio without an interval; a noise scale that was averaged for longer has one.
            times = f"{ratio:.2g} times the noise scale"
            note = f"branches say that the critical batch is {times}; the interval is the latter's"
            scaled = replace(scale, value=scale.value * ratio, low=scale.low * ratio, high=scale.high * ratio)
            return scaled, "branches", note
        # Branches without an upper end are a lower bound: they rule out a noise scale below it, and nothing else.
        bound, in_samples = measured.low, scale.in_samples() or scale
        if bound > 0 and not in_samples.value >= bound:
            return measured, "branches", ""
        note = (
            f"branches found no upper end of the critical batch, so the noise scale, {in_samples}, stands in "
            "for it: more seeds and larger branches measure it"
        )
        return scale, "noise scale", note
    if scale is None:
        return None, None, ""
    note = (
        "the noise scale stands in for the critical batch, which was 2 to 5 times as large on two tasks under AdamW "
        "and momentum: --branches measures it on this one"
    )
    return scale, "noise scale", note


def _no_rate(known: Known, rate: RecommendedRate | None) -> str:
    about = known.section("workload") or {}
    if rate is not None or about.get("optimizer") is None:
        return ""
    why = "groups of parameters have different ones" if about.get("learning_rate") is None else "nothing tells it"
    return f"the learning rate is left as it is: {why}"


def _poor_line(known: Known) -> str:
    error = None if known.times is None else known.times.largest_error
    if error is None or error < _POOR:
        return ""
    return f"the line through the step times misses one by {100 * error:.0f} %: treat times between sizes as rough"


def _configs(plan: Plan, rate: float | None) -> Iterable[tuple[str, str]]:
    for name in FRAMEWORKS:
        try:
            yield name, plan.snippet(name, learning_rate=rate)
        except NotExpressibleError as error:
            yield name, f"# {error.problem}"
