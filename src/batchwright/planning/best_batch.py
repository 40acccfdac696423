"""Which effective batch reaches the loss soonest: the one model behind `best_batch`, `tune`, `noise` and the report.

A loss takes Smin (1 + Bc/B) steps (McCandlish et al. 2018, arXiv:1812.06162). A step takes as many whole passes as the
batch needs on a device. If it is one pass of s + r B seconds, the product is least at B* = sqrt((s/r) Bc), and flat
there: a factor of 2 off costs at most 12.5 %. With more passes there is such a valley for each number of them.

Promises:
- the soonest batch, the range within 5 % and the smallest batch that meets a deadline are what counting every batch
  would give;
- the answer comes with the ends that the interval of the critical batch gives it; if the critical batch has no upper
  end, neither has the answer;
- a batch outside those that were timed is called extrapolated;
- batches are in samples; a critical batch in another unit is converted, or refused if its samples were not counted.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from batchwright.errors import InvalidInputError
from batchwright.planning.critical_batch import CriticalBatch, checked_batch, figure, steps_over_minimum
from batchwright.planning.times import TimeModel, fit_times
from batchwright.printed_result import PrintedResult
from batchwright.units import LARGEST_COUNT, counted, positive_seconds, shortened, whole_number

_AS_GOOD = 1.05
# Of a timing that repeats within a few percent: beyond it the line, not the clock, is off.
_POOR_FIT = 0.1


def time_to_loss(batch: float, critical: float, fixed: float, per_sample: float) -> float:
    """(1 + Bc/B)(s + r B): the seconds until the loss is reached, per step of Smin, if a step takes s + r B.

    >>> time_to_loss(100, 300, fixed=0.1, per_sample=0.001)
    0.8
    """
    return steps_over_minimum(batch, critical) * (fixed + per_sample * batch)


def soonest_on_line(critical: float, fixed: float, per_sample: float, *, least: int, most: int, unit: int = 1) -> int:
    """The multiple of `unit` with the least time: a neighbour of sqrt((s/r) Bc), as the time has a single valley.

    >>> soonest_on_line(400, fixed=0.08, per_sample=0.0025, least=1, most=1000)
    113
    """
    ideal = math.sqrt(fixed / per_sample * critical) if per_sample else float(most)
    below = int(min(max(ideal, least), most)) // unit * unit
    around = [batch for batch in (below, below + unit) if max(unit, least) <= batch <= most]
    return min(around, key=lambda batch: time_to_loss(batch, critical, fixed, per_sample))


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a whole optimizer step by effective batch, in whole passes, and what that rests on.

    >>> step = StepSeconds(fit_times({4: 0.014, 8: 0.018}), devices=2, micro_batch=8)
    >>> round(step.at(16), 3), round(step.at(17), 3)  # the 17th sample needs another pass
    (0.018, 0.029)
    """

    times: TimeModel
    devices: int = 1
    micro_batch: int | None = None
    """The largest of one pass on a device; None: any batch is one pass."""
    points: tuple[tuple[int, float], ...] = ()
    """The whole steps that were timed: effective batch and seconds."""

    @property
    def fixed(self) -> float:
        """Seconds that a step takes whatever its batch, on the line through steps of full passes."""
        return self.times.sigma + (self.times.alpha if self.micro_batch is None else 0.0)

    @property
    def per_sample(self) -> float:
        """Seconds that a sample adds on that line."""
        per_pass = 0.0 if self.micro_batch is None else self.times.alpha / self.micro_batch
        return (per_pass + self.times.beta) / self.devices

    @property
    def timed(self) -> tuple[int, int | None] | None:
        """The effective batches that the times cover: from the first to the last, None for any; None if none were."""
        sizes = [point.micro_batch for point in self.times.points]
        if self.micro_batch is not None:
            # Any number of passes of one size is covered once that size is.
            return (self.micro_batch * self.devices, None) if self.times.covers(self.micro_batch) else None
        return (min(sizes) * self.devices, max(sizes) * self.devices) if sizes else None

    def at(self, batch: float) -> float:
        """Return the seconds of one step."""
        share = math.ceil(batch / self.devices)
        passes = 1 if self.micro_batch is None else -(-share // self.micro_batch)
        return passes * self.times.alpha + share * self.times.beta + self.times.sigma

    def covers(self, batch: float) -> bool:
        """Whether a batch lies within those that were timed."""
        first, last = self.timed or (math.inf, None)
        return first <= batch and (last is None or batch <= last)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        line = {"fixed": self.fixed, "per_sample": self.per_sample}
        return {**line, "points": self.points, "largest_error": self.times.largest_error, "timed": self.timed}


@dataclass(frozen=True)
class TimeToLoss:
    """The time to a loss by effective batch, for one critical batch and one way to run steps.

    >>> curve = TimeToLoss(100.0, StepSeconds(fit_times({4: 0.014, 8: 0.018}), micro_batch=64))
    >>> curve.soonest, curve.as_good, round(curve.over_soonest(65), 2)
    (32, (19, 53), 1.25)

    A *share* is what one device takes of a batch. With a given number of passes the time has a single valley over
    shares; so have the first and the last shares of all numbers of passes. So every search here is a bisection.
    """

    critical: float
    step: StepSeconds
    least: int = 1
    most: int = LARGEST_COUNT
    """No batch is larger: what may be used, or the samples that there are."""

    def at(self, batch: float) -> float:
        """Return the time to the loss, in seconds for each of the least steps."""
        return steps_over_minimum(batch, self.critical) * self.step.at(batch)

    def over_soonest(self, batch: float) -> float:
        """Return the time at a batch over that at the best."""
        return self.at(batch) / self.at(self.soonest)

    @cached_property
    def soonest(self) -> int:
        """The batch that gets there first."""
        candidates = {self.most, *(self._soonest_in(passes) for passes in self._turning_passes)}
        return min(candidates, key=lambda batch: (self.at(batch), batch))

    @cached_property
    def as_good(self) -> tuple[int, int]:
        """The batches around the best that take at most 5 % longer."""
        devices, limit, best = self.step.devices, _AS_GOOD * self.at(self.soonest), self._share(self.soonest)

        def is_within(share: int) -> bool:
            # Of the batches with one largest share the smallest takes longest: as much time for less.
            return self.at(max((share - 1) * devices + 1, self.least)) <= limit

        last = self._reach(best, self._share(self.most), is_within)
        first = self._reach(best, self._share(self.least), is_within) if is_within(best) else best + 1
        below = range(max((first - 2) * devices + 1, self.least), min((first - 1) * devices, self.most) + 1)
        low = max((first - 1) * devices + 1, self.least)
        if below:
            low = below.start + bisect_left(below, True, key=lambda batch: self.at(batch) <= limit)
        return low, min(last * devices, self.most)

    def smallest_within(self, limit: float) -> int | None:
        """Return the smallest batch whose time is at most `limit`, in the seconds of `at`; None if there is none."""

        def is_within(batch: int) -> bool:
            return self.at(batch) <= limit

        turning, devices = self._turning_passes, self.step.devices
        # Up to the first turning point more passes are sooner.
        fewest = range(self._passes(self._share(self.least)), turning[0] + 1)
        index = bisect_left(fewest, True, key=lambda passes: is_within(self._soonest_in(passes)))
        candidates = [fewest[index]] if index < len(fewest) else turning
        passes = next((number for number in candidates if is_within(self._soonest_in(number))), None)
        if passes is not None:
            shares = range(self._shares_of(passes)[0], self._share(self._soonest_in(passes)))
            share = shares.start + bisect_left(shares, True, key=lambda number: is_within(number * devices))
        elif is_within(self.most):
            share = self._share(self.most)  # the last one, which not all devices have
        else:
            return None
        batches = range(max((share - 1) * devices + 1, self.least), min(share * devices, self.most))
        return batches.start + bisect_left(batches, True, key=is_within)

    def _share(self, batch: int) -> int:
        return -(-batch // self.step.devices)

    def _passes(self, share: int) -> int:
        return 1 if self.step.micro_batch is None else -(-share // self.step.micro_batch)

    def _shares_of(self, passes: int) -> tuple[int, int]:
        """The first and the last share that take so many passes, within those allowed."""
        first, last = self._share(self.least), self._share(self.most)
        size = self.step.micro_batch or last
        return max((passes - 1) * size + 1, first), min(passes * size, last)

    def _soonest_in(self, passes: int) -> int:
        """The soonest batch of so many passes, with all devices full."""
        first, last = self._shares_of(passes)
        times, devices = self.step.times, self.step.devices
        full = max(min(last, self.most // devices), first)
        fixed = passes * times.alpha + times.sigma
        share = soonest_on_line(self.critical / devices, fixed, times.beta, least=first, most=full)
        return min(share * devices, self.most)

    @property
    def _turning_passes(self) -> list[int]:
        """The numbers of passes, ascending, one of which is the best.

        As long as the valley lies beyond the last share, only full passes count, and they have one valley of their own.
        From the first number of passes whose valley lies before its last share on, more passes only take longer.
        """
        fewest, most = self._passes(self._share(self.least)), self._passes(self._share(self.most))
        times, size = self.step.times, self.step.micro_batch
        if size is None or fewest == most:
            return [fewest]
        noise = self.critical / self.step.devices

        def is_valley_before_end(passes: int) -> bool:
            return noise * (passes * times.alpha + times.sigma) <= times.beta * (passes * size) ** 2

        numbers = range(fewest, most + 1)
        first = min(fewest + bisect_left(numbers, True, key=is_valley_before_end), most)
        slope = times.alpha / size + times.beta
        full = math.sqrt(noise * times.sigma / slope) / size if slope else math.inf
        turn = int(min(full, first))
        return sorted({max(passes, fewest) for passes in (min(turn, first - 1), min(turn + 1, first - 1), first)})

    def _reach(self, start: int, end: int, is_within: Callable[[int], bool]) -> int:
        """Return how far shares from `start` towards `end` are within without a gap; `start` is."""
        step = 1 if end >= start else -1

        def edge_of(passes: int) -> int:
            ends = self._shares_of(passes)
            return min(max(ends), end) if step > 0 else max(min(ends), end)

        def is_whole(passes: int) -> bool:
            return all(is_within(share) for share in self._shares_of(passes))

        passes, last = self._passes(start), self._passes(end)
        share = _run(start, edge_of(passes), is_within)
        if share != edge_of(passes) or passes == last:
            return share
        passes = _run(passes, last, is_whole)
        share = edge_of(passes)
        if passes == last or not is_within(share + step):
            return share
        return _run(share + step, edge_of(passes + step), is_within)


def _run(start: int, end: int, is_good: Callable[[int], bool]) -> int:
    """Return the last number from `start` towards `end` before the first that is not good; `start` counts as good.

    What is good must be one stretch of numbers.
    """
    step = 1 if end >= start else -1
    way = range(start, end + step, step)
    if len(way) == 1 or not is_good(way[1]):
        return start
    return way[bisect_left(way, True, lo=2, key=lambda number: not is_good(number)) - 1]


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
    range_within_5_percent: tuple[int, int]
    critical: CriticalBatch
    noise_scale: float
    """The critical batch that `value` rests on: the estimate, or its lower end if that is infinite."""
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

    def time_ratio(self, batch: float) -> float:
        """Time to the loss at another batch, relative to that at the best.

        >>> round(best_batch(400, {16: 0.12, 64: 0.24, 256: 0.72}).time_ratio(16), 2)
        1.9
        """
        curve = TimeToLoss(self.noise_scale, self.step_seconds)
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
            "range_within_5_percent": list(self.range_within_5_percent),
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

    curve = TimeToLoss(critical.known_value, step, least, most)
    value = curve.soonest
    run_seconds = None if steps is None else steps * curve.at(value)
    limit = None if deadline_seconds is None else positive_seconds(deadline_seconds, "deadline")
    answer = BestBatch(
        value=value,
        low=replace(curve, critical=critical.low).soonest,
        high=replace(curve, critical=critical.high).soonest if critical.resolved else None,
        range_within_5_percent=curve.as_good,
        critical=critical,
        noise_scale=curve.critical,
        step_seconds=step,
        words=(),
        in_micro_batches=(
            soonest_on_line(
                curve.critical, step.fixed, step.per_sample, least=least, most=most, unit=micro * num_devices
            )
            if micro
            else None
        ),
        run_seconds=run_seconds,
        run_cost=price * num_devices * run_seconds / 3600 if price and run_seconds else None,
        deadline_batch=curve.smallest_within(limit / steps) if limit and steps else None,
        # The same valley with devices for samples: n of them cost (1 + Bc/(b n))(worth + price n).
        elastic_devices=(
            soonest_on_line(curve.critical / micro, worth, price, least=1, most=LARGEST_COUNT)
            if micro and price
            else None
        ),
    )
    words = [*_words(answer, curve), *_run_words(answer, limit)]
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
        return CriticalBatch(size, size, size, unit="samples", observations=0)
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
    if isinstance(times, TimeModel):
        return StepSeconds(times, devices, micro_batch)
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


def _words(best: BestBatch, curve: TimeToLoss) -> Iterator[str]:
    critical, step, most = best.critical, curve.step, curve.most
    yield f"critical batch: {critical if critical.observations else f'{figure(critical.value)} samples, as given'}"
    if not critical.resolved:
        rests = "the estimate" if best.noise_scale == critical.value else "its lower end, so take it as a least value"
        yield f"no evidence that a larger batch is too large; the answer rests on {rests}: {figure(best.noise_scale)}"
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
