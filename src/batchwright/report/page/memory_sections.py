"""The sections about memory: what a step holds, by parts, and what fits, probe by probe."""

from __future__ import annotations

from functools import partial

from batchwright.report.page import figures
from batchwright.report.page.chart import (
    Chart,
    Scale,
    at_both_widths,
    byte_ticks,
    legend,
    size_scale,
    size_ticks,
    text_width,
)
from batchwright.report.page.markup import (
    Html,
    capitalized,
    element,
    figure_with,
    joined,
    missing,
    remarks,
    sentence,
    table,
)
from batchwright.report.page.run_reading import (
    Data,
    MemoryParts,
    Peaks,
    Trial,
    is_far_below,
    mapping_in,
    memory_parts,
    number_in,
    peaks,
    text_in,
    texts_in,
    why_missing,
)

OUT = "out_of_memory"


def draw_fit(record: Data, run: Data) -> list[str]:
    """Draw what fits."""
    shown = peaks(run)
    chart: list[str] = [] if shown is None else [at_both_widths(partial(_fit_chart, shown)), _legend(shown)]
    return [_fit_lead(record, shown), *chart, remarks(texts_in(record, "notes"))]


def _fit_lead(record: Data, shown: Peaks | None) -> Html:
    size, certified = number_in(record, "micro_batch"), record.get("certified") is True
    reason = text_in(record, "reason")
    because = f"{capitalized(reason)}." if reason else ""
    if size is None:
        return element("p", f"No micro-batch was found to fit. {because}", class_="lead")
    source = "measured" if certified else "predicted"
    pieces = ["The largest micro-batch is ", figure_with(figures.count(size), source)]
    pieces.append(": a full step of that size ran" if certified else ", not certified: no step of that size ran")
    room = number_in(record, "headroom_bytes")
    if room is not None:
        pieces += [" and left ", figure_with(figures.memory(room), source), " free"]
    return element("p", *pieces, ". ", because, class_="lead")


def _fit_chart(shown: Peaks, width: float) -> Chart:
    height, top, bottom = 300.0, 44.0, 250.0
    sizes = [trial.micro_batch for trial in shown.trials]
    known = [trial.peak_bytes for trial in shown.trials if trial.peak_bytes is not None]
    used = max([*known, _line(shown, max(sizes)) or 0, 1.0])
    # Under a limit that is far off, everything would lie on the ground: then it is only told.
    is_far = is_far_below(used, shown.limit_bytes)
    most = used if is_far else max(used, shown.limit_bytes or 0)
    up = Scale(0, most * 1.1, bottom, top)
    across = size_scale(sizes, 66, width - 14)
    chart = Chart(width, height, label=f"Peak memory against micro-batch at {len(sizes)} sizes, with the limit")
    chart.y_axis(up, byte_ticks(up.high, 5), figures.memory, f"peak ({shown.kind})", across=across)
    chart.x_axis(across, size_ticks(across, 10 if width > 500 else 6), figures.short, "micro-batch", y=bottom)
    if shown.limit_bytes is not None:
        _draw_limit(chart, shown.limit_bytes, (across, up), is_far=is_far)
    line = _predicted(shown, across, up)
    if line:
        chart.line(line, "line predicted", is_kept_free=True)
    for trial in shown.trials:
        _draw_trial(chart, trial, shown, (across, up))
    answer = next((t for t in shown.trials if t.micro_batch == shown.micro_batch and t.peak_bytes is not None), None)
    if answer is not None and answer.peak_bytes is not None:
        at = (across(answer.micro_batch), up(answer.peak_bytes))
        chart.dot(at, f"ring {'measured' if shown.is_certified else 'predicted'}", radius=8)
        label = f"{figures.count(answer.micro_batch)}{' certified' if shown.is_certified else ' predicted'}"
        chart.beside(at, label, first="below")
    return chart


def _draw_limit(chart: Chart, limit: float, scales: tuple[Scale, Scale], *, is_far: bool) -> None:
    across, up = scales
    label = f"{figures.memory(limit)} available"
    if is_far:
        chart.text((across.end, up.end - 14), f"{label}, far above", "note strong", "end")
        return
    y = up(limit)
    chart.line([(across.start, y), (across.end, y)], "limit", is_kept_free=True)
    chart.text((across.start + 6, y - 7), label, "note strong", "start")


