"""What a run asked of an allocator, kept as plain numbers, and asked again of another card.

The kernels of a step depend on a card's generation, not on its memory. So one trace answers for every card of a kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchwright.simulated.caching_allocator import CachingAllocator, SimulatedOutOfMemory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchwright.simulated.allocator_settings import AllocatorSettings
    from batchwright.simulated.cached_blocks import Block


class Requests:
    """Allocations in order, by their size, and what was freed, by the number of its allocation."""

    def __init__(self) -> None:
        self.events: list[int] = []
        self._numbers: dict[int, int] = {}
        self._count = 0

    def took(self, block: Block, num_bytes: int) -> None:
        """Note an allocation."""
        self._numbers[id(block)] = self._count
        self._count += 1
        self.events.append(num_bytes)

    def gave_back(self, block: Block) -> None:
        """Note what was freed."""
        number = self._numbers.pop(id(block), None)
        if number is not None:
            self.events.append(-1 - number)


def goes_through(events: Sequence[int], capacity: int, settings: AllocatorSettings, total_bytes: int) -> bool:
    """Whether a run's requests can all be met on a card that hands out so many bytes.

    >>> from batchwright.simulated.allocator_settings import AllocatorSettings
    >>> events = [30 << 20, -1, 40 << 20]  # freed before the second is asked for
    >>> [goes_through(events, mib << 20, AllocatorSettings(), mib << 20) for mib in (38, 40, 70)]
    [False, True, True]
    """
    try:
        _replay(events, CachingAllocator(capacity, settings, settings.allowed_bytes(total_bytes)))
    except SimulatedOutOfMemory:
        return False
    return True


def peaks_with_room(events: Sequence[int], settings: AllocatorSettings) -> tuple[int, int]:
    """Return the allocated and the reserved peak of a run's requests, on a card with room to spare.

    >>> from batchwright.simulated.allocator_settings import AllocatorSettings
    >>> peaks_with_room([30 << 20, -1, 40 << 20], AllocatorSettings()) == (40 << 20, 70 << 20)
    True
    """
    allocator = CachingAllocator(None, settings, None)
    _replay(events, allocator)
    return allocator.stats.allocated.peak, allocator.stats.reserved.peak


def _replay(events: Sequence[int], allocator: CachingAllocator) -> None:
    blocks: list[Block] = []
    for event in events:
        if event >= 0:
            blocks.append(allocator.malloc(event))
        else:
            allocator.free(blocks[-1 - event])
