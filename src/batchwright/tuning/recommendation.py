"""The last two sections of a run, the plan and the recommendation: pure arithmetic over what the others measured.

Promises:
- an effective batch that was asked for is kept, as nearly as equal micro-batches allow, and a better one is named;
- without a critical batch or without times nothing is made up: the answer names what is missing and what stands in;
- every answer says what it rests on, and the range that is as good;
- what would change the answer (twice the memory, twice the devices, checkpointing) is the recommendation made again
  with another limit: what fits follows from bytes per sample, how long it takes from the one model of soonest.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from batchwright.errors import BatchwrightError, InvalidInputError, NotExpressibleError
from batchwright.planning.critical_batch import CriticalBatch, averaged, figure, pooled
from batchwright.planning.dialects import FRAMEWORKS
from batchwright.planning.horizon import Horizon, find_horizon
from batchwright.planning.learning_rate import (
    RecommendedRate,
    rate_by_rule,
    rate_from_branches,
    rate_from_race,
    rate_from_sweep,
)
from batchwright.planning.likely_time import CHANCE, LikelyTime
from batchwright.planning.plan import Plan, plan
from batchwright.planning.time_to_loss import StepSeconds, TimeToLoss
from batchwright.tuning.run_file import Measured, Run
from batchwright.units import LARGEST_COUNT, counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from batchwright.planning.horizon import Course
    from batchwright.planning.times import TimeModel
    from batchwright.tuning.run_file import BranchEstimate
    from batchwright.tuning.tune import TuneRequest

# The curve of the report goes so many doublings to either side of the answer.
_DOUBLINGS = 4
# A forward again, where forward and backward are three forwards.
_RECOMPUTING = 4 / 3
_HARDLY_LONGER = 1.005
# So many times what was trained is far.
_FAR = 4.5
# Beyond it a line is a rough picture of the step times.
_POOR = 0.15
_CHECKPOINTING = "activation checkpointing"
# Twice the devices pay where the run gets faster by 2 to this power, a third.
_PAYS = math.log2(4 / 3)


@dataclass(frozen=True)
class CriticalUsed:
    """The critical batch to reckon with, what it rests on, and what to know about it."""

    critical: CriticalBatch | None = None
    origin: str | None = None
    note: str = ""


@dataclass(frozen=True)
class Choice:
    """The split that was chosen, and why."""

    plan: Plan
    likely: LikelyTime | None
    """None if the critical batch or the time of a step is not known."""
    critical: CriticalBatch | None
    critical_from: str | None
    reasons: tuple[str, ...]
    assumes: tuple[str, ...]
    source: str


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


def advise_run(run: Run, request: TuneRequest) -> None:
    """Write the plan and the recommendation into a run."""
    measured = Measured.read(run)
    if measured.nothing_fits or (measured.micro_batch is None and measured.times is None):
        unknown = "neither what fits nor how long a step takes is known"
        run["plan"] = run["recommendation"] = {"skipped": run["fit"]["skipped"] if measured.nothing_fits else unknown}
        return
    try:
        horizon, why_not = plan_horizon(measured, request)
        used = pick_critical(measured, horizon, request.critical_batch)
        choice = choose(
            measured,
            used,
            devices=request.devices,
            effective_batch=request.effective_batch,
            until=horizon.words if horizon else "",
        )
    except BatchwrightError as error:
        run["plan"] = run["recommendation"] = {"skipped": f"failed: {error}"}
        return
    split, likely, critical = choice.plan, choice.likely, choice.critical
    rate = recommend_rate(measured, choice, choice.plan.effective_batch)
    seconds = None if measured.throughput is None else measured.throughput.step_seconds(split)
    # What other set-ups would give.
    others = (_with_twice_the_memory, _with_twice_the_devices, _with_checkpointing)
    changes = [compare(measured, choice, keeps_batch=request.effective_batch is not None) for compare in others]
    run["plan"] = split.to_dict()
    run["recommendation"] = {
        "schema": 1,
        "source": choice.source,
        "name": run["workload"]["name"],
        "on": request.on,
        "devices": split.devices,
        "micro_batch": split.micro_batch,
        "accumulation": split.accumulation,
        "effective_batch": split.effective_batch,
        "range_within_5_percent": likely and likely.as_good and list(likely.as_good),
        "chance_within_5_percent": likely and likely.chance(split.effective_batch),
        "best_effective_batch": likely and likely.soonest,
        "time_over_soonest": likely and likely.over_soonest(split.effective_batch),
        "learning_rate": None if rate is None else asdict(rate),
        "critical_batch": None if critical is None else critical.to_dict(),
        "critical_batch_from": choice.critical_from,
        "horizon": horizon and horizon.to_dict(),
        "seconds_per_step": seconds,
        "samples_per_second": None if seconds is None else split.effective_batch / seconds,
        "time_to_target": trace_curve(choice),
        "in_short": _in_short(
            choice, changes, is_chosen=request.effective_batch is not None or measured.race is not None
        ),
        "by_devices": compare_devices(measured, choice),
        "run": cost_of_run(measured, request, split, seconds),
        "reasons": list(choice.reasons),
        "assumes": list(choice.assumes),
        "changes": [asdict(change) for change in changes],
        "configs": dict(_configs(split, None if rate is None else rate.recommended)),
        "notes": [
            text
            for text in (
                why_not,
                _way_to(horizon),
                used.note,
                _no_rate(measured, rate),
                _poor_line(measured),
            )
            if text
        ],
    }


def plan_horizon(measured: Measured, request: TuneRequest) -> tuple[Horizon | None, str]:
    """Return until where the run is meant to go, and why not until where it was asked for."""
    course = None if measured.noise is None else measured.noise.course
    if course is None or not course.is_known:
        names = [name.replace("_", " ") for name, value in request.horizon.items() if value is not None]
        why = f"the horizon ({names[0]}) changes nothing: no trend of the noise scale was measured" if names else ""
        return None, why
    times, devices = measured.times, request.devices
    seconds_to: Callable[[CriticalBatch, float], float] | None = None
    if times is not None:
        step = StepSeconds(times, devices, largest_micro_batch(measured))

        def seconds_to(critical: CriticalBatch, progress: float) -> float:
            curve = TimeToLoss(critical.known_value, step, most=measured.samples or LARGEST_COUNT)
            return progress * curve.at(curve.soonest)

    given: dict[str, Any] = {name: value for name, value in request.horizon.items() if value is not None}
    try:
        return find_horizon(course, **given, data=measured.samples, seconds_to=seconds_to), ""
    except InvalidInputError as error:
        usual = find_horizon(course, data=measured.samples, is_refused=True)
        return usual, f"the horizon that was asked for is left out: {error.problem.rstrip('.')}"


def pick_critical(measured: Measured, horizon: Horizon | None, given: float | None = None) -> CriticalUsed:
    """Pick the critical batch: the one given; by branches and the noise scale together, or the one that is known.

    Those measured are of the beginning of a run; the course of the noise scale carries them on to the horizon.
    """
    if given is not None:
        return CriticalUsed(CriticalBatch(given, given, given, "samples", 0, evidence="given"), "given")
    scale = None if measured.noise is None else measured.noise.noise_scale
    course = None if measured.noise is None else measured.noise.course
    if scale is not None and course is not None and horizon is not None and _usable_value(course.last) is not None:
        scale = course.until(horizon.steps)
    if measured.branches is None:
        note = "the noise scale stands in for the critical batch; short branches at several batches measure that itself"
        return CriticalUsed() if scale is None else CriticalUsed(scale, "noise scale", note)
    in_samples = None if scale is None else scale.in_samples()
    if in_samples is not None and _usable_value(in_samples) is None:
        in_samples = None
    estimates = measured.branches.estimates
    carried = [_carried(estimate, course if in_samples else None, horizon) for estimate in estimates]
    finite = [estimate for estimate in carried if math.isfinite(estimate.value)]
    if finite:
        along = averaged(finite)
        if in_samples is None:
            return CriticalUsed(along, "branches")
        return CriticalUsed(pooled([in_samples, along]), "noise scale and branches")
    # Branches without a value are a lower bound: they rule out a noise scale below it, and nothing else.
    bound = max(carried, key=lambda estimate: estimate.low)
    if in_samples is None or in_samples.value < bound.low:
        return CriticalUsed(bound, "branches")
    note = f"branches found no upper end of the critical batch, so the noise scale, {in_samples}, stands in for it"
    return CriticalUsed(scale, "noise scale", f"{note}: more seeds and larger branches measure it")


def _carried(estimate: BranchEstimate, course: Course | None, horizon: Horizon | None) -> CriticalBatch:
    """Return what branches measured, carried on to the horizon by the course of the noise scale."""
    critical = estimate.critical_batch
    if course is None or not math.isfinite(critical.value):
        return critical
    if not critical.resolved:  # few seeds: what such estimates were off by elsewhere is the larger part
        critical = replace(critical, low=critical.value, high=critical.value)
    if estimate.end is None or horizon is None:
        return critical
    begin, end = estimate.begin / course.batch, estimate.end / course.batch
    growth, error = course.growth(end, horizon.steps, begin=begin)
    return critical.grown(growth, error)


def largest_micro_batch(measured: Measured) -> int:
    """Return what fits; where that is not known, the fastest size that ran."""
    fastest = None if measured.throughput is None else measured.throughput.fastest_micro_batch
    return measured.micro_batch or fastest or 1


def choose(
    measured: Measured, used: CriticalUsed, *, devices: int, effective_batch: int | None, until: str = ""
) -> Choice:
    """Choose the split from what was measured; `until` says where the run is to end."""
    fit, throughput, times, samples = measured.fit, measured.throughput, measured.times, measured.samples
    reasons, assumes = [], []
    fits = measured.micro_batch
    largest = largest_micro_batch(measured)
    if fits is None:
        assumes.append(f"what fits was not measured: micro-batches up to {largest:,} are taken to fit")
    critical = used.critical
    in_samples = None if critical is None else critical.in_samples()
    value = None if in_samples is None else _usable_value(in_samples)
    likely = None
    if in_samples is not None and value is not None and times is not None:
        likely = LikelyTime.of(in_samples, StepSeconds(times, devices, largest), most=samples or LARGEST_COUNT)
    elif in_samples is not None and value is None:
        assumes.append(f"the critical batch is not known yet: {in_samples}")
        critical = in_samples = None
    race = measured.race
    if race is not None:
        ends = "" if race.reaches_horizon else " (it ended before the horizon, and is carried on to there)"
        reasons.append(f"{race.summary}{ends}")
        likely = likely and replace(likely, raced=race.shown)
    if effective_batch is not None:
        wanted = effective_batch
        reasons.append(f"an effective batch of {wanted:,} was asked for")
    elif likely is not None:
        wanted = likely.soonest
        if race is not None and race.reaches_horizon and likely.over_soonest(race.winner) < _HARDLY_LONGER:
            wanted = race.winner
    elif race is not None:
        wanted = race.winner
    else:
        wanted = min(largest * devices, samples or largest * devices)
        missing = "the critical batch" if in_samples is None else "how long a step takes"
        assumes.append(
            f"{missing} was not measured: the effective batch is one micro-batch on each device, not a choice"
        )
    split = plan(wanted, micro_batch=largest, devices=devices, samples=samples, times=times)
    if split.effective_batch != wanted:
        reasons.append(f"{split.effective_batch:,} is the nearest to {wanted:,} in equal micro-batches")
    if samples is not None and split.effective_batch > samples:
        assumes.append(f"the data holds {counted(samples, 'sample')}, fewer than one step of this batch takes")
    if likely is not None and in_samples is not None:
        by_model = _soonest_reason(likely, split, in_samples, until)
        reasons.append(by_model if race is None else f"with the race: {by_model}")
    if fit is not None and fits is not None:
        reasons.append(f"micro-batch {fits:,} fits; {fit.reason}")
    is_timed = times is not None and times.covers(split.micro_batch)
    if times is not None and not is_timed:
        timed = sorted(point.micro_batch for point in times.points)
        assumes.append(f"a micro-batch of {split.micro_batch:,} is outside those timed, {timed[0]:,} to {timed[-1]:,}")
    if throughput is not None and devices > throughput.devices:
        is_timed = False
        ran = counted(throughput.devices, "device")
        assumes.append(f"{ran} ran, {devices:,} were asked for: communication between them is left out")
    is_resolved = in_samples is not None and in_samples.resolved
    is_timed = is_timed and not (throughput is not None and throughput.is_predicted)
    source = "measured" if likely is not None and fits is not None and is_timed and is_resolved else "predicted"
    return Choice(split, likely, in_samples or critical, used.origin, tuple(reasons), tuple(assumes), source)


def _usable_value(critical: CriticalBatch) -> float | None:
    if not critical.resolved and critical.low <= 0:
        return None
    return critical.likely().value if critical.known_value > 0 else None


def _soonest_reason(likely: LikelyTime, split: Plan, critical: CriticalBatch, until: str) -> str:
    about = "" if critical.resolved else f"about {figure(likely.curve.critical)}: "
    reason = f"{counted(likely.soonest, 'sample')} per step would reach the loss soonest"
    if until:
        reason += f" ({until})"
    if critical.evidence == "given":
        reason += f" at a critical batch of {about}{critical}"
    else:
        reason += (
            f": the {critical.evidence} is {critical}, and with what such estimates were off by elsewhere the critical "
            f"batch is {about}{critical.widened()}"
        )
    if likely.as_good is None:
        reason += f"; within 5 % of the best with a chance of {100 * likely.chance(likely.soonest):.0f} % only"
    else:
        reason += "; {:,} to {:,} are within 5 % with a chance of {:.0f} %".format(*likely.as_good, 100 * CHANCE)
        if likely.as_good[0] <= split.effective_batch <= likely.as_good[1]:
            return reason
    over = likely.over_soonest(split.effective_batch)
    return reason if over < _HARDLY_LONGER else f"{reason}, {split.effective_batch:,} takes {over:.2f} times as long"


def trace_curve(choice: Choice) -> list[dict[str, float]]:
    """Return the time to the loss at batches around the best, over that at the best, and where it lies with 80 %."""
    likely = choice.likely
    if likely is None:
        return []
    steps = range(-2 * _DOUBLINGS, 2 * _DOUBLINGS + 1)
    sizes = {max(round(likely.soonest * 2 ** (step / 2)), 1) for step in steps} | {choice.plan.effective_batch}
    points = []
    for size in sorted(size for size in sizes if size <= likely.curve.most):
        low, high = likely.between(size)
        points.append({"effective_batch": size, "ratio": likely.over_soonest(size), "low": low, "high": high})
    return points


def compare_devices(measured: Measured, choice: Choice) -> dict[str, Any] | None:
    """Return the time to the loss on other numbers of devices, and from where on one more stops paying.

    Each at its own soonest batch. Twice the devices pay if they make the run a third faster: then it costs at most half
    as much again.
    """
    throughput, likely = measured.throughput, choice.likely
    if throughput is None or likely is None or len(throughput.by_devices) < 2:
        return None
    rows: list[dict[str, Any]] = []
    for devices, times in throughput.by_devices:
        step = StepSeconds(times, devices, likely.curve.step.micro_batch)
        curve = replace(likely.curve, step=step)
        batch = curve.soonest
        rows.append({"devices": devices, "effective_batch": batch, "time": curve.at(batch), "step": step.at(batch)})
    first = rows[0]["time"]
    worth = rows[0]["devices"]
    for before, after in pairwise(rows):
        if before["time"] / after["time"] < (after["devices"] / before["devices"]) ** _PAYS:
            break
        worth = after["devices"]
    shown = [
        {
            "devices": row["devices"],
            "effective_batch": row["effective_batch"],
            "seconds_per_step": row["step"],
            "samples_per_second": row["effective_batch"] / row["step"],
            "time_over_one": row["time"] / first,
        }
        for row in rows
    ]
    return {"source": "predicted", "rows": shown, "worth": worth}


def cost_of_run(measured: Measured, request: TuneRequest, split: Plan, seconds: float | None) -> dict[str, Any] | None:
    """Return hours and cost of the run, each with its interval; None where nothing says how long it is."""
    if seconds is None or (request.samples is None and request.hours is None):
        return None
    low, high = (1.0, 1.0) if measured.throughput is None else measured.throughput.interval
    if request.samples is not None:
        hours = request.samples / split.effective_batch * seconds / 3600
        span = [hours * low, hours * high]
    else:
        assert request.hours is not None
        hours, span = request.hours, [request.hours] * 2
    price = request.price_per_hour
    hourly = None if price is None else price * split.devices
    return {
        "hours": hours,
        "hours_interval": span,
        "price_per_hour": price,
        "cost": None if hourly is None else hours * hourly,
        "cost_interval": None if hourly is None else [amount * hourly for amount in span],
    }


def seconds_to_horizon(measured: Measured, choice: Choice, horizon: Horizon | None, step: StepSeconds) -> float | None:
    """Return how long the chosen batch takes to the horizon, counted; None if that is not known."""
    if measured.noise is None or measured.noise.course is None or horizon is None or choice.likely is None:
        return None
    batch = choice.plan.effective_batch
    return measured.noise.course.progress(horizon.steps) * choice.likely.curve.steps_at(batch) * step.at(batch)


def recommend_rate(measured: Measured, choice: Choice, batch: int) -> RecommendedRate | None:
    """Return the learning rate for a batch, tuned by a race, branches or a sweep, or by a rule; None without any."""
    workload = measured.workload
    if workload is None or workload.learning_rate is None:
        return None
    now, ruled = workload.learning_rate, None
    if measured.race is not None and measured.race.reaches_horizon:
        return rate_from_race(now, measured.race.factors, batch)
    if workload.optimizer is not None and measured.noise is not None and choice.critical is not None:
        before = measured.noise.effective_batch
        ruled = rate_by_rule(now, workload.optimizer, before, batch, choice.critical)
    swept, branches = measured.rate, measured.branches
    if swept is not None and swept.batch == batch:
        return rate_from_sweep(now, swept.factor, batch, swept.open_sides, ruled)
    if branches is not None and branches.factors:
        return rate_from_branches(now, branches.factors, batch, ruled)
    return ruled


def _with_twice_the_memory(measured: Measured, choice: Choice, *, keeps_batch: bool) -> Change:
    change, line, fit = "twice the memory", measured.memory_line, measured.fit
    if fit is not None and fit.micro_batch is not None and fit.micro_batch == fit.limit:
        return Change(change, note=f"would change nothing: {fit.reason}")
    if line is None:
        return Change(change, note="needs a limit, and what a sample takes: a fit, or the trace")
    size = line.largest(2 * line.limit_bytes)
    note = f"micro-batch {size:,} would fit" + (", and larger ones were not asked for" * (size >= line.limit))
    return _choose_again(measured, choice, Change(change, note=note), largest=size, keeps_batch=keeps_batch)


def _with_twice_the_devices(measured: Measured, choice: Choice, *, keeps_batch: bool) -> Change:
    change, largest = "twice the devices", choice.plan.max_micro_batch
    if choice.likely is None:
        return Change(change, note="needs the critical batch and the time of a step")
    predicted = () if measured.throughput is None else measured.throughput.by_devices
    times = dict(predicted).get(2 * choice.plan.devices)
    doubled = Change(change, note="without communication between devices" if times is None else "")
    return _choose_again(
        measured, choice, doubled, largest=largest, times_devices=2, times=times, keeps_batch=keeps_batch
    )


def _with_checkpointing(measured: Measured, choice: Choice, *, keeps_batch: bool) -> Change:
    estimate, line = measured.estimate, measured.memory_line
    if estimate is None or not estimate.checkpointing_peak_bytes:
        return Change(_CHECKPOINTING, note="was not traced" if estimate is None else estimate.checkpointing_note)
    peak, whole, fixed = estimate.checkpointing_peak_bytes, estimate.peak_bytes, estimate.fixed_bytes
    falls = f"the peak at micro-batch {estimate.micro_batch:,} falls to {100 * peak / whole:.0f} %"
    note = f"{falls}; recomputing taken as a third longer"
    if line is None:
        return Change(_CHECKPOINTING, note=note)
    share = max(peak - fixed, 0) / max(whole - fixed, 1)
    size = replace(line, bytes_per_sample=line.bytes_per_sample * share).largest(line.limit_bytes)
    change = Change(_CHECKPOINTING, note=f"micro-batch {size:,} would fit: {note}")
    return _choose_again(measured, choice, change, largest=size, slower=_RECOMPUTING, keeps_batch=keeps_batch)


def _choose_again(
    measured: Measured,
    choice: Choice,
    change: Change,
    *,
    largest: int,
    keeps_batch: bool,
    times_devices: int = 1,
    times: TimeModel | None = None,
    slower: float = 1.0,
) -> Change:
    """Fill in what a change would give if micro-batches up to `largest` fit, and passes take `times`."""
    devices, samples = choice.plan.devices * times_devices, measured.samples
    times = times or measured.times
    if times is not None:
        times = replace(times, alpha=times.alpha * slower, beta=times.beta * slower)
    changed = None
    if choice.likely is not None and times is not None:
        curve = replace(choice.likely.curve, step=StepSeconds(times, devices, largest))
        changed = replace(choice.likely, curve=curve)
    if keeps_batch:
        wanted = choice.plan.effective_batch
    elif changed is not None:
        wanted = changed.soonest
    else:
        wanted = min(largest * devices, samples or largest * devices)  # as the recommendation itself
    split = plan(wanted, micro_batch=largest, devices=devices, samples=samples, times=times)
    ratio = None
    if choice.likely is not None and changed is not None:
        ratio = changed.curve.at(split.effective_batch) / choice.likely.curve.at(choice.plan.effective_batch)
    return replace(
        change,
        micro_batch=split.micro_batch,
        accumulation=split.accumulation,
        effective_batch=split.effective_batch,
        time_ratio=ratio,
    )


def _no_rate(measured: Measured, rate: RecommendedRate | None) -> str:
    workload = measured.workload
    if rate is not None or workload is None or workload.optimizer is None:
        return ""
    if workload.learning_rate is None and measured.race is not None and measured.race.reaches_horizon:
        raced = measured.race.factors
        return f"multiply the learning rate of every group by {raced[measured.race.winner]:.3g}, as in the race"
    if workload.learning_rate is None and measured.rate is not None:
        tried = f"as in short trainings at batch {measured.rate.batch:,}"
        return f"multiply the learning rate of every group by {measured.rate.factor:.3g}, {tried}"
    reason = (
        "groups of parameters have different ones"
        if workload.learning_rate is None
        else "neither branches nor a rule gives another"
    )
    return f"the learning rate is left as it is: {reason}"


def _way_to(horizon: Horizon | None) -> str:
    """What is special about a horizon that is far beyond what was trained, or before its end."""
    if horizon is None or 1 <= horizon.times_trained < _FAR:
        return ""
    if horizon.times_trained < 1:
        reached = f"after {counted(round(horizon.steps), 'step')}"
        return (
            f"the horizon was passed while the noise was measured, {reached}: the answer is for a run that ends there"
        )
    times = figure(horizon.times_trained)
    return (
        f"the horizon is {times} times as far as what was trained: the critical batch is carried on to it as it grew "
        "on other tasks"
    )


def _in_short(choice: Choice, changes: Sequence[Change], *, is_chosen: bool) -> str:
    """Say in one sentence what to use, what is as good, and what would change it.

    `is_chosen` means that the batch was asked for or won a race, whatever is known of times.
    """
    batch, likely = choice.plan.effective_batch, choice.likely
    use = f"use {counted(batch, 'sample')} per step"
    if likely is None:
        missing = "for a recommendation the critical batch and the time of a step must be measured or given"
        if is_chosen:
            return f"{use}; {missing}"
        return f"{counted(batch, 'sample')} per step are one micro-batch on each device, no recommendation: {missing}"
    good = likely.as_good
    if good is None:
        return (
            f"{use}, which is within 5 % of the soonest with a chance of {100 * likely.chance(batch):.0f} %; no range "
            "around it is sure to be as good, and branches or a race, which tell the critical batch better, may change "
            "it"
        )
    as_good = "nothing else is as good" if good[0] == good[1] else f"{good[0]:,} to {good[1]:,} are as good"
    larger = [change for change in changes if change.effective_batch and change.effective_batch > good[1]]
    others = " and ".join(f"{change.change} ({change.effective_batch:,})" for change in larger)
    return f"{use}; {as_good}; {f'{others} or ' if others else ''}another horizon would change it"


def _poor_line(measured: Measured) -> str:
    error = None if measured.times is None else measured.times.largest_error
    if error is None or error < _POOR:
        return ""
    return f"the line through the step times misses one by {100 * error:.0f} %: treat times between sizes as rough"


def _configs(split: Plan, rate: float | None) -> Iterable[tuple[str, str]]:
    for name in FRAMEWORKS:
        try:
            yield name, split.snippet(name, learning_rate=rate)
        except NotExpressibleError as error:
            yield name, f"# {error.problem}"
