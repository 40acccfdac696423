"""A plan as text: one line, or the comparison table with what has to be said about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchwright.report.tables import draw_table
from batchwright.units import counted, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from batchwright.planning.plan import Plan
    from batchwright.planning.table import Row
    from batchwright.planning.times import TimeModel
    from batchwright.report.html import Columns


def summarize_plan(plan: Plan) -> str:
    """Say the plan in one line.

    >>> from batchwright.planning.plan import plan
    >>> summarize_plan(plan(1024, micro_batch=48, devices=4))
    'micro-batch 43 x accumulation 6 x devices 4 = effective batch 1,032 (8 more than the 1,024 asked for)'
    """
    size = _size(plan.split.smallest, plan.split.largest)
    line = (
        f"micro-batch {size} x accumulation {plan.accumulation:,} x devices {plan.devices:,} "
        f"= effective batch {plan.effective_batch:,}"
    )
    if not plan.difference:
        return line
    direction = "more" if plan.difference > 0 else "fewer"
    return f"{line} ({abs(plan.difference):,} {direction} than the {plan.requested_batch:,} asked for)"


def plan_columns(plan: Plan) -> Columns:
    """The comparison table as headed columns of text; columns that nothing is known about are left out."""
    rows = plan.table
    columns = [
        ("micro-batch", [_size(row.smallest_micro_batch, row.micro_batch) for row in rows]),
        ("accumulation", [f"{row.accumulation:,}" for row in rows]),
        ("effective\nbatch", [f"{row.effective_batch:,}" for row in rows]),
    ]
    if plan.epoch:
        columns.append(("forwards\n/epoch", [f"{row.forwards_per_epoch:,}" for row in rows]))
        columns.append(("updates\n/epoch", [f"{row.updates_per_epoch:,}" for row in rows]))
    columns.append(("relative\ntime", [_time(row) for row in rows]))
    columns.append(("activations", [f"{row.relative_activations:.3g}x" for row in rows]))
    if any(row.peak_bytes is not None for row in rows):
        columns.append(("peak", [format_bytes(row.peak_bytes or 0) for row in rows]))
    return columns


def plan_remarks(plan: Plan) -> Iterator[str]:
    """What has to be said below the table, a line each."""
    yield f"why: {plan.reason}."
    if plan.epoch:
        yield from _epoch_remarks(plan)
    yield _times_remark(plan.times, any(row.is_extrapolated for row in plan.table))
    for note in plan.notes:
        yield f"note: {note}."


def draw_plan(plan: Plan) -> RenderableType:
    """Draw the plan for a terminal."""
    return draw_table(summarize_plan(plan), plan_columns(plan), plan_remarks(plan))


def _size(smallest: int, largest: int) -> str:
    return f"{largest:,}" if smallest == largest else f"{smallest:,}-{largest:,}"


def _time(row: Row) -> str:
    return f"{'~' if row.is_extrapolated else ''}{row.relative_time:.2f}"


def _epoch_remarks(plan: Plan) -> Iterator[str]:
    assert plan.epoch is not None
    last = plan.epoch.last_window
    if plan.epoch.dropped:
        dropped = counted(plan.epoch.dropped, "sample")
        yield f"dropped: {dropped} of {plan.epoch.samples:,} each epoch, an incomplete micro-batch."
    if last is None:
        return
    window = (
        f"last window: {last.samples:,} of {counted(plan.effective_batch, 'sample')} "
        f"in {last.micro_batches:,} of {counted(plan.accumulation, 'micro-batch')}"
    )
    yield f"{window}; it updates once, its mean taken over {last.samples:,}."


def _times_remark(times: TimeModel, is_extrapolated: bool) -> str:
    if not times.points:
        return (
            "times: a model, not measured: a sample always costs the same, a pass and an optimizer step nothing. "
            "Measured seconds: --times 4=0.11,8=0.19"
        )
    remark = (
        f"times: alpha {times.alpha:.3g} s a pass, beta {times.beta:.3g} s a sample, sigma {times.sigma:.3g} s a step, "
        f"fitted to {counted(len(times.points), 'point')} within {times.largest_error:.1%}"
    )
    if times.unknown:
        remark += f"; these points cannot tell {' and '.join(times.unknown)}, so the simplest fit was taken"
    return remark + ("; ~ is outside the sizes measured." if is_extrapolated else ".")
