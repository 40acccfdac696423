"""The main charts of a run on one picture, by matplotlib: for a README, a slide, a message.

It shows what the page shows (report/page/series.py); a chart whose section was skipped says so in its place.
"""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchwright.errors import InvalidInputError, import_extra
from batchwright.report.page.answer import answer_sentence
from batchwright.report.page.figures import memory
from batchwright.report.page.markup import printable
from batchwright.report.page.run_reading import (
    Data,
    good_range,
    is_far_below,
    memory_parts,
    moments,
    number_in,
    peaks,
    section_of,
    speeds,
    text_in,
    times_to_target,
    why_missing,
)
from batchwright.user_files import check_place, replace_file

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchwright.noise.noise_result import NoiseRun


# The critical batch along training, with its band, as a picture.

ENDINGS = (".png", ".svg", ".pdf")


def check_ending(path: str) -> None:
    """Refuse a file that no picture can be written to, before hours of training.

    >>> check_ending("trend.png")
    """
    if Path(path).suffix.lower() not in ENDINGS:
        raise InvalidInputError(f"a plot is written to a file that ends in {', '.join(ENDINGS)}; received {path!r}.")
    check_place(path, what="the plot", option="--plot FILE")
    import_extra("matplotlib", extra="plot", purpose="drawing a plot")


def plot_noise(run: NoiseRun, path: str) -> None:
    """Draw the trend to a file: the critical batch with its interval, the batch in use, and the loss."""
    check_ending(path)
    from matplotlib.figure import Figure

    picture = Figure(figsize=(8, 4.5), layout="constrained")
    axes = picture.add_subplot()
    # The batch in use is in samples, so the line beside it must be.
    points = [(point, point.critical_batch.in_samples() or point.critical_batch) for point in run.history]
    steps = [point.step for point, _ in points]
    known = [(point.step, each.value) for point, each in points if math.isfinite(each.value)]
    tops = [each.high for _, each in points if each.resolved] + [value for _, value in known] + [run.effective_batch]
    # An end that is not resolved runs out of the picture.
    ceiling = 4 * max(tops)
    floor = min(run.effective_batch, *(value for _, value in known), ceiling) / 4 if known else run.effective_batch / 4
    axes.fill_between(
        steps,
        [max(each.low, floor / 10) for _, each in points],
        [min(each.high, 10 * ceiling) for _, each in points],
        alpha=0.2,
        color="tab:blue",
        linewidth=0,
        label="95 % interval",
    )
    axes.plot(*zip(*known, strict=True), color="tab:blue", marker="o", label="critical batch") if known else None
    axes.axhline(run.effective_batch, color="tab:gray", linestyle="--", label="batch in use")
    unit = points[-1][1].unit if points else "samples"
    axes.set(xlabel="step", ylabel=f"batch ({unit})", yscale="log", title=f"{run.name}: critical batch along training")
    axes.set_ylim(floor, ceiling)
    losses = axes.twinx()
    losses.plot(steps, [point.loss for point, _ in points], color="tab:red", alpha=0.7, label="loss")
    losses.set_ylabel("loss")
    _legend(axes, losses)
    drawn = io.BytesIO()
    picture.savefig(drawn, format=Path(path).suffix[1:].lower(), dpi=150)
    replace_file(path, drawn.getvalue(), what="the plot", option="--plot FILE")


def _legend(*axes: Any) -> None:
    told = [each.get_legend_handles_labels() for each in axes]
    handles, labels = ([item for pair in told for item in pair[index]] for index in (0, 1))
    # On the upper axes, or the line of the lower would be drawn over it.
    axes[-1].legend(handles, labels, loc="best", framealpha=0.9)


MEASURED, PREDICTED, BAD, SOFT = "#0a6b68", "#6b3fb5", "#b3261e", "#565e67"
# From what is held always to what comes with the device, as on the page.
SHADES = {
    "weights": "#3f1f78",
    "gradients": "#56309a",
    "optimizer": "#6b3fb5",
    "activations": "#a286d8",
    "temporaries": "#c4b1e8",
    "inputs": "#dfd5f3",
    "workspaces": "#cfcde0",
    "slack": "#dddce6",
}
MIB = 2**20


