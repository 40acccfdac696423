"""The best batch as text: the answer, a row per batch worth comparing, and what it rests on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchwright.noise.efficiency import steps_over_minimum
from batchwright.report.tables import draw_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from batchwright.noise.best_batch_result import BestBatch
    from batchwright.report.html import Columns


def summarize_best_batch(best: BestBatch) -> str:
    """Say the answer in one line.

    >>> from batchwright.noise.best_batch import best_batch
    >>> summarize_best_batch(best_batch(400, {16: 0.12, 64: 0.24, 256: 0.72}))
    'effective batch 113 reaches the loss soonest; 67 to 192 are within 5 % of its time'
    """
    first, last = best.range_within_5_percent
    ends = f"{best.low:,} or more" if best.high is None else f"{best.low:,} to {best.high:,}"
    interval = "" if best.low == best.value == best.high else f" [{ends}]"
    answer = f"effective batch {best.value:,}{interval} reaches the loss soonest"
    return f"{answer}; {first:,} to {last:,} are within 5 % of its time"


def best_batch_columns(best: BestBatch) -> Columns:
    """A row per batch: the best, then in order the ends of the range and the batches that were timed."""
    step, batches = best.step_seconds, _batches(best)
    return [
        ("effective\nbatch", [f"{'' if step.covers(batch) else '~'}{batch:,}" for batch in batches]),
        ("step\nseconds", [f"{step.at(batch):.3g}" for batch in batches]),
        ("steps over\nthe minimum", [f"{steps_over_minimum(batch, best.noise_scale):.3g}x" for batch in batches]),
        ("time to\nthe loss", [f"{best.time_ratio(batch):.3g}x" for batch in batches]),
    ]


def best_batch_remarks(best: BestBatch) -> Iterator[str]:
    """What has to be said below the table, a line each."""
    for words in best.words:
        yield f"{words}."
    if any(not best.step_seconds.covers(batch) for batch in _batches(best)):
        yield "~ is outside the batches that were timed."


def draw_best_batch(best: BestBatch) -> RenderableType:
    """Draw the answer for a terminal."""
    return draw_table(summarize_best_batch(best), best_batch_columns(best), best_batch_remarks(best))


def _batches(best: BestBatch) -> list[int]:
    others = {*best.range_within_5_percent, *(batch for batch, _ in best.step_seconds.points)} - {best.value}
    return [best.value, *sorted(others)]
