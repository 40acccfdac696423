"""What this rests on: reasons, assumptions, what is missing, and what the marks mean."""

from __future__ import annotations

from batchwright.report.page import figures
from batchwright.report.page.markup import MARKS, Html, element, joined, mark, remarks, section
from batchwright.report.page.reading import Data, mapping_in, number_in, section_of, text_in, texts_in, why_missing

HEADING = "What this rests on"
# As a person calls them; the order in which a run is made.
STAGES = {
    "workload": "what was tuned",
    "estimate": "the predicted memory",
    "fit": "the largest micro-batch",
    "throughput": "the throughput",
    "audit": "the audit of accumulation",
    "noise": "the critical batch",
    "branches": "short branches",
    "plan": "the plan",
    "recommendation": "the recommendation",
}


def draw_rests(run: Data) -> Html:
    """Return the section."""
    found = section_of(run, "recommendation")
    # Branches are trained only where asked for, so a file may say nothing of them.
    asked = [name for name in STAGES if name != "branches" or name in run]
    gone = [f"{STAGES[name]}: {why_missing(run, name)}" for name in asked if section_of(run, name) is None]
    rule = text_in(found, "learning_rate", "rule")
    lists = (
        ("Why", texts_in(found, "reasons")),
        ("Taken for granted", texts_in(found, "assumes")),
        ("The learning rate", [rule] if rule else []),
        ("Not in this run", gone),
        ("To know", texts_in(found, "notes")),
    )
    pieces = [joined([element("h3", title), remarks(lines)]) for title, lines in lists if lines]
    return section("rests", HEADING, *pieces, _marks())


def _marks() -> Html:
    rows = (element("div", element("dt", mark(name)), element("dd", words)) for name, words in MARKS.items())
    return joined([element("h3", "The marks"), element("dl", *rows, class_="marks")])


def draw_footer(run: Data) -> Html:
    """Return the last lines: versions, date, how long it took, and the command."""
    work = section_of(run, "workload")
    versions = [
        f"{name} {version}"
        for name, key in (("batchwright", "batchwright"), ("PyTorch", "torch"), ("Python", "python"))
        if (version := text_in(work, key))
    ]
    took = [number_in(work, "seconds", stage) for stage in mapping_in(work, "seconds")]
    in_all = sum(each for each in took if each is not None)
    first = [*versions, figures.date(text_in(run, "created")), f"took {figures.seconds(in_all)}" if in_all else ""]
    target = text_in(work, "target")
    command = text_in(run, "command") or text_in(work, "command") or (f"batchwright tune {target}" if target else "")
    return element(
        "footer",
        element("p", " \N{MIDDLE DOT} ".join(part for part in first if part)),
        element("p", element("code", command)) if command else Html(""),
    )
