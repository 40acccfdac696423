"""The time to a loss by effective batch, for one critical batch: steps to the loss times the seconds of a step.

A loss takes Smin (1 + (Bc/B)^p)^(1/p) steps: with a bend p of 1 the curve of McCandlish et al. 2018
(arXiv:1812.06162), with a larger one a curve that turns more sharply from half the steps to none saved. A step takes as
many whole passes as the batch needs on a device. If it is one pass of s + r B seconds, the product is least where
B^(1 + p) = (s/r) Bc^p, for p = 1 at sqrt((s/r) Bc), and flat there: a factor of 2 off then costs at most 12.5 %. With
more passes there is such a valley for each number of them.

Promises:
- the soonest batch, the range within 5 % and the smallest batch that meets a deadline are what counting every batch
  would give;
- a batch outside those that were timed is called extrapolated.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from batchwright.planning.critical_batch import steps_over_minimum
from batchwright.units import LARGEST_COUNT

if TYPE_CHECKING:
    from batchwright.planning.times import TimeModel

_AS_GOOD = 1.05


def time_to_loss(batch: float, critical: float, fixed: float, per_sample: float, bend: float = 1.0) -> float:
    """(1 + Bc/B)(s + r B): the seconds until the loss is reached, per step of Smin, if a step takes s + r B.

    >>> time_to_loss(100, 300, fixed=0.1, per_sample=0.001)
    0.8
    """
    return steps_over_minimum(batch, critical, bend) * (fixed + per_sample * batch)


def bottom_on_line(critical: float, fixed: float, per_sample: float, bend: float = 1.0) -> float:
    """The batch with the least time, not whole: where B^(1 + p) = (s/r) Bc^p; infinite if samples cost nothing.

    >>> round(bottom_on_line(400, 0.09, 0.0001)), round(bottom_on_line(400, 0.09, 0.0001, bend=2.0))
    (600, 524)
    """
    if not per_sample:
        return math.inf
    return critical * (fixed / per_sample / critical) ** (1 / (1 + bend)) if critical else 0.0


def soonest_on_line(
    critical: float, fixed: float, per_sample: float, *, least: int, most: int, unit: int = 1, bend: float = 1.0
) -> int:
    """The multiple of `unit` with the least time: a neighbour of the bottom, as the time has a single valley.

    >>> soonest_on_line(400, fixed=0.08, per_sample=0.0025, least=1, most=1000)
    113
    """
    below = int(min(max(bottom_on_line(critical, fixed, per_sample, bend), least), most)) // unit * unit
    around = [batch for batch in (below, below + unit) if max(unit, least) <= batch <= most]
    return min(around, key=lambda batch: time_to_loss(batch, critical, fixed, per_sample, bend))


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a whole optimizer step by effective batch, in whole passes, and what that rests on.

    >>> from batchwright.planning.times import fit_times
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

    >>> from batchwright.planning.times import fit_times
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
    bend: float = 1.0
    """How sharply the steps turn around the critical batch."""

    def at(self, batch: float) -> float:
        """Return the time to the loss, in seconds for each of the least steps."""
        return self.steps_at(batch) * self.step.at(batch)

    def steps_at(self, batch: float) -> float:
        """Return the steps to the loss, over the least."""
        return steps_over_minimum(batch, self.critical, self.bend)

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
        share = soonest_on_line(self.critical / devices, fixed, times.beta, least=first, most=full, bend=self.bend)
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
            return bottom_on_line(noise, passes * times.alpha + times.sigma, times.beta, self.bend) <= passes * size

        numbers = range(fewest, most + 1)
        first = min(fewest + bisect_left(numbers, True, key=is_valley_before_end), most)
        slope = times.alpha / size + times.beta
        full = bottom_on_line(noise, times.sigma, slope, self.bend) / size
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
