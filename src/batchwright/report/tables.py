"""A headed table with remarks for the terminal: how every result prints itself.

Promises:
- a number is never cut or folded: on a terminal that is too narrow the line runs over instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

    from batchwright.report.html import Columns


def draw_table(summary: str, columns: Columns, remarks: Iterable[str], *, left: int = 0) -> RenderableType:
    """Draw a summary, a table whose first row stands out, and remarks; the first `left` columns are words."""
    from rich.console import Group
    from rich.text import Text

    told = [Text(remark) for remark in remarks]
    if not columns:  # nothing was found: then what is said about it is the answer
        return Group(Text(summary, style="bold"), *([Text(), *told] if told else []))
    heads, *rows = table_lines(columns, left=left)
    lines = [Text(line, no_wrap=True, overflow="ignore") for line in heads.split("\n")]
    lines += [
        Text(row, no_wrap=True, overflow="ignore", style="bold" if number == 0 else "")
        for number, row in enumerate(rows)
    ]
    return Group(Text(summary, style="bold"), Text(), *lines, Text(), *told)


def table_lines(columns: Columns, *, left: int = 0) -> list[str]:
    """Lay out a table: its heading with the rule below as one string, then a string a row.

    >>> for line in table_lines([("size", ["8", "16"]), ("peak\\nbytes", ["120", "200"])]):
    ...     print(line)
           peak
    size  bytes
    ───────────
       8    120
      16    200
    """
    headings = [heading.split("\n") for heading, _ in columns]
    height = max(map(len, headings))
    widths = [max(map(len, [*heading, *cells])) for heading, (_, cells) in zip(headings, columns, strict=True)]

    def lay_out(cells: list[str]) -> str:
        padded = [
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    top = [lay_out([([""] * height + heading)[-height:][line] for heading in headings]) for line in range(height)]
    rule = "─" * (sum(widths) + 2 * (len(widths) - 1))
    rows = [lay_out(list(row)) for row in zip(*(cells for _, cells in columns), strict=True)]
    return ["\n".join([*top, rule]), *rows]
