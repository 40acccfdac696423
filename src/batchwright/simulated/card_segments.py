"""Segments: when one is taken from the card, and when cached ones are given back.

Promises:
- a cached segment is given back only where no block of it is in use;
- where the allowed bytes would be passed, the card is not asked;
- expandable segments give back single pages, and only where everything cached is given back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from batchwright.simulated.cached_blocks import Block
from batchwright.simulated.expandable_segments import SegmentGrower

if TYPE_CHECKING:
    from batchwright.simulated.allocator_counters import AllocatorCounters
    from batchwright.simulated.allocator_settings import AllocatorSettings
    from batchwright.simulated.cached_blocks import BlockPool
    from batchwright.simulated.card_memory import CardMemory
    from batchwright.simulated.expandable_segments import Listener


class Request(NamedTuple):
    """A request that no cached block could serve."""

    size: int
    rounded: int
    segment: int
    """Bytes of the segment to ask the card for."""
    stream: int
    pool: BlockPool


class CardSegments:
    """Takes segments from a card and gives them back; `allowed` caps what is reserved at a time, in bytes."""

    def __init__(
        self,
        card: CardMemory,
        settings: AllocatorSettings,
        counters: AllocatorCounters,
        *,
        allowed: int | None,
        listener: Listener | None,
    ) -> None:
        self._card = card
        self._settings = settings
        self._counters = counters
        self._allowed = allowed
        self._listener = listener
        self._grower = SegmentGrower(card, counters, large_page=settings.large_segment_size, listener=listener)
        self.collects = allowed is not None and settings.garbage_collection_threshold > 0.0
        """Are old cached segments given back before the card is asked?"""

    def passes_allowed(self, request: Request) -> bool:
        """Would the segment pass the allowed bytes? Pages of expandable segments are not what is compared, as there."""
        return self._allowed is not None and self._counters.reserved.current + request.segment > self._allowed

    def take(self, request: Request) -> Block | None:
        """Return a free block that is in no pool, large enough; None where there is no memory for it."""
        if self.passes_allowed(request):
            return None
        if self._settings.expandable_segments:
            return self._grower.room_for(request.rounded, request.stream, request.pool)
        address = self._card.allocate(request.segment)
        if address is None:
            return None
        self._counters.num_segments.add(1)
        self._counters.reserved.add(request.segment)
        self._counters.num_device_alloc += 1
        if self._listener is not None:
            self._listener("segment_alloc", address, request.segment, request.stream)
        return Block(address, request.segment, request.stream, request.pool)

    def give_back_cached(self, pool: BlockPool) -> None:
        """Give back everything cached that no block in use holds on to."""
        if self._settings.expandable_segments:
            self._grower.give_back_pages(pool)
            return
        for block in pool.free_blocks():
            if not block.is_split:
                self._give_back(block)

    def give_back_unsplittable(self, request: Request) -> bool:
        """Give back one cached block that is large enough, or else the largest ones until they add up to the request.

        Only blocks of max_split_size and more are looked at; they are segments of their own.
        """
        unsplittable = self._settings.max_split_size
        if unsplittable is None or self._settings.expandable_segments:
            return False
        needed = max(request.rounded, unsplittable)
        pool, stream = request.pool, request.stream
        block = pool.best_fit(needed, stream) or pool.largest(stream)
        while block is not None and block.size >= unsplittable:
            self._give_back(block)
            needed -= block.size
            if needed <= 0:
                return True
            block = pool.largest(stream)
        return False

    def collect_old(self, pool: BlockPool) -> None:
        """Give back cached segments of more than average age, again and again, until reserved is at the threshold.

        The age is how often a block was looked for in the pool since it came there.
        """
        assert self._allowed is not None
        excess = self._counters.reserved.current - int(self._settings.garbage_collection_threshold * self._allowed)
        if excess <= 0:
            return
        ages = {
            block: pool.searches - block.searches_at_insert
            for block in pool.free_blocks()
            if not block.is_split and block.expandable is None
        }
        while excess > 0 and ages:
            average = sum(ages.values()) / len(ages)
            for block in [block for block, age in ages.items() if age >= average]:
                excess -= block.size
                del ages[block]
                self._give_back(block)

    def _give_back(self, block: Block) -> None:
        block.pool.remove(block)
        self._card.give_back(block.size)
        self._counters.num_segments.subtract(1)
        self._counters.reserved.subtract(block.size)
        self._counters.num_device_free += 1
        if self._listener is not None:
            self._listener("segment_free", block.address, block.size, block.stream)
