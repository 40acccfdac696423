"""`best_batch`: the effective batch that reaches the loss soonest, from the critical batch and measured step times.

A loss takes Smin (1 + Bc/B) steps (McCandlish et al. 2018, arXiv:1812.06162), a step s + r B seconds. Their product is
least at B* = sqrt((s/r) Bc), and flat there: a factor of 2 off costs at most 12.5 %.

Promises:
- the answer comes with the range of batches that are within 5 % of the best time, and with the ends that the interval
  of the critical batch gives it;
- where the critical batch has no upper end, neither has the answer;
- a batch outside those that were timed is called extrapolated;
- batches are in samples; a critical batch in another unit is converted, or refused where nothing told how.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from batchwright.errors import InvalidInputError
from batchwright.noise.critical_batch import CriticalBatch, figure
from batchwright.noise.efficiency import batches_within, checked_batch, soonest_batch, time_to_loss
from batchwright.planning.times import TimeModel, fit_times
from batchwright.printed_result import PrintedResult
from batchwright.units import LARGEST_COUNT, counted, parse_whole_number, positive_seconds, shortened, whole_number

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType


# Measured seconds of whole optimizer steps, as people write them.


def parse_step_times(text: str) -> dict[int, float]:
    """Read `32=0.11,64=0.19`: the effective batch, and the seconds of one optimizer step at it.

    >>> parse_step_times("32=0.11, 64=0.19")
    {32: 0.11, 64: 0.19}
    """
    times: dict[int, float] = {}
    for part in text.split(","):
        batch, equals, seconds = part.strip().partition("=")
        if not equals:
            raise InvalidInputError(
                f"--times is written BATCH=SECONDS, such as 32=0.11,64=0.19; received {shortened(part.strip())}."
            )
        size = parse_whole_number(batch, "batch in --times")
        if size in times:
            raise InvalidInputError(f"--times names the batch {size} twice.")
        times[size] = positive_seconds(seconds, f"time of batch {size}")
    if len(times) < 2:
        raise InvalidInputError(
            "--times needs two batches or more, to tell what a step costs from what a sample costs.",
            remedy="32=0.11,64=0.19,128=0.36",
        )
    return times


# `BestBatch`: the batch that reaches the loss soonest, the range that is as good, and what both rest on.


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a whole optimizer step, `fixed + per_sample * batch`, and what that rests on."""

    fixed: float
    per_sample: float
    points: tuple[tuple[int, float], ...] = ()
    """The whole steps that were timed: batch and seconds."""
    largest_error: float | None = None
    timed: tuple[int, int | None] | None = None
    """From which batch to which one it was timed, None for any; None alone where nothing was."""

    def at(self, batch: float) -> float:
        """Seconds of one step."""
        return self.fixed + self.per_sample * batch

    def covers(self, batch: float) -> bool:
        """Whether a batch lies within those that were timed."""
        first, last = self.timed or (math.inf, None)
        return first <= batch and (last is None or batch <= last)


