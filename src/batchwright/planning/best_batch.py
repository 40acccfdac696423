"""Which effective batch reaches the loss soonest: the one model behind `best_batch`, `tune`, `noise` and the report.

Promises:
- the answer loses least time on average over the curves that are likely: critical batches of the measured interval,
  made wider by what such estimates were off by elsewhere, with a softer or sharper bend; a number that was given is
  taken as it is, with the curve in the books;
- the range is what is within 5 % of the best, all of it, with a chance of 80 %; if there is none, it says so;
- the answer comes with the ends that the critical batch gives it; if that has no upper end, neither has the answer;
- a batch outside those that were timed is called extrapolated;
- batches are in samples; a critical batch in another unit is converted, or refused if its samples were not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from batchwright.errors import InvalidInputError
from batchwright.planning.critical_batch import CriticalBatch, checked_batch, figure
from batchwright.planning.likely_time import CHANCE, LikelyTime
from batchwright.planning.time_to_loss import StepSeconds, TimeToLoss, soonest_on_line
from batchwright.planning.times import TimeModel, fit_times
from batchwright.printed_result import PrintedResult
from batchwright.units import LARGEST_COUNT, counted, positive_seconds, shortened, whole_number

# Of a timing that repeats within a few percent: beyond it the line, not the clock, is off.
_POOR_FIT = 0.1


@dataclass(frozen=True, repr=False)
class BestBatch(PrintedResult):
    """The effective batch that reaches the loss soonest, the range that is as good, and why."""

    in_repr = ("value", "low", "high", "range_within_5_percent")
    drawn_by = "training_text.draw_best_batch"

    value: int
    low: int
    """The best batch if the critical batch is at its lower end."""
    high: int | None
    """The same at its upper end; None if that is not resolved."""
    range_within_5_percent: tuple[int, int] | None
    """The batches that are within 5 % of the best, all of them, with a chance of 80 %; None if there are none."""
    chance: float
    """How likely `value` is within 5 % of the best."""
    critical: CriticalBatch
    """As it was measured or given."""
    noise_scale: float
    """The critical batch in the middle of what is likely, on which `value` rests."""
    bend: float
    """How sharply steps turn around it: 1 for the curve in the books, more for estimated ones."""
    step_seconds: StepSeconds
    words: tuple[str, ...]
    in_micro_batches: int | None = None
    """The best multiple of micro-batch x devices."""
    run_seconds: float | None = None
    """Until the loss is reached, at `value`; None without `min_steps`."""
    run_cost: float | None = None
    deadline_batch: int | None = None
    """The smallest batch that meets the deadline; None without a deadline, or if no batch meets it."""
    elastic_devices: int | None = None
    """How many devices to hire, each with one micro-batch, if their number is free."""

    @property
    def how_good(self) -> str:
        """The range that is as good, or how likely the answer is, in words."""
        if self.range_within_5_percent is None:
            return f"within 5 % of the best with a chance of {100 * self.chance:.0f} % only"
        return "{:,} to {:,} are within 5 %".format(*self.range_within_5_percent)

    def time_ratio(self, batch: float) -> float:
        """Time to the loss at another batch, relative to that at the best.

        >>> round(best_batch(400, {16: 0.12, 64: 0.24, 256: 0.72}).time_ratio(16), 2)
        1.9
        """
        curve = TimeToLoss(self.noise_scale, self.step_seconds, bend=self.bend)
        return curve.at(checked_batch(batch, "batch")) / curve.at(self.value)

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as plain data; what is not resolved, or was not asked, is None."""
        is_measured = self.step_seconds.timed is not None and self.critical.observations > 0
        return {
            "schema": 1,
            "source": "measured" if is_measured else "formula",
            **asdict(self),
            "critical": self.critical.to_dict(),
            "step_seconds": self.step_seconds.to_dict(),
            "range_within_5_percent": self.range_within_5_percent and list(self.range_within_5_percent),
            "words": list(self.words),
        }


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

    - `step_times`: seconds of whole optimizer steps by effective batch, or the time model of a plan. That model is
      read for steps of one pass; with `micro_batch`, for steps of whole passes of up to that size.
    - `devices`, `micro_batch`: how a step is run; the best multiple of both is `in_micro_batches`.
    - `largest`: the largest effective batch that may be used.
    - `min_steps`: Smin, the steps that an endless batch would take; it turns ratios into seconds. S steps at a batch B
      are S/(1 + Bc/B) of them.
    - `deadline_seconds`: find the smallest batch that meets it.
    - `price_per_device_hour`: with `micro_batch`, choose the number of devices too.
    - `value_per_hour`: what it is worth to be there an hour earlier.
    """
    critical = _checked_critical(critical_batch)
    num_devices = whole_number(devices, "devices")
    micro = None if micro_batch is None else whole_number(micro_batch, "micro-batch")
    step = _step_seconds(step_times, num_devices, micro)
    if not step.at(1.0) > 0:
        raise InvalidInputError(f"a step must take some time; received {shortened(step_times)}.")
    # The accumulating model says nothing about less than one micro-batch on every device.
    least = micro * num_devices if micro and isinstance(step_times, TimeModel) else 1
    most = _checked_largest(largest, step, (micro or 1) * num_devices)
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

    wide = critical.likely()
    likely = LikelyTime.of(critical, step, least=least, most=most)
    curve, value = likely.curve, likely.soonest
    run_seconds = None if steps is None else steps * curve.at(value)
    limit = None if deadline_seconds is None else positive_seconds(deadline_seconds, "deadline")
    answer = BestBatch(
        value=value,
        low=replace(curve, critical=wide.low).soonest,
        high=replace(curve, critical=wide.high).soonest if wide.resolved else None,
        range_within_5_percent=likely.as_good,
        chance=likely.chance(value),
        critical=critical,
        noise_scale=curve.critical,
        bend=curve.bend,
        step_seconds=step,
        words=(),
        in_micro_batches=likely.soonest_multiple(micro * num_devices) if micro else None,
        run_seconds=run_seconds,
        run_cost=price * num_devices * run_seconds / 3600 if price and run_seconds else None,
        deadline_batch=curve.smallest_within(limit / steps) if limit and steps else None,
        # The same valley with devices for samples: n of them cost (1 + Bc/(b n))(worth + price n).
        elastic_devices=(
            soonest_on_line(curve.critical / micro, worth, price, least=1, most=LARGEST_COUNT, bend=curve.bend)
            if micro and price
            else None
        ),
    )
    words = [*_words(answer, likely), *_run_words(answer, limit)]
    if micro:
        words.append(f"in whole micro-batches of {micro:,} on each device: {answer.in_micro_batches:,}")
    if price:
        words.append("on a fixed number of devices the soonest batch is the cheapest too")
    if micro and answer.elastic_devices:
        hired = counted(answer.elastic_devices, "device")
        words.append(f"if devices are hired by the hour: {hired}, a batch of {answer.elastic_devices * micro:,}")
    return replace(answer, words=tuple(words))


def _checked_critical(given: object) -> CriticalBatch:
    if not isinstance(given, CriticalBatch):
        size = checked_batch(given, "critical batch")
        return CriticalBatch(size, size, size, unit="samples", observations=0, evidence="given")
    critical = given.in_samples()
    if critical is None:
        raise InvalidInputError(
            f"the critical batch is in {given.unit}, and its samples were not counted: {given}.",
            remedy="give it as a number of samples: best_batch(critical.value / tokens_per_sample, ...)",
        )
    if math.isinf(critical.value) and critical.low <= 0:
        raise InvalidInputError(f"the critical batch is not known yet: {critical}.", remedy="measure longer")
    return critical


def _step_seconds(times: Mapping[int, float] | TimeModel, devices: int, micro_batch: int | None) -> StepSeconds:
    return StepSeconds(times, devices, micro_batch) if isinstance(times, TimeModel) else timed_steps(times)


def timed_steps(times: Mapping[int, float]) -> StepSeconds:
    """Return the seconds of whole steps by effective batch, from those that were timed."""
    if not isinstance(times, Mapping) or len(times) < 2:
        raise InvalidInputError(
            f"step_times must map at least two effective batches to seconds; received {shortened(times)}.",
            remedy="three or more over the range in question, such as {32: 0.11, 128: 0.31, 512: 1.1}",
        )
    points = sorted(
        (whole_number(batch, "effective batch in step_times"), positive_seconds(seconds, f"step time of batch {batch}"))
        for batch, seconds in times.items()
    )
    return StepSeconds(fit_times(dict(points)), points=tuple(points))


def _checked_largest(largest: int | None, step: StepSeconds, smallest: int) -> int:
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


def _words(best: BestBatch, likely: LikelyTime) -> Iterator[str]:
    critical, curve = best.critical, likely.curve
    step, most = curve.step, curve.most
    is_given = critical.evidence == "given"
    name = "critical batch" if is_given else f"critical batch, by {critical.evidence}"
    yield f"{name}: {critical if critical.observations else f'{figure(critical.value)} samples, as given'}"
    if not is_given:
        yield f"with what such estimates were off by elsewhere: {critical.widened()}"
    if not critical.resolved:
        rests = "the estimate" if math.isfinite(critical.value) else "its lower end, so take it as a least value"
        yield f"no evidence that a larger batch is too large; the answer rests on {rests}: {figure(best.noise_scale)}"
    if best.range_within_5_percent is None:
        yield (
            f"no batch is within 5 % of the best with a chance of {100 * CHANCE:.0f} %: {best.value:,} is with "
            f"{100 * best.chance:.0f} %, and takes at most {100 * (likely.longest - 1):.0f} % longer with "
            f"{100 * CHANCE:.0f} %"
        )
    yield _step_words(step)
    if (step.times.largest_error or 0.0) > _POOR_FIT:
        yield "a straight line fits these times poorly: time more batches around the answer"
    if not step.per_sample:
        yield "the times do not grow with the batch, so the largest that was timed or allowed is the soonest"
    elif best.value == most and replace(curve, most=LARGEST_COUNT).soonest > most:
        yield f"{most:,} is the largest that is allowed; a larger one would be sooner"
    elif best.value == curve.least > 1:
        yield f"{curve.least:,} is one micro-batch on each device; a smaller micro-batch may be sooner"
    elif not step.fixed:
        yield "the times show no fixed cost of a step, so the smallest batch is the soonest"
    if step.timed is None:
        yield "nothing was timed at this size: the seconds are a model"
    elif not step.covers(best.value):
        yield f"{best.value:,} is extrapolated: the batches that were timed do not reach it"


def _step_words(step: StepSeconds) -> str:
    times = step.times
    fit = f"fitted to {counted(len(step.points), 'point')}" if step.points else "as the time model has it"
    error = "" if times.largest_error is None else f" within {times.largest_error:.1%}"
    if step.micro_batch is None:
        return f"a step takes {step.fixed:.3g} s and {step.per_sample:.3g} s a sample, {fit}{error}"
    passes = f"each pass of up to {counted(step.micro_batch, 'sample')} {times.alpha:.3g} s"
    return f"a step takes {times.sigma:.3g} s, {passes} and {times.beta:.3g} s a sample, {fit}{error}"


def _run_words(best: BestBatch, limit: float | None) -> Iterator[str]:
    if best.run_seconds is None:
        return
    cost = "" if best.run_cost is None else f" and costs {best.run_cost:,.2f}"
    yield f"reaching the loss takes {_duration(best.run_seconds)}{cost}"
    if limit is not None and best.deadline_batch:
        yield f"the smallest batch that reaches the loss within {_duration(limit)} is {best.deadline_batch:,}"
    elif limit is not None:
        yield f"no batch reaches the loss within {_duration(limit)}: it takes at least {_duration(best.run_seconds)}"


def _duration(seconds: float) -> str:
    return f"{figure(seconds / 3600)} h" if seconds >= 3600 else f"{figure(seconds)} s"
