"""The sections about predicted time: seconds of a step over the micro-batch, and the run over the number of devices."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from batchwright.report.page import figures
from batchwright.report.page.chart import Chart, Scale, at_both_widths, even_ticks, legend, log_ticks, size_scale
from batchwright.report.page.markup import Html, figure_with, sentence, table
from batchwright.report.page.run_reading import Data, Point, number_in, rows_in, section_of, text_in
from batchwright.units import counted

_HEIGHT, _TOP, _BOTTOM = 280.0, 44.0, 230.0


class Row(NamedTuple):
    """The run on so many devices, over that on the fewest."""

    devices: float
    batch: float | None
    step: float | None
    time: float
    cost: float
    """Device-hours, over those of the fewest devices."""


def draw_step_seconds(record: Data) -> list[str]:
    """Draw the seconds of a step over the micro-batch, where they were predicted."""
    shown = _steps(record)
    if len(shown) < 2 or text_in(record, "source") != "predicted":
        return []
    return [
        at_both_widths(partial(_step_chart, shown)),
        legend(
            ("point predicted", "seconds of a whole step (predicted)"),
            ("whisker predicted", "where nine of ten such predictions were true"),
        ),
    ]


def _steps(record: Data) -> tuple[Point, ...]:
    rows = []
    for row in rows_in(record, "rows"):
        size, middle = number_in(row, "micro_batch"), number_in(row, "seconds")
        low, high = number_in(row, "low_seconds"), number_in(row, "high_seconds")
        if size and middle and size > 0 and middle > 0:
            rows.append(Point(size, middle, min(low or middle, middle), max(high or middle, middle)))
    return tuple(sorted(rows, key=lambda row: row.batch))


def _step_chart(shown: tuple[Point, ...], width: float) -> Chart:
    up = Scale(0, max(row.high for row in shown) * 1.1, _BOTTOM, _TOP)
    across = size_scale([row.batch for row in shown], 54, width - 14, spread=6)
    label = "; ".join(f"{figures.count(row.batch)}: {figures.seconds(row.value)}" for row in shown)
    chart = Chart(width, _HEIGHT, label=f"Seconds of a step by micro-batch: {label}")
    chart.y_axis(up, even_ticks(0, up.high, 5), figures.seconds, "time of a step", across=across)
    chart.x_axis(across, [row.batch for row in shown], figures.short, "micro-batch", y=_BOTTOM)
    places = [(across(row.batch), up(row.value)) for row in shown]
    chart.line(places, "line predicted", is_kept_free=True)
    for row, (x, y) in zip(shown, places, strict=True):
        chart.line([(x, up(row.low)), (x, up(row.high))], "whisker predicted")
        words = f"micro-batch {figures.count(row.batch)}: {figures.seconds(row.value)}"
        chart.dot((x, y), "point predicted", words)
    return chart


def draw_devices(record: Data | None, run: Data) -> list[str]:
    """Draw the time of the run over the number of devices, and from where on another one stops paying."""
    shown, worth = _devices(run)
    if len(shown) < 2:
        return []
    return [
        _lead(shown, worth),
        at_both_widths(partial(_devices_chart, shown, worth)),
        legend(
            ("line predicted", "time to the same loss, each number of devices at its own soonest batch (predicted)"),
            ("whisker predicted", "device-hours, and so the cost (predicted)"),
        ),
        _table(shown, run),
    ]


def _devices(run: Data) -> tuple[tuple[Row, ...], float | None]:
    section = section_of(run, "recommendation") or {}
    known = section.get("by_devices")
    if not isinstance(known, dict):
        return (), None
    rows = []
    for row in rows_in(known, "rows"):
        devices, time = number_in(row, "devices"), number_in(row, "time_over_one")
        if devices and time and devices > 0 and time > 0:
            step = number_in(row, "seconds_per_step")
            rows.append(Row(devices, number_in(row, "effective_batch"), step, time, devices * time))
    rows.sort()
    first = rows[0].devices if rows else 1.0
    return tuple(row._replace(cost=row.cost / first) for row in rows), number_in(known, "worth")


def _lead(shown: tuple[Row, ...], worth: float | None) -> Html:
    soonest = min(shown, key=lambda row: row.time)
    pieces: list[str] = []
    if worth is not None:
        pieces += [figure_with(figures.count(worth), "predicted"), " devices pay" if worth > 1 else " device pays"]
        pieces += ["; twice as many would make the run less than a third faster"] if worth < shown[-1].devices else []
    pieces += [
        "; " if pieces else "",
        figure_with(figures.count(soonest.devices), "predicted"),
        " would be the soonest",
    ]
    return sentence(*pieces)


def _devices_chart(shown: tuple[Row, ...], worth: float | None, width: float) -> Chart:
    values = [value for row in shown for value in (row.time, row.cost)]
    up = Scale(min(values) / 1.15, max(values) * 1.15, _BOTTOM, _TOP + 20, is_log=True)
    across = Scale(shown[0].devices / 1.15, shown[-1].devices * 1.15, 54, width - 14, is_log=True)
    label = "; ".join(f"{figures.count(row.devices)}: {figures.ratio(row.time)}" for row in shown)
    fewest = figures.count(shown[0].devices)
    chart = Chart(width, _HEIGHT, label=f"Time of the run by devices, over that on {fewest}: {label}")
    over = f"over those of {fewest} device" if shown[0].devices == 1 else f"over those of {fewest} devices"
    ticks = log_ticks(up.low, up.high, 6)
    chart.y_axis(up, ticks, lambda v: f"{v:g}\N{MULTIPLICATION SIGN}", over, across=across, above=34)
    chart.x_axis(across, [row.devices for row in shown], figures.count, "devices", y=_BOTTOM)
    chart.line([(across(row.devices), up(row.cost)) for row in shown], "whisker predicted")
    places = [(across(row.devices), up(row.time)) for row in shown]
    chart.line(places, "line predicted", is_kept_free=True)
    for row, at in zip(shown, places, strict=True):
        words = f"{counted(round(row.devices), 'device')}: {figures.ratio(row.time)} of the time"
        chart.dot(at, "point predicted", words)
    if worth is not None:
        x = across(worth)
        chart.line([(x, _TOP + 8), (x, _BOTTOM)], "chosen")
        side = "start" if x < 150 else "end" if x > width - 80 else "middle"
        chart.text((x, _TOP + 2), f"up to {figures.count(worth)} pay", "note strong", side)
    return chart


def _table(shown: tuple[Row, ...], run: Data) -> Html:
    price = number_in(section_of(run, "recommendation"), "run", "price_per_hour")
    hours = number_in(section_of(run, "recommendation"), "run", "hours")
    columns = [
        ("devices", [figures.count(row.devices) for row in shown]),
        ("effective batch", [figures.count(row.batch) for row in shown]),
        ("step", ["-" if row.step is None else figures.seconds(row.step) for row in shown]),
        ("time", [figures.times(row.time) for row in shown]),
        ("cost over one" if price and hours else "device-hours over one", [figures.times(row.cost) for row in shown]),
    ]
    return table(columns, label="The run by devices", words=0)