def _draw_trial(chart: Chart, trial: Trial, shown: Peaks, scales: tuple[Scale, Scale]) -> None:
    across, up = scales
    x, size = across(trial.micro_batch), figures.count(trial.micro_batch)
    if trial.peak_bytes is not None and trial.outcome == "fits":
        style = "measured" if shown.is_certified else "predicted"
        chart.dot(
            (x, up(trial.peak_bytes)), f"point {style}", f"micro-batch {size} fits: {figures.memory(trial.peak_bytes)}"
        )
        return
    # What it would have needed nobody knows: the cross stands where the line says, or at the limit.
    height = trial.peak_bytes or _line(shown, trial.micro_batch) or shown.limit_bytes or up.high
    at = (x, up(height))
    chart.cross(at, "cross bad", f"micro-batch {size}: {trial.outcome.replace('_', ' ') or 'did not fit'}")


def _line(shown: Peaks, size: float) -> float | None:
    if shown.fixed_bytes is None or shown.bytes_per_sample is None:
        return None
    return shown.fixed_bytes + shown.bytes_per_sample * size


def _predicted(shown: Peaks, across: Scale, up: Scale) -> list[tuple[float, float]]:
    """The line in pieces, for on an axis of doublings it is a curve; it ends where the drawing does."""
    first, last = across.low, across.high
    shares = [number / 40 for number in range(41)]
    sizes = [first * (last / first) ** s if across.is_log else first + (last - first) * s for s in shares]
    heights = ((size, _line(shown, size)) for size in sizes)
    return [(across(size), up(y)) for size, y in heights if y is not None and 0 <= y <= up.high]


def _legend(shown: Peaks) -> Html:
    source = "measured" if shown.is_certified else "predicted"
    entries = [(f"point {source}", f"fits ({source})")]
    if any(trial.outcome == OUT for trial in shown.trials):
        entries.append(("cross bad", "out of memory"))
    if any(trial.outcome not in (OUT, "fits") for trial in shown.trials):
        entries.append(("cross bad", "failed"))
    if shown.fixed_bytes is not None and shown.bytes_per_sample is not None:
        words = f"{figures.memory(shown.fixed_bytes)} + {figures.memory(shown.bytes_per_sample)} a sample"
        entries.append(("line predicted", f"{words} ({(shown.is_certified and shown.line_source) or 'predicted'})"))
    return legend(*entries)


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


def draw_memory(record: Data, run: Data) -> list[str]:
    """Draw what a step holds in memory."""
    shown = memory_parts(run)
    if shown is None:
        return [missing(why_missing(run, "estimate"))]
    chart = at_both_widths(partial(_memory_chart, shown))
    return [_memory_lead(shown, record), chart, _parts(shown), remarks(texts_in(record, "notes"))]


def _memory_lead(shown: MemoryParts, record: Data | None) -> Html:
    size = "" if shown.micro_batch is None else f"At micro-batch {figures.count(shown.micro_batch)} the "
    peak = figure_with(figures.memory(shown.peak_bytes), shown.source)
    pieces: list[str] = [f"{size or 'The '}peak is ", peak]
    if shown.limit_bytes is not None:
        pieces += [" of ", figure_with(figures.memory(shown.limit_bytes), "given")]
    moment = mapping_in(record, "peak_at")
    if text_in(moment, "phase"):
        operator = text_in(moment, "operator").removeprefix("aten.")
        pieces += [
            f", reached in the {text_in(moment, 'phase')}",
            *([" at ", element("code", operator)] if operator else []),
        ]
    return sentence(*pieces)


def _memory_chart(shown: MemoryParts, width: float) -> Chart:
    label = ", ".join(f"{name} {figures.memory(size)}" for name, size in shown.parts)
    used = max(shown.peak_bytes, shown.upper_bytes or 0, sum(size for _, size in shown.parts))
    # Of a card that is mostly empty the parts would be slivers: they are drawn once more below, larger.
    is_sliver = is_far_below(used, shown.limit_bytes)
    chart = Chart(width, 192 if is_sliver else 122, label=f"Parts of the peak: {label}")
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
    names: list[str] = [
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
    columns = [("part", names), ("at the peak", [figures.memory(size) for _, size in shown.parts])]
    if any(growth):
        columns.append(("per further sample", [figures.memory(size or None) for size in growth]))
    return table(columns, label="Table of parts")
