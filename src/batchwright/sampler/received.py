"""Batches that a loop received, told apart from those that the workers of a DataLoader drew ahead.

Without workers a batch that is drawn is received. With workers the sampler runs ahead of the loop, and only somebody
who sees the loop can count: `track(loader)`, or an Accumulator.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from batchwright.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable

# A DataLoader asks its sampler from a few calls up.
_DEEPEST = 8


class Received:
    """Whether the count of what was drawn is also that of what was received."""

    def __init__(self) -> None:
        self.is_counted = False
        """Whether somebody who sees the loop counts."""
        self.is_exhausted = False
        self._will_be_counted = self._runs_ahead = False
        self._count: Callable[[int], None] | None = None

    def expect_counts(self) -> None:
        """Be told that somebody will count what the next iteration yields."""
        self._will_be_counted = True

    def begin(self, count: Callable[[int], None]) -> None:
        """Begin an iteration; `count` is told what was received."""
        self._count = count
        self.is_exhausted = False
        self.is_counted, self._will_be_counted = self._will_be_counted, False
        self._runs_ahead = _has_workers()

    def drew(self, number: int) -> None:
        """Note that a batch was drawn, the `number`-th of its segment."""
        if not self._runs_ahead and not self.is_counted and self._count is not None:
            self._count(number)

    def drew_all(self) -> None:
        """Note that there are no more."""
        self.is_exhausted = True

    def check(self) -> None:
        """Refuse to tell what nobody counts."""
        if self._runs_ahead and not self.is_counted:
            raise InvalidInputError(
                "the DataLoader's workers draw batches ahead of the loop, and nobody counts those that it received.",
                remedy="for batch in sampler.track(loader): ..., or accumulator.micro_batches(loader), which counts",
            )


def _has_workers() -> bool:
    """Whether the DataLoader that asks has workers: there is no other way to know than to look who asks."""
    for depth in range(2, _DEEPEST):
        try:
            frame = sys._getframe(depth)
        except ValueError:
            return False
        asking: Any = frame.f_locals.get("self")
        if type(asking).__name__ in ("_MultiProcessingDataLoaderIter", "_SingleProcessDataLoaderIter"):
            return bool(asking._num_workers)
    return False
