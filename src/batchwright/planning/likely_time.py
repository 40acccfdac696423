"""Which batch to take where neither the critical batch nor the bend of the curve is known: the one model of "soonest".

The critical batch is taken as log-normal around its estimate, and the bend of the curve of steps as one of a few. At
every batch the loss of time is what it takes over the best for the case that turns out to be true. The answer loses
least time on average; a range is what loses at most 5 %, all of it, with a chance of 80 %. If the curve is known, that
is the soonest batch and what is within 5 % of it.

Promises:
- the answer, its chance, the range and what a doubling saves follow from the same cases, so that they cannot disagree;
- no range is better than a wrong one: if no batch has that chance, there is none, and the answer says how far off it
  may be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist, fmean
from typing import TYPE_CHECKING

from batchwright.planning.time_to_loss import StepSeconds, TimeToLoss
from batchwright.units import LARGEST_COUNT

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from batchwright.planning.critical_batch import CriticalBatch

CHANCE = 0.8
# Critical batches of equal chance. More of them move the answer by less than it matters: the curve is flat.
_CASES = 40


@dataclass(frozen=True)
class RacedSteps:
    """What a race showed: the steps to the loss at one batch over those at another."""

    batch: int
    other: int
    log_ratio: float
    error: float
    """The standard deviation of that logarithm."""
    growth: float = 1.0
    """How many times larger the critical batch is at the horizon than where the race ended."""

    def misfit(self, curve: TimeToLoss) -> float:
        """Return half the squared distance from a curve, in errors."""
        then = replace(curve, critical=curve.critical / self.growth)
        expected = math.log(then.steps_at(self.batch) / then.steps_at(self.other))
        return ((self.log_ratio - expected) / self.error) ** 2 / 2


@dataclass(frozen=True)
class LikelyTime:
    """The time to a loss by effective batch, averaged over the cases that are likely.

    >>> from batchwright.planning.times import fit_times
    >>> curve = TimeToLoss(400.0, StepSeconds(fit_times({16: 0.12, 64: 0.24, 256: 0.72})))
    >>> LikelyTime(curve).soonest, LikelyTime(curve).as_good
    (113, (67, 192))
    >>> unsure = LikelyTime(curve, spread=0.5)
    >>> unsure.soonest, unsure.as_good
    (109, (89, 141))
    >>> LikelyTime(curve, spread=1.5).as_good is None
    True

    A race moves the answer by how sure it is:

    >>> replace(unsure, raced=(RacedSteps(218, 109, -0.65, 0.02),)).soonest > 150
    True
    >>> replace(unsure, raced=(RacedSteps(218, 109, -0.65, 1.0),)).soonest < 115
    True
    """

    curve: TimeToLoss
    """At the middle of the critical batches that are likely, with the bend in the middle."""
    spread: float = 0.0
    """The standard deviation of the logarithm of the critical batch."""
    bends: tuple[float, ...] = ()
    """Those that are likely, each as much; none: that of the curve."""
    raced: tuple[RacedSteps, ...] = ()
    """What makes some cases likelier than others."""

    @classmethod
    def of(cls, critical: CriticalBatch, step: StepSeconds, *, least: int = 1, most: int = LARGEST_COUNT) -> LikelyTime:
        """Return what an estimate of the critical batch, in samples, and what such estimates are off by make likely."""
        likely, bends = critical.likely(), critical.bends
        curve = TimeToLoss(likely.value, step, least, most, bend=fmean(bends))
        return cls(curve, likely.spread, bends)

    @cached_property
    def cases(self) -> tuple[TimeToLoss, ...]:
        """The curves, by critical batch and bend."""
        bends = self.bends or (self.curve.bend,)
        number = _CASES // len(bends) if self.spread else 1
        places = (NormalDist().inv_cdf((place + 0.5) / number) for place in range(number))
        return tuple(
            replace(self.curve, critical=self.curve.critical * math.exp(self.spread * place), bend=bend)
            for place in places
            for bend in bends
        )

    @cached_property
    def chances(self) -> tuple[float, ...]:
        """How likely each curve is: all alike, unless a race tells."""
        misfits = [sum(steps.misfit(case) for steps in self.raced) for case in self.cases]
        weights = [math.exp(min(misfits) - misfit) for misfit in misfits]
        return tuple(weight / sum(weights) for weight in weights)

    @cached_property
    def soonest(self) -> int:
        """The batch that loses least time on average."""
        return self.soonest_of({case.soonest for case in self.cases})

    def soonest_of(self, batches: Iterable[int]) -> int:
        """Return that of some batches which loses least time on average."""
        return min(batches, key=lambda batch: (self._over_best(batch), batch))

    def soonest_multiple(self, unit: int) -> int:
        """Return the multiple of a number of samples that loses least time on average; the soonest itself if it is one.

        >>> from batchwright.planning.times import fit_times
        >>> curve = TimeToLoss(400.0, StepSeconds(fit_times({16: 0.12, 64: 0.24, 256: 0.72})))
        >>> LikelyTime(curve, spread=0.5).soonest_multiple(16)
        112
        """
        if self.soonest % unit == 0:
            return self.soonest
        first, last = math.ceil(self.curve.least / unit), max(self.curve.most // unit, 1)
        counts = {case.soonest // unit + above for case in self.cases for above in (0, 1)}
        return self.soonest_of({min(max(count, first), last) * unit for count in counts})

    def over_soonest(self, batch: float) -> float:
        """Return the time at a batch over that at the soonest, on average."""
        return self._over_best(batch) / self._over_best(self.soonest)

    def between(self, batch: float) -> tuple[float, float]:
        """Return what the time at a batch over that at the best lies between, with the same chance as the range."""
        ratios = [case.over_soonest(batch) for case in self.cases]
        return self._quantile(ratios, (1 - CHANCE) / 2), self._quantile(ratios, (1 + CHANCE) / 2)

    def chance(self, batch: float) -> float:
        """Return how likely a batch is as good as the best: at most 5 % longer."""
        return self._chance_of(batch, batch)

    @cached_property
    def as_good(self) -> tuple[int, int] | None:
        """The widest range around the answer all of which is as good, with a chance of 80 %; None if there is none."""
        best = self.soonest
        firsts = sorted({best, *(first for first, _ in self._as_good_cases if first < best)})
        lasts = sorted({best, *(last for _, last in self._as_good_cases if last > best)})
        place, ranges = 0, []
        for first in firsts:  # the closer it begins, the farther it may go
            if self._chance_of(first, lasts[place]) < CHANCE:
                continue
            while place + 1 < len(lasts) and self._chance_of(first, lasts[place + 1]) >= CHANCE:
                place += 1
            ranges.append((first, lasts[place]))
        return max(ranges, key=lambda ends: ends[1] / ends[0], default=None)

    @cached_property
    def longest(self) -> float:
        """The time at the answer over that at the best, which it is within with a chance of 80 %."""
        return self._quantile([case.over_soonest(self.soonest) for case in self.cases], CHANCE)

    def _chance_of(self, first: float, last: float) -> float:
        return sum(
            chance
            for chance, (low, high) in zip(self.chances, self._as_good_cases, strict=True)
            if low <= first and last <= high
        )

    def _over_best(self, batch: float) -> float:
        return sum(
            chance * case.over_soonest(batch) for chance, case in zip(self.chances, self.cases, strict=True) if chance
        )

    def _quantile(self, values: Sequence[float], share: float) -> float:
        total = 0.0
        for value, chance in sorted(zip(values, self.chances, strict=True)):
            total += chance
            if total >= share - 1e-9:
                return value
        return max(values)

    @cached_property
    def _as_good_cases(self) -> tuple[tuple[int, int], ...]:
        return tuple(case.as_good for case in self.cases)
