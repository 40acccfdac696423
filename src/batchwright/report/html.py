"""A headed table with remarks as HTML: how every result shows itself in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchwright.report.page.markup import html

if TYPE_CHECKING:
    from collections.abc import Iterable

# A heading may hold a line break, for terminals of 80 columns; in HTML that is just a space.
Columns = list[tuple[str, list[str]]]


def table_to_html(summary: str, columns: Columns, remarks: Iterable[str]) -> str:
    """Draw a summary, a table and remarks.

    >>> table_to_html("two", [], ["no rows"])
    '<p><b>two</b></p><p>no rows</p>'
    """
    head = "".join(f"<th>{html(heading)}</th>" for heading, _ in columns)
    body = "".join(
        "<tr>" + "".join(f'<td style="text-align:right">{html(cell)}</td>' for cell in cells) + "</tr>"
        for cells in zip(*(cells for _, cells in columns), strict=True)
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if columns else ""
    return f"<p><b>{html(summary)}</b></p>{table}<p>{'<br>'.join(html(remark) for remark in remarks)}</p>"


def text_to_html(text: str) -> str:
    """Draw a result that is one line.

    >>> text_to_html("loss < 2")
    '<p>loss &lt; 2</p>'
    """
    return f"<p>{html(text)}</p>"
