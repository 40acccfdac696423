"""Time as text: seconds of a step that was predicted, what bounds it, and its costliest operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchwright.report.display import Columns, table_lines
from batchwright.timing.step_time import NoTime, StepTime
from batchwright.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

_SHOWN = 5
_BOUNDS = {
    "flops": "arithmetic",
    "bytes": "memory",
    "launches": "launches of kernels",
    "host": "the host, which cannot feed the card fast enough",
    "ranks": "waiting for other ranks",
    "upload": "copies of the batch to the card",
}


def describe_time(time: StepTime | NoTime) -> Iterator[str]:
    """Say the seconds with their interval, what they come to, and what would help."""
    if isinstance(time, NoTime):
        yield f"no time is predicted: {time.reason}."
        return
    mfu = "" if time.mfu is None else f", MFU {time.mfu:.0%}"
    yield (
        f"a step takes {format_seconds(time.seconds)} [{format_seconds(time.low)}, {format_seconds(time.high)}], "
        f"{format_rate(time.samples_per_second)} samples/s{mfu}, bound by {_BOUNDS[time.bound_by]} ({time.source})."
    )
    yield from (f"  unsure: {reason}." for reason in time.unsure)
    if time.helps:
        yield f"  would help: {', '.join(time.helps)}."
    if time.costliest:
        yield ""
        yield "costliest operators:"
        yield from (f"  {line}" for line in "\n".join(table_lines(_columns(time), left=1)).split("\n"))


def _columns(time: StepTime) -> Columns:
    rows = time.costliest[:_SHOWN]
    return [
        ("module, operator", [f"{row.module or '(no module)'}  {row.operator.removeprefix('aten.')}" for row in rows]),
        ("calls", [f"{row.count:,}" for row in rows]),
        ("seconds", [format_seconds(row.seconds) for row in rows]),
        ("share", [f"{row.seconds / time.seconds:.0%}" for row in rows]),
        ("bound by", [row.bound_by for row in rows]),
    ]


def format_rate(rate: float | None) -> str:
    """Samples per second with three figures; a dash where there are none.

    >>> format_rate(1234.5), format_rate(0.01234), format_rate(None)
    ('1,230', '0.0123', '-')
    """
    if rate is None:
        return "-"
    rounded = float(f"{rate:.3g}")
    return f"{rounded:,.0f}" if rounded >= 100 else f"{rounded:g}"
