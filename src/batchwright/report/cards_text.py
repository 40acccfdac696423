"""Every card of the catalogue as text: which take the step, and with what micro-batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchwright.report.tables import draw_table
from batchwright.units import counted, format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from batchwright.memory.every_card import EveryCard
    from batchwright.report.html import Columns


def summarize_cards(found: EveryCard) -> str:
    """Say in one line how many cards take the step, and the smallest of them."""
    fitting = [row for row in found.rows if row.fits]
    asked = f"{found.name}: micro-batch {found.micro_batch:,}"
    if not fitting:
        return f"{asked} fits on none of {counted(len(found.rows), 'card')} (predicted)"
    return (
        f"{asked} fits on {len(fitting)} of {counted(len(found.rows), 'card')} (predicted); "
        f"the smallest is {fitting[0].card}"
    )


def cards_columns(found: EveryCard) -> Columns:
    """A row per card."""
    rows = found.rows
    return [
        ("card", [row.card for row in rows]),
        ("memory", [format_bytes(row.total_bytes) for row in rows]),
        (f"takes at\nmicro-batch {found.micro_batch:,}", [format_bytes(row.device_bytes) for row in rows]),
        ("fits", ["yes" if row.fits else "no" for row in rows]),
        ("largest\nmicro-batch", ["-" if row.max_micro_batch is None else f"{row.max_micro_batch:,}" for row in rows]),
    ]


def draw_cards(found: EveryCard) -> RenderableType:
    """Draw the cards for a terminal."""
    return draw_table(summarize_cards(found), cards_columns(found), (), left=1)
