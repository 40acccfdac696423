"""How fast it runs: throughput against micro-batch, with its spread."""

from __future__ import annotations

from functools import partial

from batchwright.report.page import figures
from batchwright.report.page.chart import Chart, at_both_widths, legend
from batchwright.report.page.markup import Html, element, figure_with, joined, missing, remarks, section
from batchwright.report.page.reading import Data, number_in, section_of, text_in, texts_in, why_missing
from batchwright.report.page.scale import Scale, even_ticks, size_scale, size_ticks
from batchwright.report.page.series import Speed, speeds

HEADING = "How fast it runs"


def draw_speed(run: Data) -> Html:
    """Return the section."""
    found, shown = section_of(run, "throughput"), speeds(run)
    if found is None:
        return section("speed", HEADING, missing(why_missing(run, "throughput")))
    if not shown:
        return section("speed", HEADING, missing("no micro-batch was timed"), remarks(texts_in(found, "notes")))
    fastest = number_in(found, "fastest_micro_batch")
    repeats = number_in(found["rows"][0], "repeats") if isinstance(found.get("rows"), list) else None
    spread = "spread of the repeats" if repeats is None else f"spread of {figures.count(repeats)} repeats"
    return section(
        "speed",
        HEADING,
        _lead(found, fastest),
        at_both_widths(partial(_chart, shown, fastest, number_in(found, "devices"))),
        legend(("point measured", "whole steps (measured)"), ("whisker measured", spread)),
        remarks(texts_in(found, "notes")),
    )


def _lead(found: Data, fastest: float | None) -> Html:
    source, pieces = text_in(found, "source") or "measured", []
    best, noise = number_in(found, "best_samples_per_second"), number_in(found, "noise")
    if fastest is not None:
        pieces += [
            "Micro-batch ",
            figure_with(figures.count(fastest), source),
            " is the smallest that is as fast as any",
        ]
    if best is not None:
        pieces += [
            ": at best " if pieces else "At best ",
            figure_with(figures.count(best), source),
            " samples per second",
        ]
    if noise is not None:
        share = f"{100 * noise:.2g}\N{NO-BREAK SPACE}%"
        pieces += [", give or take ", element("b", share)] if pieces else [f"The noise is {share}"]
    return element("p", joined(pieces), ".", class_="lead") if pieces else Html("")


def _chart(shown: tuple[Speed, ...], fastest: float | None, devices: float | None, width: float) -> Chart:
    height, top, bottom = 280.0, 44.0, 230.0
    up = Scale(0, max(row.high for row in shown) * 1.15, bottom, top)
    across = size_scale([row.micro_batch for row in shown], 54, width - 14, spread=6)
    told = "; ".join(f"{figures.count(row.micro_batch)}: {figures.count(row.per_second)}" for row in shown)
    chart = Chart(width, height, label=f"Samples per second by micro-batch: {told}")
    where = "" if devices in (None, 1) else ", each device"
    chart.y_axis(up, even_ticks(0, up.high, 5), figures.short, f"samples per second{where}", across=across)
    chart.x_axis(across, _sizes(shown, across), figures.short, "micro-batch", y=bottom)
    places = [(across(row.micro_batch), up(row.per_second)) for row in shown]
    chart.line(places, "line measured")
    chart.keep_free(places)
    for row, at in zip(shown, places, strict=True):
        low, high = up(row.low), up(row.high)
        chart.line([(at[0], low), (at[0], high)], "whisker measured")
        for end in (low, high):
            chart.line([(at[0] - 4, end), (at[0] + 4, end)], "whisker measured")
        chart.keep_free([(at[0] - 4, high), (at[0] + 4, low)])
        chart.dot(
            at,
            "point measured",
            f"micro-batch {figures.count(row.micro_batch)}: {figures.count(row.per_second)} a second",
        )
    for row, at in zip(shown, places, strict=True):
        if row.micro_batch == fastest:
            chart.beside(
                (at[0], up(row.high) + 4), f"{figures.count(row.per_second)} at {figures.count(fastest)}", "note strong"
            )
    return chart


def _sizes(shown: tuple[Speed, ...], across: Scale) -> list[float]:
    """The sizes that were timed, where they are few."""
    return [row.micro_batch for row in shown] if len(shown) <= 10 else size_ticks(across, 8)
