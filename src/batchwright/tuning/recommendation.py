"""The last two sections of a run, the plan and the recommendation: pure arithmetic over what the others measured.

Promises:
- every answer says what it rests on, the range that is as good, and a better batch where another was asked for;
- what would change the answer (twice the memory, twice the devices, checkpointing) is the recommendation made again
  with another limit: what fits follows from bytes per sample, how long it takes from the one model of soonest.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from batchwright.errors import BatchwrightError, NotExpressibleError
from batchwright.planning.critical_batch import figure
from batchwright.planning.dialects import FRAMEWORKS
from batchwright.planning.plan import Plan, plan
from batchwright.planning.time_to_loss import StepSeconds
from batchwright.tuning.choice import Choice, choose, pick_critical, plan_horizon, recommend_rate
from batchwright.tuning.run_file import Measured, Run
from batchwright.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from batchwright.planning.horizon import Horizon
    from batchwright.planning.learning_rate import RecommendedRate
    from batchwright.planning.times import TimeModel
    from batchwright.tuning.tune import TuneRequest

# The curve of the report goes so many doublings to either side of the answer.
_DOUBLINGS = 4
# A forward again, where forward and backward are three forwards.
_RECOMPUTING = 4 / 3
# So many times what was trained is far.
_FAR = 4.5
# Beyond it a line is a rough picture of the step times.
_POOR = 0.15
_CHECKPOINTING = "activation checkpointing"
# Twice the devices pay where the run gets faster by 2 to this power, a third.
_PAYS = math.log2(4 / 3)


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
    advised = recommend_rate(measured, choice, choice.plan.effective_batch)
    rate = None if measured.workload is None or measured.workload.learning_rate is None else advised
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
                _on_rates(measured, advised),
                _poor_line(measured),
            )
            if text
        ],
    }


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


def _on_rates(measured: Measured, advised: RecommendedRate | None) -> str:
    """What is to know of the learning rate beside the one that is recommended."""
    workload, swept = measured.workload, measured.rate
    if workload is None or workload.optimizer is None:
        return ""
    if advised is not None:
        if workload.learning_rate is not None:
            return ""
        factor = f"{advised.factor:.3g} [{advised.low:.3g}, {advised.high:.3g}]"
        return f"multiply the learning rate of every group of parameters by {factor}: {advised.rule}"
    if swept is not None and swept.factor is None:
        return (
            f"no learning rate is recommended: at none that was tried did the loss of batch {swept.batch:,} come down "
            "in a short training; a lower one in the workload may"
        )
    return "the learning rate is left as it is: neither branches nor a rule gives another"


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
        has_branches = "branches" in (choice.critical_from or "")
        better, tell = ("a race", "tells") if has_branches else ("branches or a race", "tell")
        return (
            f"{use}, which is within 5 % of the soonest with a chance of {100 * likely.chance(batch):.0f} %; no range "
            f"around it is sure to be as good, and {better}, which {tell} the critical batch better, may change it"
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
