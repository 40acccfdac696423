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
_DEEPEST = 12


class Received:
    """Whether the count of what was drawn is also that of what was received."""

    def __init__(self) -> None:
        self.is_counted = False
        """Whether somebody who sees the loop counts."""
        self.is_exhausted = False
        self.will_be_counted = self._runs_ahead = False
        self._count: Callable[[int], None] | None = None

    def expect_counts(self) -> None:
        """Be told that somebody will count what the next iteration yields."""
        self.will_be_counted = True

    def begin(self, count: Callable[[int], None]) -> None:
        """Begin an iteration; `count` is told what was received."""
        self._count = count
        self.is_exhausted = False
        self.is_counted, self.will_be_counted = self.will_be_counted, False
        self._runs_ahead = _reads_ahead()

    def drew(self, number: int) -> None:
        """Note that a batch was drawn, the `number`-th of its segment."""
        if not self._runs_ahead and not self.is_counted and self._count is not None:
            self._count(number)

    def drew_all(self) -> None:
        """Note that there are no more."""
        self.is_exhausted = True

    @property
    def is_uncounted(self) -> bool:
        """Whether workers run ahead and nobody counts."""
        return self._runs_ahead and not self.is_counted

    def check(self) -> None:
        """Refuse to tell what nobody counts."""
        if self.is_uncounted and not self.is_exhausted:
            raise InvalidInputError(
                "the DataLoader's workers draw batches ahead of the loop, or accelerate does, and nobody counts those "
                "that it received.",
                remedy="for batch in sampler.track(loader): ..., or accumulator.micro_batches(loader), which counts",
            )


def _reads_ahead() -> bool:
    """Whether whoever asks reads ahead of the loop: there is no other way to know than to look who asks."""
    for depth in range(2, _DEEPEST):
        try:
            frame = sys._getframe(depth)
        except ValueError:
            return False
        asking: Any = frame.f_locals.get("self")
        name = type(asking).__name__
        # accelerate's loaders look for the end of an epoch one batch ahead.
        if name in ("DataLoaderShard", "DataLoaderDispatcher") or bool(getattr(asking, "_num_workers", None)):
            return True
    return False
