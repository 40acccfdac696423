"""A headed table with remarks for the terminal: how every result prints itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

    from batchwright.report.html import Columns


def draw_table(summary: str, columns: Columns, remarks: Iterable[str], *, left: int = 0) -> RenderableType:
    """Draw a summary, a table whose first row stands out, and remarks; the first `left` columns are words."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for number, (heading, _) in enumerate(columns):
        # Never folded: half a number is a wrong number.
        table.add_column(heading, justify="left" if number < left else "right", no_wrap=True)
    for number, row in enumerate(zip(*(cells for _, cells in columns), strict=True)):
        table.add_row(*row, style="bold" if number == 0 else None)
    return Group(Text(summary, style="bold"), Text(), table, Text(), *(Text(remark) for remark in remarks))