def check_png(path: str) -> None:
    """Refuse a picture that cannot be written, before anything is.

    >>> check_png("report.gif")
    Traceback (most recent call last):
    ...
    batchwright.errors.InvalidInputError: the picture is written to a file that ends in .png; received 'report.gif'.
    """
    if Path(path).suffix.lower() != ".png":
        raise InvalidInputError(f"the picture is written to a file that ends in .png; received {path!r}.")
    import_extra("matplotlib", extra="plot", purpose="drawing the picture")


def draw_png(run: Data, path: str | Path) -> None:
    """Draw a run's main charts to a PNG file."""
    check_png(str(path))
    run = _drawable(run)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    quiet: dict[Any, Any] = {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#c9c8c1",
        "font.size": 9.0,
    }
    quiet |= {"xtick.color": SOFT, "ytick.color": SOFT, "axes.labelcolor": SOFT, "text.parse_math": False}
    with rc_context(quiet), warnings.catch_warnings():
        # A name in letters that the font lacks is drawn as boxes; no reason to fail.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        picture = Figure(figsize=(11, 9.5), layout="constrained", facecolor="white")
        name = text_in(section_of(run, "workload"), "name") or "a run"
        title = "\n".join(textwrap.wrap(answer_sentence(run), 80))
        picture.suptitle(f"{name[:90]}\n{title}", x=0.01, ha="left", fontsize=13)
        for place, (heading, section, draw) in enumerate(_CHARTS, 1):
            axes = picture.add_subplot(3, 2, place)
            axes.set_title(heading, loc="left", fontsize=10, fontweight="bold")
            if not draw(run, axes):
                _say_missing(axes, why_missing(run, section) if section_of(run, section) is None else "nothing to draw")
        drawn = io.BytesIO()
        picture.savefig(drawn, format="png", dpi=150)
    replace_file(path, drawn.getvalue(), what="the picture", option="--png FILE")


