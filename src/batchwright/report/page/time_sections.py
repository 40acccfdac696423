"""The sections about time: how fast it runs, how large a batch pays, and which batch gets there soonest."""

from __future__ import annotations

from functools import partial
from itertools import groupby

from batchwright.report.page import figures
from batchwright.report.page.chart import (
    Chart,
    Scale,
    at_both_widths,
    doubling_ticks,
    even_ticks,
    legend,
    log_ticks,
    size_scale,
    size_ticks,
)
from batchwright.report.page.device_sections import draw_step_seconds
from batchwright.report.page.markup import (
    Html,
    capitalized,
    element,
    figure_with,
    joined,
    mark,
    missing,
    remarks,
    sentence,
    table,
)
from batchwright.report.page.run_reading import (
    Data,
    Moment,
    Point,
    good_range,
    mapping_in,
    moments,
    number_in,
    raced,
    rows_in,
    section_of,
    span_in,
    speeds,
    text_in,
    texts_in,
    times_to_target,
    why_missing,
)
from batchwright.units import counted


def draw_speed(record: Data, run: Data) -> list[str]:
    """Draw how fast it runs."""
    shown = speeds(run)
    if not shown:
        return [missing("no micro-batch was timed"), remarks(texts_in(record, "notes"))]
    fastest = number_in(record, "fastest_micro_batch")
    repeats = number_in(record["rows"][0], "repeats") if isinstance(record.get("rows"), list) else None
    source = "predicted" if text_in(record, "source") == "predicted" else "measured"
    spread = "spread of the repeats" if repeats is None else f"spread of {figures.count(repeats)} repeats"
    if source == "predicted":
        spread = "where nine of ten such predictions were true"
    return [
        _speed_lead(record, fastest),
        at_both_widths(partial(_speed_chart, shown, fastest, number_in(record, "devices"), source)),
        legend((f"point {source}", f"whole steps ({source})"), (f"whisker {source}", spread)),
        *draw_step_seconds(record),
        remarks(texts_in(record, "notes")),
    ]


def _speed_lead(record: Data, fastest: float | None) -> Html:
    source, pieces = text_in(record, "source") or "measured", list[str]()
    best, noise = number_in(record, "best_samples_per_second"), number_in(record, "noise")
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
    return sentence(*pieces)


def _speed_chart(
    shown: tuple[Point, ...], fastest: float | None, devices: float | None, source: str, width: float
) -> Chart:
    height, top, bottom = 280.0, 44.0, 230.0
    up = Scale(0, max(row.high for row in shown) * 1.15, bottom, top)
    across = size_scale([row.batch for row in shown], 54, width - 14, spread=6)
    label = "; ".join(f"{figures.count(row.batch)}: {figures.count(row.value)}" for row in shown)
    chart = Chart(width, height, label=f"Samples per second by micro-batch: {label}")
    where = "" if devices in (None, 1) else ", each device"
    chart.y_axis(up, even_ticks(0, up.high, 5), figures.short, f"samples per second{where}", across=across)
    sizes = [row.batch for row in shown] if len(shown) <= 10 else size_ticks(across, 8)  # those timed, if they are few
    chart.x_axis(across, sizes, figures.short, "micro-batch", y=bottom)
    places = [(across(row.batch), up(row.value)) for row in shown]
    chart.line(places, f"line {source}", is_kept_free=True)
    for row, at in zip(shown, places, strict=True):
        low, high = up(row.low), up(row.high)
        chart.line([(at[0], low), (at[0], high)], f"whisker {source}")
        for end in (low, high):
            chart.line([(at[0] - 4, end), (at[0] + 4, end)], f"whisker {source}")
        chart.keep_free([(at[0] - 4, high), (at[0] + 4, low)])
        chart.dot(
            at,
            f"point {source}",
            f"micro-batch {figures.count(row.batch)}: {figures.count(row.value)} a second",
        )
    for row in shown:
        if row.batch == fastest:
            label = f"{figures.count(row.value)} at {figures.count(fastest)}"
            chart.beside((across(row.batch), up(row.high) + 4), label)
    return chart


