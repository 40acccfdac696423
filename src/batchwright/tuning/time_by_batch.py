"""How long any effective batch takes to a loss, in whole passes of what fits: one curve behind every answer.

The time is steps x seconds: (1 + Bc/B) of the least steps, each of as many passes as the batch needs on one device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from batchwright.noise.efficiency import steps_over_minimum

if TYPE_CHECKING:
    from batchwright.planning.times import TimeModel

_AS_GOOD = 1.05


@dataclass(frozen=True)
class TimeByBatch:
    """The curve for one critical batch, one limit and so many devices.

    >>> from batchwright.planning.times import fit_times
    >>> by_batch = TimeByBatch(100.0, fit_times({4: 0.014, 8: 0.018}), devices=1, largest=64)
    >>> by_batch.soonest, by_batch.as_good, round(by_batch.over_soonest(65), 2)
    (32, (19, 53), 1.25)
    """

    critical: float
    times: TimeModel
    devices: int
    largest: int
    """The largest micro-batch that fits."""
    samples: int | None = None
    """No batch is larger than the data."""

    def at(self, batch: int) -> float:
        """Return the time to the loss, in seconds for each of the least steps."""
        each = -(-batch // self.devices)
        passes = -(-each // self.largest)
        seconds = passes * self.times.alpha + each * self.times.beta + self.times.sigma
        return steps_over_minimum(batch, self.critical) * seconds

    def over_soonest(self, batch: int) -> float:
        """Return the time at a batch over that at the best."""
        return self.at(batch) / self.at(self.soonest)

    @cached_property
    def soonest(self) -> int:
        """The batch that gets there first."""
        return min(self._candidates(), key=lambda batch: (self.at(batch), batch))

    @cached_property
    def as_good(self) -> tuple[int, int]:
        """The batches around the best that take at most 5 % longer."""
        best = self.soonest
        limit, low, high = _AS_GOOD * self.at(best), best, best
        while low > 1 and self.at(low - 1) <= limit:
            low -= 1
        while high < self._most and self.at(high + 1) <= limit:
            high += 1
        return low, high

    @property
    def _most(self) -> int:
        return max(self.samples or 2**31, 1)

    def _candidates(self) -> set[int]:
        """Within so many passes the curve has one least point: that, or the end of the passes; all ranks full."""
        found = {self._most} if self.samples else set()
        most = max(self._most // self.devices, 1)
        # Beyond this many samples on a device whole passes only get slower.
        slope = self.times.alpha / self.largest + self.times.beta
        turn = math.sqrt(self.critical * self.times.sigma / (slope * self.devices)) if slope else 0.0
        for passes in range(1, min(math.ceil(turn / self.largest) + 2, 10_000) + 1):
            fixed, end = passes * self.times.alpha + self.times.sigma, min(passes * self.largest, most)
            free = math.sqrt(self.critical * fixed / (self.times.beta * self.devices)) if self.times.beta else math.inf
            each = min(free, end)
            found |= {max(size, 1) * self.devices for size in (math.floor(each), math.ceil(each), end)}
        return {min(batch, self._most) for batch in found}