def _drawable(value: Any, longest: int = 300) -> Any:
    """Return a run whose texts matplotlib can draw: none so long that no room is left for the charts."""
    if isinstance(value, dict):
        return {_drawable(name, 30): _drawable(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_drawable(each) for each in value]
    return " ".join(printable(value)[:longest].split()) if isinstance(value, str) else value


def _say_missing(axes: Any, reason: str) -> None:
    axes.set_axis_off()
    text = "\n".join(textwrap.wrap(f"Not in this run: {reason.rstrip('.')}.", 52))
    axes.text(0, 0.9, text, transform=axes.transAxes, color=SOFT, va="top")


def _say_far(axes: Any, limit: float | None) -> None:
    axes.text(1, 1.03, f"{memory(limit)} available, far above", transform=axes.transAxes, ha="right", fontsize=8)


def _memory(run: Data, axes: Any) -> bool:
    shown = memory_parts(run)
    if shown is None:
        return False
    left = 0.0
    for name, size in shown.parts:
        axes.barh([0], [size / MIB], left=left / MIB, color=SHADES.get(name, "#c2c2cc"), label=f"{name} {memory(size)}")
        left += size
    if is_far_below(left, shown.limit_bytes):
        _say_far(axes, shown.limit_bytes)
    elif shown.limit_bytes is not None:
        told = f"{memory(shown.limit_bytes)} available"
        axes.plot([shown.limit_bytes / MIB] * 2, [-0.5, 0.6], color="black", linestyle=":", label=told)
    axes.set(yticks=[], xlabel="MiB (predicted)", ylim=(-0.5, 2.0))
    axes.legend(loc="upper left", ncols=3, fontsize=7, borderaxespad=0, frameon=False)
    return True


def _peaks(run: Data, axes: Any) -> bool:
    shown = peaks(run)
    if shown is None:
        return False
    fits = [
        (t.micro_batch, t.peak_bytes / MIB) for t in shown.trials if t.outcome == "fits" and t.peak_bytes is not None
    ]
    colour, word = (MEASURED, "measured") if shown.is_certified else (PREDICTED, "predicted")
    last = max(trial.micro_batch for trial in shown.trials)
    if shown.fixed_bytes is not None and shown.bytes_per_sample is not None:
        ends = [(shown.fixed_bytes + shown.bytes_per_sample * size) / MIB for size in (0, last)]
        axes.plot([0, last], ends, color=PREDICTED, linestyle="--", label="predicted")
    if fits:
        chosen = [place for place in fits if place[0] == shown.micro_batch]
        axes.plot(*zip(*fits, strict=True), color=colour, marker="o", linestyle="", label=f"fits ({word})")
        axes.plot(
            *zip(*chosen, strict=True), "o", ms=12, mfc="none", color=colour, label="the answer"
        ) if chosen else None
    used = max([size for _, size in fits], default=0.0) * MIB
    if is_far_below(used, shown.limit_bytes) and fits:
        _say_far(axes, shown.limit_bytes)
    elif shown.limit_bytes is not None:
        axes.axhline(shown.limit_bytes / MIB, color="black", linestyle=":", label="available")
        gone = [trial.micro_batch for trial in shown.trials if trial.outcome != "fits"]
        axes.plot(
            gone, [shown.limit_bytes / MIB] * len(gone), color=BAD, marker="x", linestyle="", label="does not fit"
        ) if gone else None
    axes.set(xlabel="micro-batch", ylabel=f"peak, MiB ({shown.kind})", ylim=(0, 1.15 * axes.get_ylim()[1]))
    axes.legend(fontsize=7, frameon=False)
    return True


def _speeds(run: Data, axes: Any) -> bool:
    shown = speeds(run)
    if not shown:
        return False
    rates = [row.per_second for row in shown]
    spread = [[row.per_second - row.low for row in shown], [row.high - row.per_second for row in shown]]
    axes.errorbar([row.micro_batch for row in shown], rates, spread, color=MEASURED, marker="o", capsize=3)
    axes.set(xlabel="micro-batch", ylabel="samples per second (measured)", ylim=(0, None))
    return True


def _critical(run: Data, axes: Any) -> bool:
    shown = moments(run)
    known = [each for each in shown if each.value is not None]
    ends = [end for each in shown for end in (each.value, each.low, each.high) if end is not None]
    if not known or not ends:
        return False
    steps, floor, ceiling = [each.step for each in shown], min(ends) / 1.5, max(ends) * 1.5
    lows, highs = [each.low or floor for each in shown], [each.high or ceiling for each in shown]
    axes.fill_between(steps, lows, highs, color=MEASURED, alpha=0.15, linewidth=0)
    axes.plot(steps, [each.value or float("nan") for each in shown], color=MEASURED, marker="o", markersize=3)
    unit = text_in(section_of(run, "noise"), "critical_batch", "unit") or "samples"
    axes.set(xlabel="step", ylabel=f"{unit} (measured)", yscale="log", ylim=(floor, ceiling))
    _plain_numbers(axes.yaxis)
    return True


def _losses(run: Data, axes: Any) -> bool:
    known = [(each.step, each.loss) for each in moments(run) if each.loss is not None]
    if known:
        axes.plot(*zip(*known, strict=True), color=MEASURED)
        axes.set(xlabel="step", ylabel="loss (measured)")
    return bool(known)


def _times(run: Data, axes: Any) -> bool:
    shown = times_to_target(run)
    if len(shown) < 2:
        return False
    batches, ends = [row.batch for row in shown], good_range(run)
    if ends is not None:
        axes.axvspan(*ends, color=MEASURED, alpha=0.1, linewidth=0)
    axes.fill_between(
        batches, [row.low for row in shown], [row.high for row in shown], color=PREDICTED, alpha=0.15, linewidth=0
    )
    axes.plot(batches, [row.ratio for row in shown], color=PREDICTED, linestyle="--")
    chosen = number_in(section_of(run, "recommendation"), "effective_batch")
    if chosen is not None and chosen > 0:
        axes.axvline(chosen, color="black")
    axes.set(xlabel="effective batch", ylabel="time over the soonest (predicted)", ylim=(0.9, None))
    axes.set_xscale("log", base=2)
    _plain_numbers(axes.xaxis)
    return True


def _plain_numbers(axis: Any) -> None:
    """Write 1,000 where a logarithmic axis would have a power of ten."""
    axis.set_major_formatter(lambda value, _: f"{value:,.4g}" if value < 1000 else f"{value:,.0f}")


_CHARTS: tuple[tuple[str, str, Callable[[Data, Any], bool]], ...] = (
    ("What a step holds in memory", "estimate", _memory),
    ("What fits", "fit", _peaks),
    ("How fast it runs", "throughput", _speeds),
    ("How large a batch pays: the critical batch", "noise", _critical),
    ("The loss meanwhile", "noise", _losses),
    ("Which batch gets there soonest", "recommendation", _times),
)
