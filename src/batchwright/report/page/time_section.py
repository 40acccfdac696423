"""Which batch gets there soonest: time to the loss against the effective batch, the good range shaded."""

from __future__ import annotations

from functools import partial

from batchwright.report.page import figures
from batchwright.report.page.chart import Chart, at_both_widths, legend
from batchwright.report.page.markup import Html, element, figure_with, joined, missing, section
from batchwright.report.page.reading import Data, number_in, section_of, why_missing
from batchwright.report.page.scale import Scale, doubling_ticks, log_ticks
from batchwright.report.page.series import TimeAt, good_range, times_to_target

HEADING = "Which batch gets there soonest"


def draw_time(run: Data) -> Html:
    """Return the section."""
    found, shown = section_of(run, "recommendation"), times_to_target(run)
    if found is None:
        return section("time", HEADING, missing(why_missing(run, "recommendation")))
    if len(shown) < 2:
        return section("time", HEADING, missing("it takes both the critical batch and the time of a step"))
    chosen, ends = number_in(found, "effective_batch"), good_range(run)
    entries = [("line predicted", "time to the same loss (predicted from both measurements)")]
    entries.append(("band predicted", "between the ends of the critical batch"))
    entries += [("range measured", "within 5\N{NO-BREAK SPACE}% of the soonest")] if ends else []
    return section(
        "time",
        HEADING,
        _lead(found, ends),
        at_both_widths(partial(_chart, shown, chosen, ends)),
        legend(*entries),
    )


def _lead(found: Data, ends: tuple[float, float] | None) -> Html:
    soonest = number_in(found, "best_effective_batch")
    pieces: list[str] = []
    if soonest is not None:
        pieces += ["A batch of ", figure_with(figures.count(soonest), "predicted"), " reaches the loss soonest"]
    if ends is not None:
        text = " to ".join(figures.count(end) for end in ends)
        pieces += [
            "; " if pieces else "Batches of ",
            figure_with(text, "predicted"),
            " take at most 5\N{NO-BREAK SPACE}% longer",
        ]
    return element("p", joined(pieces), ".", class_="lead") if pieces else Html("")


def _chart(shown: tuple[TimeAt, ...], chosen: float | None, ends: tuple[float, float] | None, width: float) -> Chart:
    height, top, bottom = 326.0, 74.0, 276.0
    most = max(max(row.ratio for row in shown) * 1.3, 1.6)
    up = Scale(min(0.94, *(row.ratio for row in shown)), most, bottom, top, is_log=True)
    batches = [row.batch for row in shown] + ([chosen] if chosen and chosen > 0 else [])
    across = Scale(min(batches) / 1.1, max(batches) * 1.1, 54, width - 14, is_log=True)
    chart = Chart(
        width, height, label="Time to the same loss against the effective batch, as a multiple of the soonest"
    )
    if ends is not None and ends[0] < across.high and ends[1] > across.low:
        left, right = across(ends[0]), across(ends[1])
        chart.bar(
            left, top, max(right, left + 2), bottom, "range measured", "within 5\N{NO-BREAK SPACE}% of the soonest"
        )
    ticks = log_ticks(1, up.high, 6)
    chart.y_axis(
        up, ticks, lambda value: f"{value:g}\N{MULTIPLICATION SIGN}", "time to the loss", across=across, above=40
    )
    batches_told = doubling_ticks(across.low, across.high, 10 if width > 500 else 5)
    chart.x_axis(across, batches_told, figures.short, "effective batch", y=bottom)
    lows, highs = ([(across(row.batch), up(end)) for row, end in _ends(shown, side)] for side in ("low", "high"))
    chart.area([*lows, *reversed(highs)], "band predicted")
    places = [(across(row.batch), up(row.ratio)) for row in shown]
    chart.line(places, "line predicted")
    chart.keep_free(places)
    for row, at in zip(shown, places, strict=True):
        chart.dot(at, "point predicted", f"batch {figures.count(row.batch)}: {figures.ratio(row.ratio)} times", 2.5)
    if chosen is not None and chosen > 0:
        x = across(chosen)
        chart.line([(x, top - 6), (x, bottom)], "chosen")
        chart.text((x, top - 12), f"{figures.count(chosen)} recommended", "note strong", _side(x, width))
    return chart


def _ends(shown: tuple[TimeAt, ...], side: str) -> list[tuple[TimeAt, float]]:
    return [(row, row.low if side == "low" else row.high) for row in shown]


def _side(x: float, width: float) -> str:
    return "start" if x < 150 else "end" if x > width - 80 else "middle"