def draw_time(record: Data, run: Data) -> list[str]:
    """Draw which batch gets there soonest."""
    shown = times_to_target(run)
    if len(shown) < 2:
        return [missing("it takes both the critical batch and the time of a step")]
    chosen, ends = number_in(record, "effective_batch"), good_range(run)
    entries = [
        ("line predicted", "time to the same loss (predicted from both measurements)"),
        ("band predicted", "where it lies with a chance of 80\N{NO-BREAK SPACE}%"),
    ]
    race = raced(run)
    entries += [("point measured", "raced against the one in the middle, 80\N{NO-BREAK SPACE}%")] if race else []
    entries += [("range measured", "within 5\N{NO-BREAK SPACE}% of the soonest")] if ends else []
    chart = at_both_widths(partial(_time_chart, shown, race, chosen, ends))
    return [_time_lead(record, ends), chart, legend(*entries), _bill(record)]


def _bill(record: Data) -> Html:
    """Say how many hours the run takes and what it costs, where that was asked; empty where it was not.

    >>> whole = {"hours": 12.0, "hours_interval": [10.0, 15.0], "cost": 240.0, "cost_interval": [200.0, 300.0]}
    >>> "12" in _bill({"run": whole, "devices": 8}), _bill({})
    (True, '')
    """
    hours, span = number_in(record, "run", "hours"), span_in(record, "run", "hours_interval")
    devices = number_in(record, "devices")
    if hours is None or span is None or devices is None:
        return Html("")
    pieces = ["The run takes ", figure_with(f"{hours:.3g} h [{span[0]:.3g}, {span[1]:.3g}]", "predicted")]
    pieces += [f" on {counted(round(devices), 'device')}"]
    cost, ends = number_in(record, "run", "cost"), span_in(record, "run", "cost_interval")
    if cost is not None and ends is not None:
        pieces += [" and costs ", figure_with(f"{cost:.3g} [{ends[0]:.3g}, {ends[1]:.3g}]", "predicted")]
        pieces += [" for all of them"] if devices > 1 else []
    return sentence(*pieces)


def _time_lead(record: Data, ends: tuple[float, float] | None) -> Html:
    """Say which batch is soonest, until where, and what is as good."""
    soonest = number_in(record, "best_effective_batch")
    pieces: list[str] = []
    if soonest is not None:
        pieces += ["A batch of ", figure_with(figures.count(soonest), "predicted"), " reaches the loss soonest"]
        until = text_in(record, "horizon", "words")
        pieces += [f" ({until})"] if until else []
    if ends is not None:
        text = " to ".join(figures.count(end) for end in ends)
        pieces += [
            "; " if pieces else "Batches of ",
            figure_with(text, "predicted"),
            " take at most 5\N{NO-BREAK SPACE}% longer",
        ]
    return sentence(*pieces)


def _time_chart(
    shown: tuple[Point, ...],
    race: tuple[Point, ...],
    chosen: float | None,
    ends: tuple[float, float] | None,
    width: float,
) -> Chart:
    height, top, bottom = 326.0, 74.0, 276.0
    most = max(max(row.value for row in (*shown, *race)) * 1.3, 1.6)
    up = Scale(min(0.94, *(row.value for row in (*shown, *race))), most, bottom, top, is_log=True)
    batches = [row.batch for row in (*shown, *race)] + ([chosen] if chosen and chosen > 0 else [])
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
    lows = [(across(row.batch), up(row.low)) for row in shown]
    chart.area([*lows, *((across(row.batch), up(row.high)) for row in reversed(shown))], "band predicted")
    places = [(across(row.batch), up(row.value)) for row in shown]
    chart.line(places, "line predicted", is_kept_free=True)
    for row, at in zip(shown, places, strict=True):
        chart.dot(at, "point predicted", f"batch {figures.count(row.batch)}: {figures.ratio(row.value)} times", 2.5)
    for row in race:
        x, low, high = across(row.batch), up(max(row.low, up.low)), up(min(row.high, up.high))
        chart.line([(x, low), (x, high)], "whisker measured")
        words = f"raced, batch {figures.count(row.batch)}: {figures.ratio(row.value)} times"
        chart.dot((x, up(row.value)), "point measured", words)
    if chosen is not None and chosen > 0:
        x = across(chosen)
        chart.line([(x, top - 6), (x, bottom)], "chosen")
        side = "start" if x < 150 else "end" if x > width - 80 else "middle"
        chart.text((x, top - 12), f"{figures.count(chosen)} recommended", "note strong", side)
    return chart


