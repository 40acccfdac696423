"""How a result is shown: a summary, a table and remarks, on a terminal, in a pipe or in a notebook.

Every result hands in the same three; what it is drawn on is decided here. Progress goes to stderr: one live line on a
terminal, plain lines in a pipe.

Promises:
- a number is never cut or folded: on a terminal that is too narrow the line runs over instead;
- an answer is coloured on a terminal, plain and unwrapped in a pipe;
- text of the user's cannot become HTML.
"""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchwright.report.page.markup import html

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from rich.console import RenderableType

    from batchwright.scripts.script import Script

# A heading may hold a line break, for terminals of 80 columns; in HTML that is just a space.
Columns = list[tuple[str, list[str]]]

# Nothing we draw is wider; rich would otherwise fold tables at 80 columns when nobody looks at them.
_WIDTH_OF_A_PIPE = 400


@dataclass(frozen=True)
class Drawing:
    """What a result shows, whatever it is drawn on."""

    summary: str
    columns: Columns
    remarks: tuple[str, ...]
    left: int
    """So many columns, the first ones, are words."""
    bold: Collection[int]
    """The rows that stand out."""

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        notes = [Text(remark) for remark in self.remarks]
        if not self.columns:  # without rows the remarks are the answer
            return Group(Text(self.summary, style="bold"), *([Text(), *notes] if notes else []))
        heads, *rows = table_lines(self.columns, left=self.left)
        lines = [Text(line, no_wrap=True, overflow="ignore") for line in heads.split("\n")]
        lines += [
            Text(row, no_wrap=True, overflow="ignore", style="bold" if number in self.bold else "")
            for number, row in enumerate(rows)
        ]
        return Group(Text(self.summary, style="bold"), Text(), *lines, Text(), *notes)

    def to_html(self) -> str:
        """Return it for a notebook."""
        return table_to_html(self.summary, self.columns, self.remarks)


def draw_table(
    summary: str, columns: Columns, remarks: Iterable[str], *, left: int = 0, bold: Collection[int] = (0,)
) -> Drawing:
    """Draw a summary, a table whose `bold` rows stand out, and remarks; the first `left` columns are words."""
    return Drawing(summary, columns, tuple(remarks), left, bold)


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


def or_dash(write: Callable[[Any], str], value: Any) -> str:
    """Write a cell of a table; what is not known is a dash.

    >>> or_dash("{:,}".format, 2500), or_dash("{:,}".format, None)
    ('2,500', '-')
    """
    return "-" if value is None else write(value)


def text_to_html(text: str) -> str:
    """Draw a result that is one line.

    >>> text_to_html("loss < 2")
    '<p>loss &lt; 2</p>'
    """
    return f"<p>{html(text)}</p>"


def render_plain(renderable: RenderableType, *, width: int = _WIDTH_OF_A_PIPE) -> str:
    """Draw something as plain text: no colour, no trailing spaces.

    >>> render_plain("[bold]43[/bold] samples")
    '43 samples'
    """
    from rich.console import Console

    # A notebook is no terminal either: what is captured there must be the same text.
    console = Console(width=width, color_system=None, force_terminal=False, force_jupyter=False, highlight=False)
    with console.capture() as capture:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def print_answer(renderable: RenderableType) -> None:
    """Print an answer to stdout."""
    if not sys.stdout.isatty():
        print(render_plain(renderable))
        return
    from rich.console import Console

    # Not cropped: a line that is too long runs over, and no number is cut.
    Console(highlight=False).print(renderable, crop=False)


def print_json(data: dict[str, Any]) -> None:
    """Print plain data as JSON on stdout."""
    text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
    print(text if can_show(text) else json.dumps(data, indent=2, allow_nan=False))


def print_result(result: Any, *, as_json: bool) -> None:
    """Print a result: as JSON, or drawn for the terminal."""
    if as_json:
        print_json(result.to_dict())
    else:
        print_answer(result)


def can_show(text: str) -> bool:
    """Whether stdout has every character of a text.

    >>> can_show("batch")
    True
    """
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def report_progress(target: str | Script, *, prints: bool = True) -> Iterator[Callable[[str], None]]:
    """Yield what tells the person how far the work is; what the user's code prints goes to stderr meanwhile.

    On a terminal the line is overwritten, and cleared at the end. `prints` is false on all ranks but one.
    """
    is_live = sys.stderr.isatty()

    def say(text: str) -> None:
        if prints:
            before, after = ("\r\033[K", " ...") if is_live else ("", "\n")
            print(f"{before}{text}{after}", end="", file=sys.stderr, flush=True)

    try:
        with redirect_stdout(sys.stderr):
            say(f"loading {target if isinstance(target, str) else target.name}")
            yield say
    finally:
        if is_live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
