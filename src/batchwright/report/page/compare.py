"""Two runs on one page: the answers side by side, and what changed from the one to the other.

Promises:
- every number is the one that its own page shows, with its mark and its interval;
- a change is a factor only where both numbers are known; one within both intervals is called so, not a change;
- what is the same in both is named and not shown twice; what only one run has says why the other has none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import unescape

from batchwright.report.page import figures
from batchwright.report.page.markup import Html, breakable, element, figure_with, joined, remarks, table
from batchwright.report.page.page import answer_sentence, draw_footer, frame_page, subtitle
from batchwright.report.page.run_reading import Data, mapping_in, number_in, section_of, text_in, why_missing


@dataclass(frozen=True)
class Quantity:
    """One number that runs can be compared by: where it stands in a run, and how it is written."""

    name: str
    section: str
    path: tuple[str, ...]
    write: Callable[[float | None], str]
    source: str = ""
    """Its mark, if the section's own `source` is not it."""
    interval: tuple[str, str] | None = None
    """The keys of its ends, beside it."""


_QUANTITIES = (
    Quantity("effective batch", "recommendation", ("effective_batch",), figures.count),
    Quantity("micro-batch", "recommendation", ("micro_batch",), figures.count),
    Quantity("accumulation", "recommendation", ("accumulation",), figures.count, "formula"),
    Quantity("devices", "recommendation", ("devices",), figures.count, "given"),
    Quantity(
        "learning rate",
        "recommendation",
        ("learning_rate", "recommended"),
        figures.small,
        "formula",
        ("low", "high"),
    ),
    Quantity(
        "critical batch", "recommendation", ("critical_batch", "value"), figures.count, "measured", ("low", "high")
    ),
    Quantity("samples a second", "recommendation", ("samples_per_second",), figures.small),
    Quantity("seconds a step", "recommendation", ("seconds_per_step",), figures.small),
    Quantity("largest micro-batch that fits", "fit", ("micro_batch",), figures.count),
    Quantity("memory it may take", "fit", ("limit_bytes",), figures.memory, "given"),
    Quantity("memory left at it", "fit", ("headroom_bytes",), figures.memory),
    Quantity("predicted peak", "estimate", ("peak_bytes", "allocated"), figures.memory),
    *(
        Quantity(f"of it {part}", "estimate", ("parts", part), figures.memory)
        for part in ("weights", "gradients", "optimizer", "activations", "temporaries", "workspaces", "slack")
    ),
    Quantity("fastest micro-batch", "throughput", ("fastest_micro_batch",), figures.count),
    Quantity("most samples a second", "throughput", ("best_samples_per_second",), figures.small),
    Quantity("error of the accumulated gradient", "audit", ("relative_error",), figures.small),
    Quantity("noise scale", "noise", ("critical_batch", "value"), figures.count, "", ("low", "high")),
    Quantity("parameters", "workload", ("num_parameters",), figures.count, "given"),
    Quantity("trained parameters", "workload", ("num_trained",), figures.count, "given"),
    Quantity("samples", "workload", ("samples",), figures.count, "given"),
)
_WORDS = (
    ("what was tuned", "workload", "target"),
    ("device", "workload", "on"),
    ("optimizer", "workload", "optimizer"),
    ("batchwright", "workload", "batchwright"),
    ("PyTorch", "workload", "torch"),
    ("Python", "workload", "python"),
    ("what ended the search", "fit", "reason"),
)


@dataclass(frozen=True)
class Line:
    """One quantity in both runs."""

    name: str
    before: Html
    after: Html
    change: str
    is_same: bool


def compare_runs(first: Data, second: Data) -> list[Line]:
    """Return a line for every quantity that at least one of two runs has."""
    lines = []
    for quantity in _QUANTITIES:
        one, other = (_value(run, quantity) for run in (first, second))
        if one is None and other is None:
            continue
        before, after = _cell(first, quantity), _cell(second, quantity)
        # What is written the same is the same: the last bits of a training differ from run to run.
        lines.append(Line(quantity.name, before, after, _change(quantity, first, second), before == after))
    for name, section, key in _WORDS:
        texts = [text_in(section_of(run, section), key) for run in (first, second)]
        if any(texts):
            before, after = (breakable(text) if text else Html(figures.UNKNOWN) for text in texts)
            lines.append(Line(name, before, after, "", texts[0] == texts[1]))
    return lines


def _value(run: Data, quantity: Quantity) -> float | None:
    return number_in(section_of(run, quantity.section), *quantity.path)


def _ends(run: Data, quantity: Quantity) -> tuple[float | None, float | None]:
    if quantity.interval is None:
        return None, None
    beside = mapping_in(section_of(run, quantity.section), *quantity.path[:-1])
    low, high = (number_in(beside, key) for key in quantity.interval)
    return low, high