def _draw_branches(run: Data) -> Html:
    """Return what short branches measured, to stand below the critical batch; nothing if none were trained."""
    record = section_of(run, "branches")
    if record is None:
        return Html("")
    rows, source = rows_in(record, "branches"), text_in(record, "source")
    title = element("h3", "Short branches at several batches")
    shown = table(_columns(rows, source), label="Table of branches", words=0) if rows else Html("")
    return joined([title, _branches_lead(record, source), shown, remarks(texts_in(record, "notes"))])


def _branches_lead(record: Data, source: str) -> Html:
    value, low, high = (figures.count(number_in(record, "critical_batch", key)) for key in ("value", "low", "high"))
    unit, share = text_in(record, "critical_batch", "unit") or "samples", number_in(record, "ratio")
    pieces: list[str] = [
        "By them the critical batch is ",
        figure_with(value, source, figures.interval(low, high)),
        f" {unit}",
    ]
    if share is not None:
        pieces += [", ", figure_with(figures.times(share), source), " the noise scale at the same place"]
    return sentence(*pieces, class_=None)


def _columns(rows: list[Data], source: str) -> list[tuple[str, list[str]]]:
    mine, given = mark(source), mark("given")
    loss, rate = "steps to the loss ", "learning rate, times the first "
    return [
        (joined(["batch ", given]), [figures.count(number_in(row, "batch")) for row in rows]),
        (joined([rate, mine]), [figures.ratio(number_in(row, "learning_rate_factor")) for row in rows]),
        (joined([loss, mine]), [figures.exact(number_in(row, "mean_steps"), ",.1f") for row in rows]),
    ]


def draw_critical(record: Data | None, run: Data) -> list[str]:
    """Draw how large a batch pays; branches may have been trained also where the noise was not measured."""
    if record is None:
        return [missing(why_missing(run, "noise")), _draw_branches(run)]
    shown = moments(run)
    unit = text_in(record, "critical_batch", "unit") or "samples"
    # The two can be in different units (tokens, samples); then they have no place on one axis.
    alike = text_in(record, "effective_batch_unit") in ("", unit)
    in_use = number_in(record, "effective_batch") if alike else None
    drawn: list[str] = []
    if any(moment.value is not None or moment.low is not None for moment in shown):
        drawn += [at_both_widths(partial(_critical_chart, shown, in_use, unit)), _legend(shown, in_use)]
    if any(moment.loss is not None for moment in shown):
        drawn.append(at_both_widths(partial(_losses, shown)))
    verdict = text_in(record, "recommendation")
    if verdict:
        drawn.append(sentence(capitalized(verdict), class_=None))
    return [_critical_lead(record, unit), *drawn, remarks(texts_in(record, "notes")), _draw_branches(run)]


def _critical_lead(record: Data, unit: str) -> Html:
    critical = mapping_in(record, "critical_batch")
    value, low, high = (figures.count(number_in(critical, key)) for key in ("value", "low", "high"))
    source = text_in(record, "source") or "measured"
    steps = number_in(record, "steps")
    after = "" if steps is None else f"After {figures.count(steps)} steps the "
    start = f"{after or 'The '}critical batch is "
    if critical.get("resolved") is False and low not in ("0", figures.UNKNOWN):
        more = number_in(critical, "steps_needed")
        needed = f"; about {figures.count(more)} more steps would tell" if more else ""
        known = figure_with(f"at least {low}", source)
        return element("p", start, known, f" {unit}. Its upper end is not resolved{needed}.", class_="lead")
    known = figure_with(value, source, figures.interval(low, high))
    return element("p", start, known, f" {unit}: beyond it, more samples per step stop paying.", class_="lead")


