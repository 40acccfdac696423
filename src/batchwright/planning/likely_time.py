"""Which batch to take where the critical batch is known up to a factor only.

The critical batch is taken as log-normal around its estimate. At every batch the loss of time is what it takes over the
best for the critical batch that turns out to be true. The answer loses least time on average; a range is what loses at
most 5 % with a chance of 80 %. If the critical batch is known, that is the soonest batch and what is within 5 % of it.

Promises:
- the answer, its chance and the range follow from the same critical batches, so that they cannot disagree;
- no range is better than a wrong one: if no batch has that chance, there is none, and the answer says how far off it
  may be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist, fmean, quantiles
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchwright.planning.time_to_loss import TimeToLoss

CHANCE = 0.8
# Critical batches of equal chance. More of them move the answer by less than it matters: the curve is flat.
_CASES = 40


@dataclass(frozen=True)
class LikelyTime:
    """The time to a loss by effective batch, averaged over the critical batches that are likely.

    >>> from batchwright.planning.time_to_loss import StepSeconds, TimeToLoss
    >>> from batchwright.planning.times import fit_times
    >>> curve = TimeToLoss(400.0, StepSeconds(fit_times({16: 0.12, 64: 0.24, 256: 0.72})))
    >>> LikelyTime(curve).soonest, LikelyTime(curve).as_good
    (113, (67, 192))
    >>> unsure = LikelyTime(curve, spread=0.5)
    >>> unsure.soonest, unsure.as_good
    (109, (79, 153))
    >>> LikelyTime(curve, spread=1.5).as_good is None
    True
    """

    curve: TimeToLoss
    """At the middle of the critical batches that are likely."""
    spread: float = 0.0
    """The standard deviation of the logarithm of the critical batch."""

    @cached_property
    def cases(self) -> tuple[TimeToLoss, ...]:
        """The curves for critical batches of equal chance, in order."""
        if not self.spread:
            return (self.curve,)
        places = (NormalDist().inv_cdf((number + 0.5) / _CASES) for number in range(_CASES))
        return tuple(
            replace(self.curve, critical=self.curve.critical * math.exp(self.spread * place)) for place in places
        )

    @cached_property
    def soonest(self) -> int:
        """The batch that loses least time on average."""
        return min({case.soonest for case in self.cases}, key=lambda batch: (self._over_best(batch), batch))

    def over_soonest(self, batch: float) -> float:
        """Return the time at a batch over that at the soonest, on average."""
        return self._over_best(batch) / self._over_best(self.soonest)

    def between(self, batch: float) -> tuple[float, float]:
        """Return what the time at a batch over that at the best lies between, with the same chance as the range."""
        ratios = [case.over_soonest(batch) for case in self.cases]
        if len(ratios) == 1:
            return ratios[0], ratios[0]
        tenths = quantiles(ratios, n=round(2 / (1 - CHANCE)), method="inclusive")
        return tenths[0], tenths[-1]

    def chance(self, batch: float) -> float:
        """Return how likely a batch is as good as the best: at most 5 % longer."""
        return fmean(first <= batch <= last for first, last in self._as_good_cases)

    @cached_property
    def as_good(self) -> tuple[int, int] | None:
        """The batches around the answer that are as good as the best with a chance of 80 %; None if it has less."""
        best = self.soonest
        edges = sorted({best, *(edge for ends in self._as_good_cases for edge in ends)})
        middle = edges.index(best)
        if self.chance(best) < CHANCE:
            return None
        first = next((place for place in range(middle, -1, -1) if self.chance(edges[place]) < CHANCE), -1) + 1
        last = next((place for place in range(middle, len(edges)) if self.chance(edges[place]) < CHANCE), len(edges))
        return edges[first], edges[last - 1]

    @cached_property
    def longest(self) -> float:
        """The time at the answer over that at the best, which it is within with a chance of 80 %."""
        ratios = sorted(case.over_soonest(self.soonest) for case in self.cases)
        return ratios[math.ceil(CHANCE * len(ratios)) - 1]

    def _over_best(self, batch: float) -> float:
        return fmean(case.over_soonest(batch) for case in self.cases)

    @cached_property
    def _as_good_cases(self) -> tuple[tuple[int, int], ...]:
        return tuple(case.as_good for case in self.cases)
