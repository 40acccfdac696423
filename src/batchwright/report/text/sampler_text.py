"""What an epoch of batches will be like, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchwright.report.display import draw_table
from batchwright.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from batchwright.sampler.stats import SamplerStats


_LITTLE_SHUFFLING = 0.2
"""Pairs of batch-mates that meet again; random batches have next to none."""


def summarize_stats(stats: SamplerStats) -> str:
    """Say in one line what an epoch holds."""
    return (
        f"{counted(stats.samples, 'sample')} in {counted(stats.batches, 'batch')} of at most {stats.budget:,.0f}: "
        f"{stats.waste:.2%} padding"
    )


def stats_columns(stats: SamplerStats) -> list[tuple[str, list[str]]]:
    """One row of figures."""
    return [
        ("batches", [f"{stats.batches:,}"]),
        ("steps\nper rank", [f"{stats.steps:,}"]),
        ("waste", [f"{stats.waste:.2%}"]),
        ("fill", [f"{stats.fill:.1%}"]),
        ("rank\nidle", [f"{stats.rank_idle:.2%}"]),
        ("pair\nrepeat", [f"{stats.pair_repeat:.2%}"]),
        ("largest\nbatch", [f"{stats.largest_cost:,.0f}"]),
    ]


def stats_remarks(stats: SamplerStats) -> Iterator[str]:
    """What has to be said below the table, a line each."""
    yield (
        f"{counted(stats.tokens, 'token')} on {counted(stats.ranks, 'rank')}, "
        f"shuffled over {counted(stats.num_windows, 'window')}."
    )
    if stats.pair_repeat > _LITTLE_SHUFFLING and stats.batches > 1:
        yield (
            f"little shuffling: {stats.pair_repeat:.0%} of the pairs in a batch meet again in the next epoch. A larger "
            "waste= or a smaller budget mixes more."
        )
    if stats.dropped:
        yield f"{counted(stats.dropped, 'sample')} over the budget by itself, left out."
    if stats.single:
        yield f"{counted(stats.single, 'sample')} over the budget by itself, each a batch of its own."
    if stats.repeats:
        yield f"{counted(stats.repeats, 'batch')} that repeat a sample at weight 0, to keep a rank in step."
    if stats.off_multiple:
        yield f"{counted(stats.off_multiple, 'batch')} whose samples are no multiple of what was asked."


def draw_stats(stats: SamplerStats) -> RenderableType:
    """Draw the figures for a terminal."""
    return draw_table(summarize_stats(stats), stats_columns(stats), stats_remarks(stats))
