"""Branches at several batches as text: the critical batch by the curve, beside the noise scale."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from batchwright.noise.critical_batch import figure
from batchwright.report.tables import draw_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from batchwright.noise.branch_curve import Branch, MeasuredCriticalBatch


def summarize_branches(found: MeasuredCriticalBatch) -> str:
    """Say the answer in one line."""
    critical = found.critical_batch
    told = str(critical) if critical.resolved else f"{figure(critical.value)} samples"
    proxy = "" if found.ratio is None else f", {found.ratio:.2g} times the noise scale"
    return f"critical batch by training: {told}{proxy}"


def branches_columns(found: MeasuredCriticalBatch) -> list[tuple[str, list[str]]]:
    """A row per batch."""

    def fitted(branch: Branch) -> str:
        return f"{found.min_steps + found.min_examples / branch.batch:,.0f}"

    rows = found.branches
    return [
        ("batch", [f"{row.batch:,}" for row in rows]),
        ("learning\nrate x", ["-" if math.isnan(f := row.learning_rate_factor) else f"{f:.3g}" for row in rows]),
        ("steps", ["not reached" if row.mean_steps is None else f"{row.mean_steps:,.0f}" for row in rows]),
        ("by the\ncurve", [fitted(row) for row in rows]),
        ("examples", ["-" if row.mean_steps is None else f"{row.mean_steps * row.batch:,.0f}" for row in rows]),
    ]


def branches_remarks(found: MeasuredCriticalBatch) -> Iterator[str]:
    """What has to be said below the table, a line each."""
    yield f"steps to a held-out loss of {found.target_loss:.4g}, mean of {len(found.branches[0].steps)} seeds."
    yield f"at least {found.min_steps:,.0f} steps at any batch, at least {found.min_examples:,.0f} examples."
    if found.noise_scale is not None:
        yield f"noise scale along the smallest batch's run: {found.noise_scale}."
    for note in found.notes:
        yield f"note: {note}."


def draw_branches(found: MeasuredCriticalBatch) -> RenderableType:
    """Draw the measurement for a terminal."""
    return draw_table(summarize_branches(found), branches_columns(found), branches_remarks(found))
