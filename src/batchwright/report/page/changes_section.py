"""What would change the answer: other hardware and other settings, and what the peak would become."""

from __future__ import annotations

from batchwright.report.page import figures
from batchwright.report.page.markup import Html, element, joined, mark, missing, section, table
from batchwright.report.page.reading import Data, number_in, rows_in, section_of, text_in, why_missing

HEADING = "What would change the answer"


def draw_changes(run: Data) -> Html:
    """Return the section."""
    rows = rows_in(section_of(run, "recommendation"), "changes")
    savings = [row for row in rows_in(section_of(run, "estimate"), "what_if") if text_in(row, "change")]
    if not rows and not savings:
        known = section_of(run, "recommendation") is not None
        reason = "no other set-up was looked at" if known else why_missing(run, "recommendation")
        return section("changes", HEADING, missing(reason))
    return section("changes", HEADING, _changes(rows), _savings(savings, run))


def _changes(rows: list[Data]) -> Html:
    if not rows:
        return Html("")
    columns: list[tuple[str, list[str]]] = [("with", [_with_note(row) for row in rows])]
    for name, key in (
        (element("span", "micro-batch", class_="word"), "micro_batch"),
        ("accumulation", "accumulation"),
        ("effective batch", "effective_batch"),
    ):
        cells = [figures.count(number_in(row, key)) for row in rows]
        columns += [(name, cells)] if any(cell != figures.UNKNOWN for cell in cells) else []
    times = [number_in(row, "time_ratio") for row in rows]
    if any(each is not None for each in times):
        sign = "\N{MULTIPLICATION SIGN}"
        columns.append(
            ("time to the loss", [figures.UNKNOWN if t is None else f"{figures.ratio(t)}{sign}" for t in times])
        )
    return table(columns, label="Table of other set-ups", stacks=True)


def _with_note(row: Data) -> Html:
    note = text_in(row, "note")
    known = any(number_in(row, key) is not None for key in ("micro_batch", "effective_batch", "time_ratio"))
    return joined(
        [
            text_in(row, "change") or figures.UNKNOWN,
            " ",
            mark(text_in(row, "source")) if known or any(map(str.isdigit, note)) else "",
            element("span", note, class_="under") if note else "",
        ]
    )


def _savings(savings: list[Data], run: Data) -> Html:
    if not savings:
        return Html("")
    found = section_of(run, "estimate")
    size = number_in(found, "micro_batch")
    where = "" if size is None else f" at micro-batch {figures.count(size)}"
    names = [joined([text_in(row, "change"), element("span", text_in(row, "note"), class_="under")]) for row in savings]
    peaks = [figures.memory(number_in(row, "peak_bytes")) for row in savings]
    now = number_in(found, "peak_bytes", "allocated")
    title = element("h3", f"What each would leave of the allocated peak{where} ", mark(text_in(found, "source")))
    columns = [("with", ["as it is", *names]), ("peak", [figures.memory(now), *peaks])]
    return joined([title, table(columns, label="Table of peaks under each change", style="first-chosen")])
