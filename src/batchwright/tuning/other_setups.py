"""What would change the answer: twice the memory, twice the devices, checkpointing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchwright.noise.efficiency import time_to_loss
from batchwright.planning.plan import plan
from batchwright.tuning.recommendation import soonest

if TYPE_CHECKING:
    from batchwright.planning.plan import Plan
    from batchwright.tuning.known import Known
    from batchwright.tuning.recommendation import Choice


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


def what_would_change(known: Known, choice: Choice, devices: int) -> tuple[Change, ...]:
    """Say what twice the memory, twice the devices and checkpointing would give."""
    return (_twice_the_memory(known, choice), _twice_the_devices(known, choice, devices), _checkpointing(known))


def _twice_the_memory(known: Known, choice: Choice) -> Change:
    fit = known.section("fit")
    line, limit = (fit or {}).get("line"), (fit or {}).get("limit_bytes")
    if not line or not limit or line["bytes_per_sample"] <= 0:
        return Change("twice the memory", note="what fits was not measured under a limit")
    size = min(int((2 * limit - line["fixed_bytes"]) // line["bytes_per_sample"]), fit["limit"] if fit else 0)
    made = plan(choice.plan.effective_batch, micro_batch=size, devices=choice.plan.devices, times=known.times)
    ratio = _step_ratio(known, choice, made)
    note = f"micro-batch {size:,} would fit" + ("" if ratio is None else "; the effective batch stays")
    return Change(
        "twice the memory", made.micro_batch, made.accumulation, made.effective_batch, ratio, "predicted", note
    )


def _twice_the_devices(known: Known, choice: Choice, devices: int) -> Change:
    times, best = known.times, choice.best
    if times is None or best is None or choice.critical is None:
        return Change("twice the devices", note="needs the critical batch and the time of a step")
    more = soonest(choice.critical, times, 2 * devices, choice.plan.max_micro_batch)
    wanted = more.in_micro_batches or more.value
    made = plan(wanted, micro_batch=choice.plan.max_micro_batch, devices=2 * devices, times=times)
    line, other = best.step_seconds, more.step_seconds
    ratio = time_to_loss(made.effective_batch, best.noise_scale, other.fixed, other.per_sample) / time_to_loss(
        choice.plan.effective_batch, best.noise_scale, line.fixed, line.per_sample
    )
    note = "without what devices take to talk to each other"
    return Change(
        "twice the devices", made.micro_batch, made.accumulation, made.effective_batch, ratio, "predicted", note
    )


def _checkpointing(known: Known) -> Change:
    found = known.section("estimate") or {}
    for saving in found.get("what_if", ()):
        if "checkpoint" in saving["change"] and saving["peak_bytes"]:
            share = saving["peak_bytes"] / found["peak_bytes"]["allocated"]
            note = (
                f"the peak at micro-batch {found['micro_batch']:,} falls to {100 * share:.0f} % of it; "
                "recomputing takes about a third longer"
            )
            return Change("activation checkpointing", source="predicted", note=note)
    return Change("activation checkpointing", note="was not traced")


def _step_ratio(known: Known, choice: Choice, made: Plan) -> float | None:
    times = known.times
    if times is None:
        return None
    return times.step_seconds(made.split) / times.step_seconds(choice.plan.split)
