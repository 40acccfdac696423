"""The batch to use: the critical batch to reckon with, until where, the split that follows, and its learning rate.

Promises:
- an effective batch that was asked for is kept, as nearly as equal micro-batches allow;
- a critical batch is carried on to the horizon, and what several parts measured counts by how sure it is;
- without a critical batch or without times nothing is made up: the answer names what is missing and what stands in;
- every choice says what it rests on and what it assumes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from batchwright.errors import InvalidInputError
from batchwright.planning.critical_batch import CriticalBatch, averaged, figure, pooled
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
from batchwright.units import LARGEST_COUNT, counted

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchwright.planning.horizon import Course
    from batchwright.tuning.run_file import BranchEstimate, Measured
    from batchwright.tuning.tune import TuneRequest

_HARDLY_LONGER = 1.005


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
        along, note = averaged(finite), ""
        endless = [estimate for estimate in carried if not math.isfinite(estimate.value)]
        if endless:  # a bound below what the others say adds nothing, one above it is as much as is known
            least = max(estimate.low for estimate in endless)
            along = replace(along, value=max(along.value, least), high=max(along.high, least))
            note = (
                f"branches from {counted(len(endless), 'place')} of the run found no upper end: {figure(least)} or more"
            )
        if in_samples is None:
            return CriticalUsed(along, "branches", note)
        return CriticalUsed(pooled([in_samples, along]), "noise scale and branches", note)
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
    return critical.likely().value if 0 < critical.known_value < math.inf else None


def _soonest_reason(likely: LikelyTime, split: Plan, critical: CriticalBatch, until: str) -> str:
    about = "" if critical.resolved else f"about {figure(likely.curve.critical)}: "
    reason = f"{counted(likely.soonest, 'sample')} per step would reach the loss soonest"
    if until:
        reason += f" ({until})"
    if critical.evidence == "given":
        reason += f" at a critical batch of {about}{critical}"
    elif critical.widened().spread == critical.spread:
        reason += f": by {critical.evidence} the critical batch is {about}{critical}"
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


def seconds_to_horizon(measured: Measured, choice: Choice, horizon: Horizon | None, step: StepSeconds) -> float | None:
    """Return how long the chosen batch takes to the horizon, counted; None if that is not known."""
    if measured.noise is None or measured.noise.course is None or horizon is None or choice.likely is None:
        return None
    batch = choice.plan.effective_batch
    return measured.noise.course.progress(horizon.steps) * choice.likely.curve.steps_at(batch) * step.at(batch)


def recommend_rate(measured: Measured, choice: Choice, batch: int) -> RecommendedRate | None:
    """Return the learning rate for a batch, tuned by a race, branches or a sweep, or by a rule; None without any.

    Where groups of parameters have different rates it is what to multiply them by: a rate of 1 now.
    """
    workload = measured.workload
    if workload is None or workload.optimizer is None:
        return None
    now, ruled = 1.0 if workload.learning_rate is None else workload.learning_rate, None
    if measured.race is not None and measured.race.reaches_horizon:
        return rate_from_race(now, measured.race.factors, batch)
    if measured.noise is not None and choice.critical is not None:
        before = measured.noise.effective_batch
        ruled = rate_by_rule(now, workload.optimizer, before, batch, choice.critical)
    swept, branches = measured.rate, measured.branches
    if swept is not None and swept.batch == batch:
        if swept.factor is None:
            return None
        return rate_from_sweep(now, swept.factor, batch, swept.open_sides, ruled, too_high=swept.too_high)
    if branches is not None and branches.factors:
        return rate_from_branches(now, branches.factors, batch, ruled)
    return ruled
