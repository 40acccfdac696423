"""What fits: peak against micro-batch, each probe of the fit, and the line that was predicted."""

from __future__ import annotations

from functools import partial

from batchwright.report.page import figures
from batchwright.report.page.chart import Chart, at_both_widths, legend
from batchwright.report.page.markup import Html, element, figure_with, joined, missing, remarks, section
from batchwright.report.page.reading import Data, number_in, section_of, text_in, texts_in, why_missing
from batchwright.report.page.scale import Scale, byte_ticks, size_scale, size_ticks
from batchwright.report.page.series import Peaks, Trial, is_far_below, peaks

HEADING = "What fits"
OUT = "out_of_memory"


def draw_fit(run: Data) -> Html:
    """Return the section."""
    found, shown = section_of(run, "fit"), peaks(run)
    if found is None:
        return section("fit", HEADING, missing(why_missing(run, "fit")))
    chart: list[str] = [] if shown is None else [at_both_widths(partial(_chart, shown)), _legend(shown)]
    return section("fit", HEADING, _lead(found, shown), *chart, remarks(texts_in(found, "notes")))


def _lead(found: Data, shown: Peaks | None) -> Html:
    size = number_in(found, "micro_batch")
    certified = found.get("certified") is True
    if size is None:
        return element("p", f"No micro-batch was found to fit. {_sentence(text_in(found, 'reason'))}", class_="lead")
    source = "measured" if certified else "predicted"
    pieces = ["The largest micro-batch is ", figure_with(figures.count(size), source)]
    pieces.append(": a full step of that size ran" if certified else ", not certified: no step of that size ran")
    room = number_in(found, "headroom_bytes")
    if room is not None:
        pieces += [" and left ", figure_with(figures.memory(room), source), " free"]
    reason = text_in(found, "reason")
    return element("p", joined(pieces), ". ", _sentence(reason), class_="lead")


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""


def _chart(shown: Peaks, width: float) -> Chart:
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
        chart.line(line, "line predicted")
        chart.keep_free(line)
    for trial in shown.trials:
        _draw_trial(chart, trial, shown, (across, up))
    answer = next((t for t in shown.trials if t.micro_batch == shown.micro_batch and t.peak_bytes is not None), None)
    if answer is not None and answer.peak_bytes is not None:
        at = (across(answer.micro_batch), up(answer.peak_bytes))
        chart.dot(at, f"ring {'measured' if shown.is_certified else 'predicted'}", radius=8)
        told = f"{figures.count(answer.micro_batch)}{' certified' if shown.is_certified else ' predicted'}"
        chart.beside(at, told, "note strong", first="below")
    return chart


def _draw_limit(chart: Chart, limit: float, scales: tuple[Scale, Scale], *, is_far: bool) -> None:
    across, up = scales
    told = f"{figures.memory(limit)} available"
    if is_far:
        chart.text((across.end, up.end - 14), f"{told}, far above", "note strong", "end")
        return
    y = up(limit)
    chart.line([(across.start, y), (across.end, y)], "limit")
    chart.text((across.start + 6, y - 7), told, "note strong", "start")
    chart.keep_free([(across.start, y), (across.end, y)])


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
    places = []
    for number in range(41):
        share = number / 40
        size = first * (last / first) ** share if across.is_log else first + (last - first) * share
        height = _line(shown, size)
        if height is not None and 0 <= height <= up.high:
            places.append((across(size), up(height)))
    return places


def _legend(shown: Peaks) -> Html:
    source = "measured" if shown.is_certified else "predicted"
    entries = [(f"point {source}", f"fits ({source})")]
    if any(trial.outcome == OUT for trial in shown.trials):
        entries.append(("cross bad", "out of memory"))
    if any(trial.outcome not in (OUT, "fits") for trial in shown.trials):
        entries.append(("cross bad", "failed"))
    if shown.fixed_bytes is not None and shown.bytes_per_sample is not None:
        words = f"{figures.memory(shown.fixed_bytes)} + {figures.memory(shown.bytes_per_sample)} a sample"
        entries.append(("line predicted", f"{words} ({shown.line_source or 'predicted'})"))
    return legend(*entries)