def _critical_chart(shown: tuple[Moment, ...], in_use: float | None, unit: str, width: float) -> Chart:
    height, top, bottom = 290.0, 44.0, 240.0
    ends = [end for moment in shown for end in (moment.value, moment.low, moment.high) if end is not None]
    ends += [in_use] if in_use and in_use > 0 else []
    least, most = min(ends), max(ends)
    up = Scale(least / 1.5, most * 1.5, bottom, top, is_log=True)
    across = _critical_steps(shown, width)
    chart = Chart(
        width, height, label=f"The critical batch along training, from {figures.count(least)} to {figures.count(most)}"
    )
    chart.y_axis(up, log_ticks(up.low, up.high, 6), figures.short, f"batch, {unit}", across=across)
    chart.x_axis(across, _step_ticks(across, width), figures.short, "step", y=bottom)
    # Where the lower end is not known it is as low as the drawing; an upper one runs out of it.
    lows = [(across(moment.step), up(moment.low or up.low)) for moment in shown]
    highs = [(across(moment.step), up(moment.high or up.high)) for moment in shown]
    if len(shown) == 1:
        chart.line([lows[0], highs[0]], "whisker measured")
    chart.area([*lows, *reversed(highs)], "band measured")
    # The line breaks where the value is not known.
    for run in [list(group) for is_known, group in groupby(shown, lambda m: m.value is not None) if is_known]:
        places = [(across(moment.step), up(moment.value)) for moment in run if moment.value is not None]
        chart.line(places, "line measured", is_kept_free=True)
        for moment, at in zip(run, places, strict=True):
            span = figures.interval(figures.count(moment.low), figures.count(moment.high))
            chart.dot(
                at, "point measured", f"step {figures.count(moment.step)}: {figures.count(moment.value)} {span}", 3
            )
    if in_use:
        y = up(in_use)
        chart.line([(across.start, y), (across.end, y)], "limit", is_kept_free=True)
        chart.beside((across.end, y), f"{figures.count(in_use)} in use", first="above left")
    return chart


def _losses(shown: tuple[Moment, ...], width: float) -> Chart:
    height, top, bottom = 190.0, 44.0, 140.0
    known = [(moment.step, moment.loss) for moment in shown if moment.loss is not None]
    least, most = min(loss for _, loss in known), max(loss for _, loss in known)
    room = max((most - least) * 0.12, abs(most) * 0.02, 1e-9)
    up, across = Scale(least - room, most + room, bottom, top), _critical_steps(shown, width)
    chart = Chart(width, height, label=f"The loss along training, from {known[0][1]:.3g} to {known[-1][1]:.3g}")
    chart.y_axis(up, even_ticks(up.low, up.high, 4), lambda loss: f"{loss:.3g}", "loss (measured)", across=across)
    chart.x_axis(across, _step_ticks(across, width), figures.short, "step", y=bottom)
    places = [(across(step), up(loss)) for step, loss in known]
    chart.line(places, "line measured", is_kept_free=True)
    chart.dot(places[-1], "point measured", radius=3)
    chart.beside(places[-1], f"{known[-1][1]:.3g}", first="above left")
    return chart


def _critical_steps(shown: tuple[Moment, ...], width: float) -> Scale:
    last = max(moment.step for moment in shown)
    return Scale(0, last * 1.03 if last > 0 else 1, 54, width - 14)


def _step_ticks(across: Scale, width: float) -> list[float]:
    return even_ticks(0, across.high, 8 if width > 500 else 4, least=1)


def _legend(shown: tuple[Moment, ...], in_use: float | None) -> Html:
    is_open = any(moment.high is None for moment in shown)
    band = "95\N{NO-BREAK SPACE}% interval (measured)" + (
        "; where it runs out at the top, not resolved" if is_open else ""
    )
    entries = [("line measured", "critical batch (measured)"), ("band measured", band)]
    return legend(*entries, *([("limit", "batch in use (given)")] if in_use else []))
