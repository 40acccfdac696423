"""Batches that a loop received, told apart from those that the workers of a DataLoader drew ahead.

Without workers a batch that is drawn is received. With workers the sampler runs ahead of the loop, and only somebody
who sees the loop can count: `track(loader)`, or an Accumulator.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from batchwright.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

# A DataLoader asks its sampler from a few calls up.
_DEEPEST = 12


class Received:
    """Whether the count of what was drawn is also that of what was received."""

    def __init__(self) -> None:
        self.is_counted = False
        """Whether somebody who sees the loop counts."""
        self.is_exhausted = False
        self.are_two_passes_open = False
        """Whether an older pass went on after a newer one had begun, so that nobody knows where the loop stands."""
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
        if self.are_two_passes_open:
            raise InvalidInputError(
                "two passes over the sampler are open at once, and it cannot tell which is the training's.",
                remedy="a sampler of its own for each",
            )
        if self.is_uncounted:
            raise InvalidInputError(
                "the DataLoader's workers draw batches ahead of the loop, or accelerate does, and nobody counts those "
                "that it received.",
                remedy="for batch in sampler.track(loader): ..., or accumulator.micro_batches(loader), which counts",
            )


class Tracked:
    """A loader whose batches are counted as the loop receives them; an Accumulator over it counts instead."""

    def __init__(self, batch_sampler: Any, loader: Iterable[Any]) -> None:
        self.batch_sampler = batch_sampler
        self.loader = loader

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        self.batch_sampler.expect_counts()
        for batch in self.loader:
            self.batch_sampler.count_received(1)
            yield batch


def refuse_second_sharding() -> None:
    """Refuse to be sharded by accelerate: these batches are one rank's already, and ranks would lose most of them."""
    if any(type(asking).__name__ == "BatchSamplerShard" for asking in _who_asks()):
        raise InvalidInputError(
            "accelerate shards this sampler's batches once more, though they are one rank's already.",
            remedy="batchwright.integrations.token_batches.prepare_loader(accelerator, loader) in place of "
            "accelerator.prepare(loader)",
        )


def _reads_ahead() -> bool:
    """Whether whoever asks reads ahead of the loop."""
    # accelerate's loaders look for the end of an epoch one batch ahead.
    return any(
        type(asking).__name__ in ("DataLoaderShard", "DataLoaderDispatcher")
        or bool(getattr(asking, "_num_workers", None))
        for asking in _who_asks()
    )


def _who_asks() -> Iterator[Any]:
    """Yield the objects whose methods are asking, the nearest first: there is no other way to know than to look."""
    for depth in range(2, _DEEPEST):
        try:
            frame = sys._getframe(depth)
        except ValueError:
            return
        yield frame.f_locals.get("self")
