"""Segments that grow: addresses for the whole card, with pages of memory behind those that are needed.

There is one for each pool and stream as long as its addresses last. Pages are 2 MiB in the small pool, a large
segment (20 MiB) in the large one.

Promises:
- memory is added at the lowest address where a block fits, filling gaps first;
- only pages without a byte in use are given back;
- where the card runs out between two gaps, what was mapped by then stays mapped, and free, as in PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchwright.simulated.allocation_sizes import SMALL_SEGMENT
from batchwright.simulated.cached_blocks import Block

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchwright.simulated.allocator_counters import AllocatorCounters
    from batchwright.simulated.cached_blocks import BlockPool
    from batchwright.simulated.card_memory import CardMemory

    Listener = Callable[[str, int, int, int], None]


class ExpandableSegment:
    """A run of addresses, cut into pages."""

    __slots__ = ("address", "page", "size")

    def __init__(self, address: int, size: int, page: int) -> None:
        self.address = address
        self.size = size
        self.page = page

    def whole_pages_within(self, block: Block) -> tuple[int, int]:
        """Return the first address and the bytes of the pages that a block covers from end to end."""
        start = -(-(block.address - self.address) // self.page) * self.page
        end = (block.address + block.size - self.address) // self.page * self.page
        return self.address + start, max(end - start, 0)


class SegmentGrower:
    """Maps pages to make room for a block, and unmaps those of free blocks."""

    def __init__(
        self, card: CardMemory, counters: AllocatorCounters, *, large_page: int, listener: Listener | None
    ) -> None:
        self._card = card
        self._counters = counters
        self._large_page = large_page
        self._listener = listener

    def room_for(self, size: int, stream: int, pool: BlockPool) -> Block | None:
        """Return a free block of at least `size` bytes, out of its pool; None where the card has no memory for it."""
        block = self._place_for(size, stream, pool)
        if not block.mapped and not self._map(block, min(size, block.size)):
            return None
        while block.size < size:
            gap = block.next
            assert gap is not None, "a place was promised to have room"
            assert not gap.mapped, "free neighbours are merged"
            if not self._map(gap, min(size - block.size, gap.size)):
                return None
            # The gap has swallowed the block before it.
            block = gap
        pool.remove(block)
        return block

    def give_back_pages(self, pool: BlockPool) -> None:
        """Unmap every page of the pool that is free from end to end."""
        for block in pool.free_blocks():
            self._unmap(block)
            if not block.mapped and not block.is_split:
                pool.remove(block)

    def _place_for(self, size: int, stream: int, pool: BlockPool) -> Block:
        for unmapped in pool.unmapped_blocks(stream):
            before = unmapped.previous
            place = before if before is not None and before.is_free else unmapped
            if _has_room(place, size):
                return place
        return self._new_segment(stream, pool)

    def _new_segment(self, stream: int, pool: BlockPool) -> Block:
        page = SMALL_SEGMENT if pool.is_small else self._large_page
        # An eighth more than the card, so that pages can move on to higher addresses.
        wanted = self._card.capacity + self._card.capacity // 8
        size = -(-wanted // page) * page
        segment = ExpandableSegment(self._card.reserve_addresses(size), size, page)
        block = Block(segment.address, size, stream, pool, expandable=segment, mapped=False)
        pool.insert(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        assert block.expandable is not None
        page = block.expandable.page
        mapped = -(-size // page) * page
        if not self._card.take(mapped):
            return False
        address = block.address
        block.pool.remove(block)
        if mapped < block.size:
            block.pool.insert(block.cut_back(block.size - mapped))
        block.mapped = True
        block.swallow_neighbours()
        block.pool.insert(block)
        self._counters.reserved.add(mapped)
        self._counters.num_device_alloc += 1
        if self._listener is not None:
            self._listener("segment_map", address, mapped, block.stream)
        return True

    def _unmap(self, block: Block) -> None:
        assert block.expandable is not None
        address, size = block.expandable.whole_pages_within(block)
        if not size:
            return
        block.pool.remove(block)
        if block.address < address:
            block.pool.insert(block.cut_front(address - block.address))
        if block.size > size:
            block.pool.insert(block.cut_back(block.size - size))
        block.mapped = False
        block.swallow_neighbours()
        block.pool.insert(block)
        self._card.give_back(size)
        self._counters.reserved.subtract(size)
        self._counters.num_device_free += 1
        if self._listener is not None:
            self._listener("segment_unmap", address, size, block.stream)


def _has_room(block: Block | None, size: int) -> bool:
    while size > 0 and block is not None and block.is_free:
        size -= block.size
        block = block.next
    return size <= 0
