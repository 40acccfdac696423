"""Short branches trained at several batches: how many steps each took to the same loss."""

from __future__ import annotations

from batchwright.report.page import figures
from batchwright.report.page.markup import Html, element, figure_with, joined, mark, remarks, table
from batchwright.report.page.reading import Data, number_in, rows_in, section_of, text_in, texts_in


def draw_branches(run: Data) -> Html:
    """Return what the branches told, to stand below the critical batch; nothing where none were trained."""
    found = section_of(run, "branches")
    if found is None:
        return Html("")
    rows, source = rows_in(found, "branches"), text_in(found, "source")
    title = element("h3", "Short branches at several batches")
    shown = table(_columns(rows, source), label="Table of branches", words=0) if rows else Html("")
    return joined([title, _lead(found, source), shown, remarks(texts_in(found, "notes"))])


def _lead(found: Data, source: str) -> Html:
    value, low, high = (figures.count(number_in(found, "critical_batch", key)) for key in ("value", "low", "high"))
    unit, share = text_in(found, "critical_batch", "unit") or "samples", number_in(found, "ratio")
    pieces: list[str] = [
        "By them the critical batch is ",
        figure_with(value, source, figures.interval(low, high)),
        f" {unit}",
    ]
    if share is not None:
        times = f"{figures.ratio(share)}\N{MULTIPLICATION SIGN}"
        pieces += [", ", figure_with(times, source), " the noise scale at the same place"]
    return element("p", joined(pieces), ".")


def _columns(rows: list[Data], source: str) -> list[tuple[str, list[str]]]:
    mine, given = mark(source), mark("given")
    loss, rate = "steps to the loss ", "learning rate, times the first "
    return [
        (joined(["batch ", given]), [figures.count(number_in(row, "batch")) for row in rows]),
        (joined([rate, mine]), [figures.ratio(number_in(row, "learning_rate_factor")) for row in rows]),
        (joined([loss, mine]), [_steps(number_in(row, "mean_steps")) for row in rows]),
    ]


def _steps(value: float | None) -> str:
    return figures.UNKNOWN if value is None else f"{value:,.1f}"