def _cell(run: Data, quantity: Quantity) -> Html:
    value, record = _value(run, quantity), section_of(run, quantity.section)
    if value is None:
        return Html(figures.UNKNOWN)
    low, high = _ends(run, quantity)
    span = figures.interval(quantity.write(low), quantity.write(high)) if low is not None else ""
    return figure_with(quantity.write(value), quantity.source or text_in(record, "source"), span)


def _change(quantity: Quantity, first: Data, second: Data) -> str:
    """Say how a number changed.

    >>> rate = Quantity("rate", "noise", ("value",), str, "", ("low", "high"))
    >>> run = lambda value, low, high: {"noise": {"value": value, "low": low, "high": high}}
    >>> _change(rate, run(100, 50, 200), run(150, 80, 300)), _change(rate, run(100, 90, 110), run(150, 140, 160))
    ('within the intervals', 'x 1.5')
    """
    one, other = _value(first, quantity), _value(second, quantity)
    if one == other:
        return "the same"
    if one is None or other is None:
        return "only in the second" if one is None else "only in the first"
    (low, high), (other_low, other_high) = _ends(first, quantity), _ends(second, quantity)
    if None not in (low, other_low):
        assert low is not None
        assert other_low is not None
        reaches = high is None or high >= other
        if low <= other and reaches and other_low <= one and (other_high is None or other_high >= one):
            return "within the intervals"
    if one == 0 or (one < 0) != (other < 0):
        return "from nothing" if one == 0 else "changed its sign"
    return f"x {other / one:.3g}"


def draw_comparison(first: Data, second: Data, names: tuple[str, str]) -> str:
    """Draw two runs as one HTML page; `names` are what they are called on it.

    >>> page = draw_comparison({"fit": {"micro_batch": 8}}, {"fit": {"micro_batch": 12}}, ("a.json", "<b>.json"))
    >>> "x 1.5" in page, "&lt;b&gt;" in page
    (True, True)
    """
    lines = compare_runs(first, second)
    changed = [line for line in lines if not line.is_same]
    same = [f"{line.name}: {_words_of(line.before)}" for line in lines if line.is_same]
    pieces = [
        element("header", element("p", "batchwright", class_="brand"), element("h1", "Two runs, side by side")),
        element(
            "main",
            element("section", _side_by_side(first, second, names), id="answer", aria_label="The answers"),
            _section("changed", "What changed", [_table(changed, names)] if changed else [_nothing()]),
            _section("same", "What is the same", [remarks(same)]) if same else Html(""),
            *_only_in_one(first, second, names),
        ),
        draw_footer(first, second),
    ]
    return frame_page(f"{names[0]} and {names[1]}: two runs", joined(pieces))


def _side_by_side(first: Data, second: Data, names: tuple[str, str]) -> Html:
    sides = []
    for run, name in zip((first, second), names, strict=True):
        unfinished = (
            element("p", "This run was not finished.", class_="missing") if run.get("finished") is False else ""
        )
        what = text_in(section_of(run, "workload"), "name")
        words = element("p", answer_sentence(run), class_="answer")
        below = element("p", joined([what, " \N{MIDDLE DOT} " if what else "", subtitle(run)]), class_="subtitle")
        sides.append(element("div", element("h2", breakable(name)), words, below, unfinished, class_="side"))
    return element("div", *sides, class_="sides")


def _table(lines: list[Line], names: tuple[str, str]) -> Html:
    columns: list[tuple[str, list[str]]] = [
        ("what", [line.name for line in lines]),
        (breakable(names[0]), [line.before for line in lines]),
        (breakable(names[1]), [line.after for line in lines]),
        ("change", [line.change for line in lines]),
    ]
    return table(columns, label="Table of what changed", stacks=True)


def _nothing() -> Html:
    return element("p", "Nothing that was measured or predicted differs.", class_="lead")


def _section(name: str, heading: str, pieces: list[Html]) -> Html:
    title = element("h2", heading, id=f"{name}-heading")
    return element("section", title, *pieces, id=name, aria_labelledby=f"{name}-heading")


def _words_of(cell: Html) -> str:
    """Return a cell without its mark."""
    return unescape(re.sub(r"<[^>]*>", "", re.sub(r'<span class="mark.*?</span>', "", cell))).strip()


_STAGES = ("estimate", "fit", "throughput", "audit", "noise", "branches", "race", "rate", "plan", "recommendation")


def _only_in_one(first: Data, second: Data, names: tuple[str, str]) -> Iterator[Html]:
    words = []
    for stage in _STAGES:
        have = [section_of(run, stage) is not None for run in (first, second)]
        if have[0] != have[1]:
            lacking = have.index(False)
            why = why_missing((first, second)[lacking], stage)
            words.append(f"{stage} is not in {names[lacking]}: {why}")
    if words:
        yield _section("missing", "Only in one of them", [remarks(words)])
