"""Every way to split the batch: the table of the plan."""

from __future__ import annotations

from batchwright.report.page import figures
from batchwright.report.page.markup import Html, element, figure_with, joined, mark, missing, remarks, section, table
from batchwright.report.page.reading import (
    Data,
    mapping_in,
    number_in,
    rows_in,
    section_of,
    text_in,
    texts_in,
    why_missing,
)

HEADING = "Every way to split it"


def draw_plan(run: Data) -> Html:
    """Return the section."""
    found = section_of(run, "plan")
    if found is None:
        return section("plan", HEADING, missing(why_missing(run, "plan")))
    reason = text_in(found, "reason")
    lead = element("p", f"{reason[:1].upper()}{reason[1:].rstrip('.')}.", class_="lead") if reason else Html("")
    rows = rows_in(found, "table")
    shown = table(_columns(found, rows), label="Table of splits", words=0, style="first-chosen") if rows else Html("")
    return section("plan", HEADING, lead, shown, _last_window(found), remarks(texts_in(found, "notes")))


def _columns(found: Data, rows: list[Data]) -> list[tuple[str, list[str]]]:
    source = text_in(found, "source") or "formula"
    # A time by a fitted model is no measurement of that split.
    timed = "predicted" if text_in(found, "time_model", "source") == "measured" else "formula"
    columns = [
        (element("span", "micro-batch", class_="word"), source, [_size(row) for row in rows]),
        ("accumulation", source, [figures.count(number_in(row, "accumulation")) for row in rows]),
        ("effective batch", source, [figures.count(number_in(row, "effective_batch")) for row in rows]),
        ("forwards an epoch", source, [figures.count(number_in(row, "forwards_per_epoch")) for row in rows]),
        ("updates an epoch", source, [figures.count(number_in(row, "updates_per_epoch")) for row in rows]),
        ("time", timed, [f"{_tilde(row)}{_times(row, 'relative_time')}" for row in rows]),
        ("activations", source, [_times(row, "relative_activations") for row in rows]),
        ("peak", "formula", [figures.memory(number_in(row, "peak_bytes")) for row in rows]),
    ]
    known = [each for each in columns if any(cell != figures.UNKNOWN for cell in each[2])]
    return [(joined([name, " ", mark(where)]), cells) for name, where, cells in known]


def _size(row: Data) -> str:
    size, least = number_in(row, "micro_batch"), number_in(row, "smallest_micro_batch")
    uneven = "" if least in (None, size) else f"{figures.count(least)} to "
    return f"{uneven}{figures.count(size)}"


def _times(row: Data, key: str) -> str:
    value = number_in(row, key)
    return figures.UNKNOWN if value is None else f"{figures.ratio(value)}\N{MULTIPLICATION SIGN}"


def _tilde(row: Data) -> str:
    return "~" if row.get("is_extrapolated") is True else ""


def _last_window(found: Data) -> Html:
    """Say what an epoch is made of; the samples that do not fill a step are the part people get wrong."""
    samples, window = number_in(found, "samples"), mapping_in(found, "last_window")
    if samples is None:
        return Html("")
    pieces: list[str] = ["An epoch of ", figure_with(figures.count(samples), "given"), " samples"]
    rest, dropped = number_in(window, "samples"), number_in(found, "dropped_samples")
    if rest:
        ends = "and still updates" if window.get("update") is True else "without an update"
        pieces.append(f" ends in a step of {figures.count(rest)} samples {ends}")
    if dropped:
        pieces.append(f"{'; ' if rest else ' '}leaves out {figures.count(dropped)}")
    return element("p", joined(pieces), ".") if rest or dropped else Html("")
