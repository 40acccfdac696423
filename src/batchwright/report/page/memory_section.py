"""What a step holds in memory: the parts of the predicted peak, stacked against what there is."""

from __future__ import annotations

from functools import partial

from batchwright.report.page import figures
from batchwright.report.page.chart import Chart, at_both_widths, text_width
from batchwright.report.page.markup import Html, element, figure_with, joined, missing, remarks, section, table
from batchwright.report.page.reading import Data, mapping_in, section_of, text_in, texts_in, why_missing
from batchwright.report.page.scale import Scale, byte_ticks
from batchwright.report.page.series import MemoryParts, is_far_below, memory_parts

HEADING = "What a step holds in memory"
MEANINGS = {
    "weights": "the parameters",
    "gradients": "held at that moment",
    "optimizer": "its state",
    "activations": "kept for the backward",
    "temporaries": "gone after the operator",
    "inputs": "the batch itself",
    "workspaces": "what kernels ask for",
    "slack": "kept by the allocator, not in use",
    "context": "what the device's driver takes",
}


def draw_memory(run: Data) -> Html:
    """Return the section."""
    shown = memory_parts(run)
    if shown is None:
        return section("memory", HEADING, missing(why_missing(run, "estimate")))
    found = section_of(run, "estimate")
    return section(
        "memory",
        HEADING,
        _lead(shown, found),
        at_both_widths(partial(_chart, shown)),
        _parts(shown),
        remarks(texts_in(found, "notes")),
    )


def _lead(shown: MemoryParts, found: Data | None) -> Html:
    size = "" if shown.micro_batch is None else f"At micro-batch {figures.count(shown.micro_batch)} the "
    peak = figure_with(figures.memory(shown.peak_bytes), shown.source)
    pieces: list[str] = [f"{size or 'The '}peak is ", peak]
    if shown.limit_bytes is not None:
        pieces += [" of ", figure_with(figures.memory(shown.limit_bytes), "given")]
    moment = mapping_in(found, "peak_at")
    if text_in(moment, "phase"):
        operator = text_in(moment, "operator").removeprefix("aten.")
        pieces += [
            f", reached in the {text_in(moment, 'phase')}",
            *([" at ", element("code", operator)] if operator else []),
        ]
    return element("p", joined(pieces), ".", class_="lead")


def _chart(shown: MemoryParts, width: float) -> Chart:
    told = ", ".join(f"{name} {figures.memory(size)}" for name, size in shown.parts)
    used = max(shown.peak_bytes, shown.upper_bytes or 0, sum(size for _, size in shown.parts))
    # Of a card that is mostly empty the parts would be slivers: they are drawn once more below, larger.
    is_sliver = is_far_below(used, shown.limit_bytes)
    chart = Chart(width, 192 if is_sliver else 122, label=f"Parts of the peak: {told}")
    whole = Scale(0, max(used, shown.limit_bytes or 0) * 1.04, 1, width - 1)
    if is_sliver:
        close = Scale(0, used * 1.04, 1, width - 1)
        _bar(chart, shown, whole, 28, 46)
        chart.area([(1, 48), (whole(used * 1.04), 48), (width - 1, 82), (1, 82)], "zoom")
        _bar(chart, shown, close, 84, 128)
        _limit(chart, shown, whole, 50)
        _amounts(chart, close, 140)
    else:
        _bar(chart, shown, whole, 34, 78)
        _limit(chart, shown, whole, 84)
        _amounts(chart, whole, 90)
    return chart


def _bar(chart: Chart, shown: MemoryParts, across: Scale, top: float, bottom: float) -> None:
    left, middle = 0.0, (top + bottom) / 2
    for name, size in shown.parts:
        right = left + size
        chart.bar(across(left), top, across(right), bottom, f"part {_style(name)}", f"{name}: {figures.memory(size)}")
        if across(right) - across(left) > text_width(name) + 12 and bottom - top > 30:
            chart.text(((across(left) + across(right)) / 2, middle + 4), name, f"in-part {_style(name)}", "middle")
        left = right
    if shown.upper_bytes is not None and shown.upper_bytes > shown.peak_bytes:
        end = across(shown.upper_bytes)
        chart.line([(across(shown.peak_bytes), middle), (end, middle)], "whisker predicted")
        chart.line([(end, middle - 6), (end, middle + 6)], "whisker predicted")


def _limit(chart: Chart, shown: MemoryParts, across: Scale, bottom: float) -> None:
    if shown.limit_bytes is not None:
        x = across(shown.limit_bytes)
        chart.line([(x, 20), (x, bottom)], "limit")
        text = f"{figures.memory(shown.limit_bytes)} available"
        chart.text((x, 14), text, "note strong", "end" if x > chart.width / 2 else "start")


def _amounts(chart: Chart, across: Scale, y: float) -> None:
    ticks = byte_ticks(across.high, 5 if chart.width > 500 else 3)
    chart.x_axis(across, [tick for tick in ticks if tick], figures.memory, "", y=y)


def _style(name: str) -> str:
    return f"part-{name}" if name in MEANINGS else "part-other"


def _parts(shown: MemoryParts) -> Html:
    names = [
        joined(
            [
                element("span", class_=f"swatch {_style(name)}"),
                name,
                " ",
                element("span", MEANINGS.get(name, ""), class_="aside"),
            ]
        )
        for name, _ in shown.parts
    ]
    growth = [shown.growth.get(name) for name, _ in shown.parts]
    columns: list[tuple[str, list[str]]] = [
        ("part", list(names)),
        ("at the peak", [figures.memory(size) for _, size in shown.parts]),
    ]
    if any(growth):
        columns.append(("per further sample", [figures.memory(each) if each else figures.UNKNOWN for each in growth]))
    return table(columns, label="Table of parts")
