"""Is accumulation right: the audit's verdict, and each split it compared."""

from __future__ import annotations

from batchwright.report.page import figures
from batchwright.report.page.markup import Html, element, figure_with, joined, mark, missing, remarks, section, table
from batchwright.report.page.reading import Data, number_in, rows_in, section_of, text_in, texts_in, why_missing

HEADING = "Is accumulation right?"
_VERDICTS: dict[bool | None, tuple[str, str, str]] = {
    True: ("Yes.", "The accumulated gradient is that of the big batch", "good"),
    False: ("No.", "The accumulated gradient is not that of the big batch", "bad"),
    None: ("Not known.", "The audit came to no verdict", "open"),
}


def draw_audit(run: Data) -> Html:
    """Return the section."""
    found = section_of(run, "audit")
    if found is None:
        return section("audit", HEADING, missing(why_missing(run, "audit")))
    pieces: list[str] = [_verdict(found)]
    for name, key in (("Why", "explanation"), ("What to do", "remedy")):
        words = text_in(found, key)
        if words:
            pieces.append(element("p", element("b", f"{name}: "), words))
    pieces += [_splits(found), remarks(texts_in(found, "notes"))]
    return section("audit", HEADING, *pieces)


def _verdict(found: Data) -> Html:
    exact, source = found.get("exact"), text_in(found, "source") or "measured"
    word, told, style = _VERDICTS[exact if isinstance(exact, bool) else None]
    compared = text_in(found, "compared_with") or "the big batch"
    if exact is False and found.get("random") is True:
        word, told, style = "Not known.", "The loss is random, and the accumulated gradient cannot be judged", "open"
    elif exact is False and found.get("gradient_exact") is True:
        told = f"The accumulated gradient is that of {compared}, but the loop is not right"
    elif exact is True:
        told = f"The accumulated gradient is that of {compared}"
    error, dtype = number_in(found, "relative_error"), text_in(found, "dtype")
    pieces: list[str] = [element("b", word, class_=f"verdict {style}"), " ", told]
    if error is not None:
        pieces += [
            ": they differ by ",
            figure_with(figures.small(error), source),
            f" of its length{f' in {dtype}' if dtype else ''}",
        ]
    cause, what = text_in(found, "cause"), text_in(found, "what")
    pieces.append(f". The cause is {cause}" if cause else "")
    pieces.append(f". Looked at: {what}" if what else "")
    return element("p", joined(pieces), ".", class_="lead")


def _splits(found: Data) -> Html:
    rows = rows_in(found, "splits")
    if not rows:
        return Html("")
    verdicts = {True: "exact", False: "differs"}
    shown = [
        verdicts.get(exact, figures.UNKNOWN) if isinstance(exact := row.get("exact"), bool) else figures.UNKNOWN
        for row in rows
    ]
    mine = mark(text_in(found, "source"))
    names = [
        joined([text_in(row, "split") or figures.UNKNOWN, element("span", text_in(row, "note"), class_="under")])
        for row in rows
    ]
    columns: list[tuple[str, list[str]]] = [
        ("split", list(names)),
        ("verdict", shown),
        (joined(["length over the big batch's ", mine]), [_ratio(number_in(row, "ratio")) for row in rows]),
        (joined(["relative error ", mine]), [figures.small(number_in(row, "relative_error")) for row in rows]),
    ]
    return table(columns, label="Table of splits that were compared", words=2, stacks=True)


def _ratio(value: float | None) -> str:
    return figures.UNKNOWN if value is None else f"{value:.6f}"
