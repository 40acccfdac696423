"""What would change the answer: twice the memory, twice the devices, checkpointing.

Each is the recommendation made again with another limit: what fits follows from bytes per sample, how long it takes
from the time model and the critical batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from batchwright.planning.plan import plan

if TYPE_CHECKING:
    from batchwright.tuning.known import Known
    from batchwright.tuning.recommendation import Choice

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
        then = replace(now, times=times, devices=devices, largest=largest)
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
