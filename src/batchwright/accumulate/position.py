"""Where training stands: windows finished in all, and what of the present epoch is used up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from batchwright.errors import InvalidInputError
from batchwright.units import shortened, whole_number

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
        if not isinstance(state, Mapping) or not {"number", "windows_done", "micro_batches_done"} <= set(state):
            raise InvalidInputError(f"this is no state of an Accumulator: {shortened(state)}.")
        number, windows, micro_batches = (
            whole_number(state[name], name, least=0) for name in ("number", "windows_done", "micro_batches_done")
        )
        if windows > number:
            raise InvalidInputError(f"this state counts {windows:,} windows of an epoch, and {number:,} in all.")
        self.number, self.windows_done, self.micro_batches_done = number, windows, micro_batches
        self._resumes = True
