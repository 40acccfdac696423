"""An estimate as text: the peak, its parts and which of them grow, the phases as a picture, the largest owners."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from batchwright.report.tables import draw_table, table_lines
from batchwright.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from batchwright.memory.result import Estimate
    from batchwright.report.html import Columns

_BAR_WIDTH = 40


def summarize_estimate(estimate: Estimate) -> str:
    """Say the peak in one line."""
    peak = f"peak {format_bytes(estimate.peak)} at micro-batch {estimate.micro_batch:,}"
    bound = estimate.upper_bytes.allocated
    upper = "?" if bound is None else format_bytes(bound)
    # A formula knows nothing of allocators and contexts, so it has no "at most" to give.
    by_formula = f"by formula; {upper} with CUDA's multi-tensor optimizer, allocator and context apart"
    at_most = "a lower bound" if bound is None else f"at most {upper}"
    how = by_formula if estimate.source == "formula" else f"predicted for {estimate.on}, {at_most}"
    line = f"{estimate.name}: {peak}, {how}"
    if estimate.fits is not None:
        line = f"{estimate.name}: {_on_card(estimate)}"
    if estimate.limit_bytes is None or estimate.max_micro_batch is None:
        return line
    within = format_bytes(estimate.limit_bytes)
    if estimate.max_limited_by == "data":
        return f"{line}; the data has no more samples, and {within} would hold more"
    if estimate.max_limited_by == "search":
        return f"{line}; no larger size was looked at, and {within} would hold more"
    return f"{line}; the largest within {within}"


def _on_card(estimate: Estimate) -> str:
    """The three peaks on a simulated card, and whether they go onto it."""
    peaks, upper = estimate.peak_bytes, estimate.upper_bytes
    verdict = "fits" if estimate.fits else "does not fit"
    kinds = ", ".join(
        f"{kind} {format_bytes(num_bytes)}" for kind, num_bytes in asdict(peaks).items() if num_bytes is not None
    )
    at_most = "" if upper.device is None else f" (with a margin {format_bytes(upper.device)})"
    there_is = "" if estimate.limit_bytes is None else f" with {format_bytes(estimate.limit_bytes)}"
    return f"micro-batch {estimate.micro_batch:,} {verdict} on {estimate.on}{there_is}: predicted {kinds}{at_most}"


def estimate_columns(estimate: Estimate) -> Columns:
    """The parts alive at the peak, largest first, and what a further sample adds to each."""
    parts = sorted(((n, part) for part, n in estimate.parts.items() if n), reverse=True)
    growth = [estimate.grows_with_batch.get(part) or 0 for _, part in parts]
    peak = sum(n for n, _ in parts) or 1
    return [
        ("part", [part for _, part in parts]),
        ("at the\npeak", [format_bytes(n) for n, _ in parts]),
        ("share", [f"{n / peak:.0%}" for n, _ in parts]),
        ("per further\nsample", [f"+{format_bytes(n)}" if n > 0 else "fixed" for n in growth]),
    ]


def estimate_remarks(estimate: Estimate) -> Iterator[str]:
    """The moment, the phases, the owners, and what was assumed."""
    moment = estimate.peak_at
    if moment is not None:
        place = f" in {moment.module}" if moment.module not in ("", moment.phase) else ""
        yield f"the peak comes in {moment.phase}{place}, at {moment.operator}."
    if estimate.phases:
        yield ""
        yield from _picture(estimate)
    if estimate.largest:
        yield ""
        yield "largest owners at the peak:"
        yield from _indented(_owner_columns(estimate), left=2)
    if estimate.savings:
        yield ""
        yield "what each change would save:"
        yield from _indented(_saving_columns(estimate), left=1)
    if estimate.notes:
        yield ""
    for note in estimate.notes:
        yield f"note: {note}."


def draw_estimate(estimate: Estimate) -> RenderableType:
    """Draw the estimate for a terminal."""
    return draw_table(summarize_estimate(estimate), estimate_columns(estimate), estimate_remarks(estimate), left=1)


def _picture(estimate: Estimate) -> Iterator[str]:
    highest = max(phase.peak_bytes for phase in estimate.phases) or 1
    for phase in estimate.phases:
        bar = "█" * round(_BAR_WIDTH * phase.peak_bytes / highest)
        yield f"  {phase.phase:<10} {bar:<{_BAR_WIDTH}} {format_bytes(phase.peak_bytes)}"


def _owner_columns(estimate: Estimate) -> Columns:
    owners = estimate.largest
    return [
        ("part", [owner.part for owner in owners]),
        ("module, operator", [_place(owner.module, owner.operator) for owner in owners]),
        ("tensors", [f"{owner.count:,}" for owner in owners]),
        ("bytes", [format_bytes(owner.num_bytes) for owner in owners]),
    ]


def _saving_columns(estimate: Estimate) -> Columns:
    savings = estimate.savings
    peak = estimate.peak
    return [
        ("change", [saving.change for saving in savings]),
        ("peak", ["-" if s.peak_bytes is None else format_bytes(s.peak_bytes) for s in savings]),
        ("saves", ["-" if s.peak_bytes is None else _saved(peak - s.peak_bytes) for s in savings]),
        ("", [saving.note for saving in savings]),
    ]


def _saved(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes >= 0 else f"costs {format_bytes(-num_bytes)}"


def _place(module: str, operator: str, width: int = 44) -> str:
    text = f"{module or '(no module)'}  {operator.removeprefix('aten.')}"
    return text if len(text) <= width else f"...{text[-(width - 3) :]}"


def _indented(columns: Columns, *, left: int) -> Iterator[str]:
    for line in "\n".join(table_lines(columns, left=left)).split("\n"):
        yield f"  {line}"
