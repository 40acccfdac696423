"""Pieces of HTML that every section is made of.

Promises:
- whatever comes from a run is escaped here: callers hand in plain text, or `Html` that was made by this package.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from batchwright.report.page.figures import UNKNOWN

MARKS = {
    "measured": "it ran, and was measured",
    "predicted": "traced or modelled before running",
    "formula": "arithmetic, from the other numbers or a published rule",
    "given": "as it was set",
}


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def html(text: str) -> Html:
    """Return text as HTML, escaped unless it is HTML already.

    >>> html("<b>"), html(Html("<b>"))
    ('&lt;b&gt;', '<b>')
    """
    return text if isinstance(text, Html) else Html(escape(printable(text)))


def joined(pieces: Iterable[str], between: str = "") -> Html:
    """Return pieces one after the other, those that are no HTML escaped.

    >>> joined(["a < b", Html("<i>c</i>")], " ")
    'a &lt; b <i>c</i>'
    """
    return Html(html(between).join(html(piece) for piece in pieces))


def element(tag: str, *content: str, **attributes: str | None) -> Html:
    """Return an element; `class_` and `aria_label` are written as HTML has them, None is left out.

    >>> element("p", "a < b", class_="lead")
    '<p class="lead">a &lt; b</p>'
    """
    names = {name: name.rstrip("_").replace("_", "-") for name in attributes}
    written = "".join(f' {names[name]}="{html(value)}"' for name, value in attributes.items() if value is not None)
    return Html(f"<{tag}{written}>{joined(content)}</{tag}>")


def breakable(text: str) -> Html:
    """Return a long name that may break where a person would break it.

    >>> breakable("train.py:<w>")
    'train.<wbr>py:<wbr>&lt;w&gt;'
    """
    return Html(re.sub(r"([/:._-])(?=\w|&)", r"\1<wbr>", html(text)))


def mark(source: str) -> Html:
    """Return the mark of where a number comes from; nothing where nobody knows.

    >>> mark("measured")
    '<span class="mark measured">measured</span>'
    """
    return element("span", source, class_=f"mark {source}") if source in MARKS else Html("")


def figure_with(value: str, source: str, beside: str = "") -> Html:
    """Return a number with its interval, if it has one, and its mark, which stay on one line."""
    interval = joined([" ", element("span", beside, class_="interval")]) if beside else Html("")
    return element("span", element("b", value), interval, " ", mark(source), class_="figure")


def table(
    columns: Sequence[tuple[str, Sequence[str]]], *, label: str, words: int = 1, style: str = "", stacks: bool = False
) -> Html:
    """Return a table of headed columns, the first `words` of them text and the others numerals.

    One that `stacks` has a line per cell on a phone, its heading before it; others scroll.
    """
    sides = ["w" if number < words else "n" for number in range(len(columns))]
    head = joined(element("th", name, scope="col", class_=side) for side, (name, _) in zip(sides, columns, strict=True))
    names = [_plain(name) if stacks and number else None for number, (name, _) in enumerate(columns)]
    rows = [
        element(
            "tr",
            *(
                element("td", cell, class_=f"{side} unknown" if cell == UNKNOWN else side, data_name=name)
                for side, cell, name in zip(sides, cells, names, strict=True)
            ),
        )
        for cells in zip(*(cells for _, cells in columns), strict=True)
    ]
    classes = " ".join(name for name in (style, "stacks" if stacks else "") if name) or None
    whole = element("table", element("thead", element("tr", head)), element("tbody", *rows), class_=classes)
    # What scrolls must be reachable by keyboard.
    return element("div", whole, class_="scroll", tabindex="0", role="region", aria_label=label)


def _plain(heading: str) -> Html:
    """Return a heading without its elements, a mark in brackets."""
    with_marks = re.sub(r'<span class="mark[^>]*>(\w+)</span>', r"(\1)", html(heading))
    return Html(re.sub(r"<[^>]*>", "", with_marks))


def sentence(*pieces: str, class_: str | None = "lead") -> Html:
    """Return a paragraph that ends in a full stop; nothing without pieces.

    >>> sentence("The peak is ", element("b", "508 MiB"))
    '<p class="lead">The peak is <b>508 MiB</b>.</p>'
    """
    return element("p", *pieces, ".", class_=class_) if pieces else Html("")


def capitalized(text: str) -> str:
    """Return text that can begin a sentence, without its full stop."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}"


def with_note(name: str, note: str) -> Html:
    """Return a name with a note under it, if there is one."""
    return joined([name, element("span", note, class_="under") if note else ""])


def missing(reason: str) -> Html:
    """Say that something is not in the run, and why.

    >>> missing("the card is simulated")
    '<p class="missing">Not in this run: the card is simulated.</p>'
    """
    return element("p", f"Not in this run: {reason.rstrip('.')}.", class_="missing")


def remarks(lines: Sequence[str]) -> Html:
    """Return remarks as a list, or nothing."""
    return element("ul", *(element("li", line) for line in lines), class_="remarks") if lines else Html("")


def printable(text: str) -> str:
    """Return text without what JSON can hold and a page cannot: control characters and halves of pairs.

    Marks that turn the direction of writing go too: they would turn the words after a name around as well.

    >>> printable("ti\\x00ny\\u202e")
    'tiny'
    """
    return "".join(letter for letter in text if letter in "\n\t" or (letter >= " " and not _HIDDEN.match(letter)))


_HIDDEN = re.compile("[\\x7f-\\x9f\\ud800-\\udfff\\u202a-\\u202e\\u2066-\\u2069]")