@dataclass(frozen=True, repr=False)
class BestBatch(PrintedResult):
    """The effective batch that reaches the loss soonest, the range that is as good, and why."""

    in_repr = ("value", "low", "high", "range_within_5_percent")

    value: int
    low: int
    """The best batch if the critical batch is at its lower end."""
    high: int | None
    """The same at its upper end; None where that is not resolved."""
    range_within_5_percent: tuple[int, int]
    critical: CriticalBatch
    noise_scale: float
    """The critical batch that `value` rests on: the estimate, or its lower end where that is infinite."""
    step_seconds: StepSeconds
    words: tuple[str, ...]
    in_micro_batches: int | None = None
    """The best multiple of micro-batch x devices."""
    run_seconds: float | None = None
    """Until the loss is reached, at `value`; None without `min_steps`."""
    run_cost: float | None = None
    deadline_batch: int | None = None
    """The smallest batch that meets the deadline; None without one, or where none does."""
    elastic_devices: int | None = None
    """How many devices to hire, where their number is free, each with one micro-batch."""

    def time_ratio(self, batch: float) -> float:
        """Time to the loss at another batch, relative to that at the best.

        >>> from batchwright.noise.best_batch import best_batch
        >>> round(best_batch(400, {16: 0.12, 64: 0.24, 256: 0.72}).time_ratio(16), 2)
        1.9
        """
        line = self.step_seconds.fixed, self.step_seconds.per_sample
        size = checked_batch(batch, "batch")
        return time_to_loss(size, self.noise_scale, *line) / time_to_loss(self.value, self.noise_scale, *line)

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as plain data; what is not resolved, or was not asked, is None."""
        is_measured = self.step_seconds.timed is not None and self.critical.observations > 0
        return {
            "schema": 1,
            "source": "measured" if is_measured else "formula",
            **asdict(self),
            "critical": self.critical.to_dict(),
            "range_within_5_percent": list(self.range_within_5_percent),
            "words": list(self.words),
        }

    def __rich__(self) -> RenderableType:
        from batchwright.report.text.noise_text import draw_best_batch

        return draw_best_batch(self)

    def _repr_html_(self) -> str:
        from batchwright.report.display import table_to_html
        from batchwright.report.text.noise_text import best_batch_columns, best_batch_remarks, summarize_best_batch

        return table_to_html(summarize_best_batch(self), best_batch_columns(self), best_batch_remarks(self))


# Of a timing that repeats within a few percent: beyond it the line, not the clock, is off.
_POOR_FIT = 0.1


def best_batch(
    critical_batch: CriticalBatch | float,
    step_times: Mapping[int, float] | TimeModel,
    *,
    devices: int = 1,
    micro_batch: int | None = None,
    largest: int | None = None,
    min_steps: float | None = None,
    deadline_seconds: float | None = None,
    price_per_device_hour: float | None = None,
    value_per_hour: float | None = None,
) -> BestBatch:
    """Find the effective batch that reaches the loss soonest.

    >>> best = best_batch(400, {16: 0.12, 64: 0.24, 256: 0.72})
    >>> best.value, best.range_within_5_percent
    (113, (67, 192))

    `step_times` are seconds of whole optimizer steps by effective batch, or the time model of a plan. That model is
    read for steps of one pass; with `micro_batch`, for steps that accumulate micro-batches of that size. `largest` is
    the largest effective batch that may be used.

    `min_steps` (Smin, the steps that an endless batch would take) turns ratios into seconds: S steps at a batch B are
    S/(1 + Bc/B) of them. With `deadline_seconds` the smallest batch that meets it is found. With a price and
    `micro_batch` the number of devices is chosen too, for what an hour earlier is worth (`value_per_hour`).
    """
    critical = _checked_critical(critical_batch)
    num_devices = whole_number(devices, "devices")
    micro = None if micro_batch is None else whole_number(micro_batch, "micro-batch")
    step = _step_seconds(step_times, num_devices, micro)
    if not step.at(1.0) > 0:
        raise InvalidInputError(f"a step must take some time; received {shortened(step_times)}.")
    # The accumulating model says nothing about less than one micro-batch on every device.
    least = micro * num_devices if micro and isinstance(step_times, TimeModel) else 1
    most = _most(largest, step, (micro or 1) * num_devices)
    steps = None if min_steps is None else checked_batch(min_steps, "min_steps")
    price = None if price_per_device_hour is None else checked_batch(price_per_device_hour, "price per device-hour")
    worth = checked_batch(value_per_hour, "value per hour") if value_per_hour else 0.0
    if deadline_seconds is not None and steps is None:
        raise InvalidInputError(
            f"a deadline of {shortened(deadline_seconds)} s needs min_steps, the steps of an endless batch.",
            remedy="min_steps=S / (1 + Bc/B), from a run that took S steps at a batch B",
        )
    if worth and not (price and micro):
        raise InvalidInputError(
            f"value_per_hour={worth:g} needs price_per_device_hour and micro_batch beside it; "
            f"received {price_per_device_hour} and {micro_batch}."
        )

    noise = critical.value if math.isfinite(critical.value) else critical.low
    line, ends = (step.fixed, step.per_sample), {"least": least, "most": most}
    value = soonest_batch(noise, *line, **ends)
    best_time = time_to_loss(value, noise, *line)
    within = batches_within(1.05 * best_time, noise, *line, **ends)
    assert within is not None, "the best batch is within 5 % of itself"
    run_seconds = None if steps is None else steps * best_time
    limit = None if deadline_seconds is None else positive_seconds(deadline_seconds, "deadline")
    meeting = batches_within(limit / steps, noise, *line, **ends) if limit and steps else None
    answer = BestBatch(
        value=value,
        low=soonest_batch(critical.low, *line, **ends),
        high=soonest_batch(critical.high, *line, **ends) if critical.resolved else None,
        range_within_5_percent=within,
        critical=critical,
        noise_scale=noise,
        step_seconds=step,
        words=(),
        in_micro_batches=soonest_batch(noise, *line, **ends, unit=micro * num_devices) if micro else None,
        run_seconds=run_seconds,
        run_cost=price * num_devices * run_seconds / 3600 if price and run_seconds else None,
        deadline_batch=meeting[0] if meeting else None,
        # The same valley with devices for samples: n of them cost (1 + Bc/(b n))(worth + price n).
        elastic_devices=(
            soonest_batch(noise / micro, worth, price, least=1, most=LARGEST_COUNT) if micro and price else None
        ),
    )
    words = [*_words(answer, least, most), *_run_words(answer, limit)]
    if micro:
        words.append(f"in whole micro-batches of {micro:,} on each device: {answer.in_micro_batches:,}")
    if price:
        words.append("on a fixed number of devices the soonest batch is the cheapest too")
    if micro and answer.elastic_devices:
        hired = counted(answer.elastic_devices, "device")
        words.append(f"where devices are hired by the hour: {hired}, a batch of {answer.elastic_devices * micro:,}")
    return replace(answer, words=tuple(words))


def _checked_critical(given: object) -> CriticalBatch:
    if not isinstance(given, CriticalBatch):
        size = checked_batch(given, "critical batch")
        return CriticalBatch(size, size, size, unit="samples", observations=0)
    critical = given.in_samples()
    if critical is None:
        raise InvalidInputError(
            f"the critical batch is in {given.unit}, and nothing told how many samples that is: {given}.",
            remedy="give it as a number of samples: best_batch(critical.value / tokens_per_sample, ...)",
        )
    if math.isinf(critical.value) and critical.low <= 0:
        raise InvalidInputError(f"the critical batch is not known yet: {critical}.", remedy="measure longer")
    return critical


def _step_seconds(times: Mapping[int, float] | TimeModel, devices: int, micro_batch: int | None) -> StepSeconds:
    if isinstance(times, TimeModel):
        sizes = [point.micro_batch for point in times.points]
        if micro_batch is None:
            timed = (min(sizes) * devices, max(sizes) * devices) if sizes else None
            return StepSeconds(times.alpha + times.sigma, times.beta / devices, (), times.largest_error, timed)
        # Any number of passes of one size is covered once that size is.
        covered = (micro_batch * devices, None) if times.covers(micro_batch) else None
        per_sample = (times.alpha / micro_batch + times.beta) / devices
        return StepSeconds(times.sigma, per_sample, (), times.largest_error, covered)
    if not isinstance(times, Mapping) or len(times) < 2:
        raise InvalidInputError(
            f"step_times must map at least two effective batches to seconds; received {shortened(times)}.",
            remedy="three or more over the range in question, such as {32: 0.11, 128: 0.31, 512: 1.1}",
        )
    points = sorted(
        (whole_number(batch, "effective batch in step_times"), positive_seconds(seconds, f"step time of batch {batch}"))
        for batch, seconds in times.items()
    )
    model = fit_times(dict(points))
    return StepSeconds(model.alpha, model.beta, tuple(points), model.largest_error, (points[0][0], points[-1][0]))


def _most(largest: int | None, step: StepSeconds, smallest: int) -> int:
    if largest is not None:
        most = whole_number(largest, "largest")
        if most < smallest:
            raise InvalidInputError(
                f"largest must be at least one micro-batch on each device, {smallest:,}; received {most:,}."
            )
        return most
    if step.per_sample:
        return LARGEST_COUNT
    if step.timed is None or step.timed[1] is None:
        raise InvalidInputError(
            "a step takes the same time whatever the batch, so none is best.",
            remedy="largest=..., the largest batch that may be used",
        )
    return max(step.timed[1], smallest)


def _words(best: BestBatch, least: int, most: int) -> Iterator[str]:
    critical, step = best.critical, best.step_seconds
    yield f"critical batch: {critical if critical.observations else f'{figure(critical.value)} samples, as given'}"
    if not critical.resolved:
        rests = "the estimate" if best.noise_scale == critical.value else "its lower end, so take it as a least value"
        yield f"no evidence that a larger batch is too large; the answer rests on {rests}: {figure(best.noise_scale)}"
    fit = f"fitted to {counted(len(step.points), 'point')}" if step.points else "as the time model has it"
    error = "" if step.largest_error is None else f" within {step.largest_error:.1%}"
    yield f"a step takes {step.fixed:.3g} s and {step.per_sample:.3g} s a sample, {fit}{error}"
    if (step.largest_error or 0.0) > _POOR_FIT:
        yield "a straight line fits these times poorly: time more batches around the answer"
    if not step.per_sample:
        yield "the times do not grow with the batch, so the largest that was timed or allowed is the soonest"
    elif best.value == most and best.time_ratio(most + 1) < 1:
        yield f"{most:,} is the largest that is allowed; a larger one would be sooner"
    elif best.value == least > 1:
        yield f"{least:,} is one micro-batch on each device; a smaller micro-batch may be sooner"
    elif not step.fixed:
        yield "the times show no fixed cost of a step, so the smallest batch is the soonest"
    if step.timed is None:
        yield "nothing was timed at this size: the seconds are a model"
    elif not step.covers(best.value):
        yield f"{best.value:,} is extrapolated: the batches that were timed do not reach it"


def _run_words(best: BestBatch, limit: float | None) -> Iterator[str]:
    if best.run_seconds is None:
        return
    cost = "" if best.run_cost is None else f" and costs {best.run_cost:,.2f}"
    yield f"reaching the loss takes {_duration(best.run_seconds)}{cost}"
    if limit is not None and best.deadline_batch:
        yield f"the smallest batch that is there within {_duration(limit)} is {best.deadline_batch:,}"
    elif limit is not None:
        yield f"no batch is there within {_duration(limit)}: it takes at least {_duration(best.run_seconds)}"


def _duration(seconds: float) -> str:
    return f"{figure(seconds / 3600)} h" if seconds >= 3600 else f"{figure(seconds)} s"
