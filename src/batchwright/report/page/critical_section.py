"""How large a batch pays: the critical batch along training with its band, and the loss below it."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

from batchwright.report.page import figures
from batchwright.report.page.branches_section import draw_branches
from batchwright.report.page.chart import Chart, at_both_widths, legend
from batchwright.report.page.markup import Html, element, figure_with, missing, remarks, section
from batchwright.report.page.reading import Data, mapping_in, number_in, section_of, text_in, texts_in, why_missing
from batchwright.report.page.scale import Scale, even_ticks, log_ticks, whole_ticks
from batchwright.report.page.series import Moment, moments

HEADING = "How large a batch pays"


class InUse(NamedTuple):
    """The batch that was trained with, and the unit that the critical batch is in."""

    batch: float | None
    unit: str


def draw_critical(run: Data) -> Html:
    """Return the section."""
    found, shown = section_of(run, "noise"), moments(run)
    if found is None:
        return section("critical", HEADING, missing(why_missing(run, "noise")), draw_branches(run))
    unit = text_in(found, "critical_batch", "unit") or "samples"
    # The two can be in different units (tokens, samples); then they have no place on one axis.
    alike = text_in(found, "effective_batch_unit") in ("", unit)
    in_use = InUse(number_in(found, "effective_batch") if alike else None, unit)
    drawn: list[str] = []
    if any(each.value is not None or each.low is not None for each in shown):
        drawn += [at_both_widths(partial(_chart, shown, in_use)), _legend(shown, in_use)]
    if any(each.loss is not None for each in shown):
        drawn.append(at_both_widths(partial(_losses, shown)))
    verdict = text_in(found, "recommendation")
    return section(
        "critical",
        HEADING,
        _lead(found, unit),
        *drawn,
        element("p", f"{verdict[:1].upper()}{verdict[1:].rstrip('.')}.") if verdict else Html(""),
        remarks(texts_in(found, "notes")),
        draw_branches(run),
    )


def _lead(found: Data, unit: str) -> Html:
    critical = mapping_in(found, "critical_batch")
    value, low, high = (figures.count(number_in(critical, key)) for key in ("value", "low", "high"))
    source = text_in(found, "source") or "measured"
    steps = number_in(found, "steps")
    after = "" if steps is None else f"After {figures.count(steps)} steps the "
    start = f"{after or 'The '}critical batch is "
    if critical.get("resolved") is False and low not in ("0", figures.UNKNOWN):
        more = number_in(critical, "steps_needed")
        needed = f"; about {figures.count(more)} more steps would tell" if more else ""
        known = figure_with(f"at least {low}", source)
        return element("p", start, known, f" {unit}. Its upper end is not resolved{needed}.", class_="lead")
    known = figure_with(value, source, figures.interval(low, high))
    return element("p", start, known, f" {unit}: beyond it, more samples per step stop paying.", class_="lead")


def _chart(shown: tuple[Moment, ...], in_use: InUse, width: float) -> Chart:
    height, top, bottom = 290.0, 44.0, 240.0
    ends = [end for each in shown for end in (each.value, each.low, each.high) if end is not None]
    ends += [] if in_use.batch is None or in_use.batch <= 0 else [in_use.batch]
    least, most = min(ends), max(ends)
    up = Scale(least / 1.5, most * 1.5, bottom, top, is_log=True)
    across = _steps(shown, width)
    chart = Chart(
        width, height, label=f"The critical batch along training, from {figures.count(least)} to {figures.count(most)}"
    )
    chart.y_axis(up, log_ticks(up.low, up.high, 6), figures.short, f"batch, {in_use.unit}", across=across)
    chart.x_axis(across, _step_ticks(across, width), figures.short, "step", y=bottom)
    # Where the lower end is not known it is as low as the drawing; an upper one runs out of it.
    lows = [(across(each.step), up(each.low or up.low)) for each in shown]
    highs = [(across(each.step), up(each.high or up.high)) for each in shown]
    if len(shown) == 1:
        chart.line([lows[0], highs[0]], "whisker measured")
    chart.area([*lows, *reversed(highs)], "band measured")
    for run in _unbroken(shown):
        places = [(across(each.step), up(each.value)) for each in run if each.value is not None]
        chart.line(places, "line measured")
        for each, at in zip(run, places, strict=True):
            span = figures.interval(figures.count(each.low), figures.count(each.high))
            chart.dot(at, "point measured", f"step {figures.count(each.step)}: {figures.count(each.value)} {span}", 3)
        chart.keep_free(places)
    if in_use.batch:
        y = up(in_use.batch)
        chart.line([(across.start, y), (across.end, y)], "limit")
        chart.keep_free([(across.start, y), (across.end, y)])
        chart.beside((across.end, y), f"{figures.count(in_use.batch)} in use", "note strong", first="above left")
    return chart


def _losses(shown: tuple[Moment, ...], width: float) -> Chart:
    height, top, bottom = 190.0, 44.0, 140.0
    known = [(each.step, each.loss) for each in shown if each.loss is not None]
    least, most = min(loss for _, loss in known), max(loss for _, loss in known)
    room = max((most - least) * 0.12, abs(most) * 0.02, 1e-9)
    up, across = Scale(least - room, most + room, bottom, top), _steps(shown, width)
    chart = Chart(width, height, label=f"The loss along training, from {known[0][1]:.3g} to {known[-1][1]:.3g}")
    chart.y_axis(up, even_ticks(up.low, up.high, 4), lambda loss: f"{loss:.3g}", "loss (measured)", across=across)
    chart.x_axis(across, _step_ticks(across, width), figures.short, "step", y=bottom)
    places = [(across(step), up(loss)) for step, loss in known]
    chart.line(places, "line measured")
    chart.keep_free(places)
    chart.dot(places[-1], "point measured", radius=3)
    chart.beside(places[-1], f"{known[-1][1]:.3g}", "note strong", first="above left")
    return chart


def _steps(shown: tuple[Moment, ...], width: float) -> Scale:
    last = max(each.step for each in shown)
    return Scale(0, last * 1.03 if last > 0 else 1, 54, width - 14)


def _step_ticks(across: Scale, width: float) -> list[float]:
    return whole_ticks(0, across.high, 8 if width > 500 else 4)


def _unbroken(shown: tuple[Moment, ...]) -> list[list[Moment]]:
    """The pieces of the line between moments where the value is not known."""
    pieces: list[list[Moment]] = [[]]
    for each in shown:
        if each.value is not None and math.isfinite(each.value):
            pieces[-1].append(each)
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _legend(shown: tuple[Moment, ...], in_use: InUse) -> Html:
    is_open = any(each.high is None for each in shown)
    band = "95\N{NO-BREAK SPACE}% interval (measured)" + (
        "; where it runs out at the top, not resolved" if is_open else ""
    )
    entries = [("line measured", "critical batch (measured)"), ("band measured", band)]
    return legend(*entries, *([("limit", "batch in use (given)")] if in_use.batch else []))
