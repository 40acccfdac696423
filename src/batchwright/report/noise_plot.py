"""The critical batch along training, with its band, as a picture."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchwright.errors import InvalidInputError, import_extra
from batchwright.users_files import check_place, replace_file

if TYPE_CHECKING:
    from batchwright.noise.noise_run_result import NoiseRun

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
