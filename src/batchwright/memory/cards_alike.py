"""Cards whose kernels are alike: one of them is traced at a few sizes, and the others and further sizes follow."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from batchwright.catalogue.gpus import context_of
from batchwright.device.peak_bytes import PeakBytes
from batchwright.memory.scaled_requests import ScaledRequests
from batchwright.simulated.replay import peaks_with_room

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchwright.catalogue.gpus import Card
    from batchwright.memory.on_card import OnCard
    from batchwright.memory.tracing import Traced

# Sizes to draw lines through, two each. A line holds up to a size at which it was proven by a trace, and each proof is
# made far ahead. Where it fails, a kernel has taken another path in between (an embedding does, from so many tokens on,
# and again at as many as it has rows): then lines are drawn anew beyond.
# All of them are odd: a step that pads its batch to a multiple goes up in stairs, which multiples would not show.
_PAIRS = ((17, 25), (67, 97), (257, 389), (1031, 1543))
_AHEAD = 4


class CardsAlike:
    """The runs of a step on cards of one kind, by micro-batch."""

    def __init__(self, there: OnCard, cap: int, say: Callable[[str], None]) -> None:
        self._there, self._cap, self._say = there, cap, say
        self._runs: dict[int, Traced] = {}
        self._pairs = list(_PAIRS)
        self._lines: ScaledRequests | None = None
        self._proven = 0

    def traced(self, size: int, card: Card) -> Traced:
        """Return a run at a size, with the context of this very card."""
        if size not in self._runs:
            self._runs[size] = self._scaled(size) or self._trace(size)
        found = self._runs[size]
        context = context_of(card)
        assert found.peaks is not None
        assert found.peaks.reserved is not None
        peaks = replace(found.peaks, device=found.peaks.reserved + context.typical_bytes)
        return replace(found, peaks=peaks, context=context)

    def _trace(self, size: int) -> Traced:
        if size not in self._runs:
            self._say(f"{self._there.card.name} and its like: tracing micro-batch {size:,}")
            self._runs[size] = self._there.traced(size)
        return self._runs[size]

    def _scaled(self, size: int) -> Traced | None:
        """Return what a size would ask for, by the lines; None below them, or where there are none."""
        while size > self._proven and self._pairs and self._pairs[0][-1] < size:
            if self._lines is None:
                self._lines = self._drawn(*self._pairs[0])
            ahead = min(max(size, _AHEAD * self._pairs[0][-1], _AHEAD * self._proven) | 1, self._cap)
            if self._lines is not None and self._holds(self._lines, ahead):
                self._proven = ahead
            else:
                self._lines = None
                self._pairs.pop(0)
        if self._lines is None or not self._lines.small <= size <= self._proven:
            return None
        events = self._lines.at(size)
        allocated, reserved = peaks_with_room(events, self._there.settings)
        # The rest of a trace, its log and its notes, is that of the smallest size on the lines.
        return replace(self._trace(self._lines.small), peaks=PeakBytes(allocated, reserved), requests=events)

    def _holds(self, lines: ScaledRequests, size: int) -> bool:
        try:
            return lines.agrees_with(size, self._trace(size).requests)
        except Exception:  # a batch that cannot be made so large says nothing of smaller ones
            return False

    def _drawn(self, small: int, large: int) -> ScaledRequests | None:
        return ScaledRequests.through(small, self._trace(small).requests, large, self._trace(large).requests)
