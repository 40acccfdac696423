"""Where training stands: windows finished in all, and what of the present epoch is used up."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batchwright.accumulate.read_ahead import MicroBatch, WindowSizes


class Position:
    """Counts windows and micro-batches, and can be put back to where it stood.

    >>> position = Position()
    >>> position.finish_window([])
    >>> position.state_dict()
    {'number': 1, 'windows_done': 1, 'micro_batches_done': 0}
    """

    def __init__(self) -> None:
        self.number = 0
        """Windows finished so far."""
        self.windows_done = self.micro_batches_done = 0
        """Of this epoch."""
        self._resumes = False

    def begin_epoch(self) -> int:
        """Return how many micro-batches of the epoch are done: none, but right after `load_state_dict`."""
        if not self._resumes:
            self.end_epoch()
        self._resumes = False
        return self.micro_batches_done

    def end_epoch(self) -> None:
        """Forget what was used of it."""
        self.windows_done = self.micro_batches_done = 0

    def finish_window(self, micro_batches: Iterable[MicroBatch]) -> None:
        """Count a window, and what it used of the loader."""
        self.number += 1
        self.windows_done += 1
        self.micro_batches_done += sum(micro_batch.num_read for micro_batch in micro_batches)

    def size_of_next(self, sizes: WindowSizes, *, is_reading: bool) -> int:
        """Return how many micro-batches the next window has."""
        named = sizes.num_named
        # A plain loop does not say where an epoch begins: after the last window that is named comes the first.
        window = self.windows_done if is_reading or not named else self.windows_done % named
        return sizes.of(self.number, window)

    def state_dict(self) -> dict[str, int]:
        """Return the position as of the last finished window."""
        return {
            "number": self.number,
            "windows_done": self.windows_done,
            "micro_batches_done": self.micro_batches_done,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a position: the next epoch begins there."""
        self._resumes = True
        self.number = state["number"]
        self.windows_done, self.micro_batches_done = state["windows_done"], state["micro_batches_done"]
