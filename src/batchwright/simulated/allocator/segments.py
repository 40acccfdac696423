"""Segments: the memory of a card, when a segment is taken from it, how it grows, and when cached ones are given back.

Promises:
- a piece of the card takes whole granules of 2 MiB, and none is handed out past the capacity. Addresses only rise and
  none is used twice: which of two equal blocks is taken depends on their addresses, and a driver's choice is not known,
  so this one is at least the same in every run;
- a cached segment is given back only where no block of it is in use;
- where the allowed bytes would be passed, the card is not asked;
- an expandable segment (one for each pool and stream as long as its addresses last) adds memory at the lowest address
  where a block fits, filling gaps first, in pages of 2 MiB in the small pool and of a large segment (20 MiB) in the
  large one. It gives back only pages without a byte in use, and only where everything cached is given back. Where the
  card runs out between two gaps, what was mapped by then stays mapped, and free, as in PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from batchwright.simulated.allocator.blocks import Block

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchwright.simulated.allocator.blocks import AllocatorCounters, BlockPool
    from batchwright.simulated.allocator.settings import AllocatorSettings

    Listener = Callable[[str, int, int, int], None]


_FIRST_ADDRESS = 0x7F00_0000_0000
UNLIMITED = 1 << 46
"""64 TiB stand for a card without a limit: more than any trace asks for, and addresses stay exact in a browser."""


class CardMemory:
    """What is left of a card.

    >>> card = CardMemory(6 << 20)
    >>> hex(card.allocate(3 << 20)), card.free >> 20
    ('0x7f0000000000', 2)
    >>> card.allocate(3 << 20) is None
    True
    """

    __slots__ = ("_next_address", "_taken", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._taken = 0
        self._next_address = _FIRST_ADDRESS

    @property
    def free(self) -> int:
        """Bytes that can still be handed out."""
        return self.capacity - self._taken

    def take(self, size: int) -> bool:
        """Take memory without an address, as cuMemCreate does; False where it is not there."""
        size = whole_granules(size)
        if self._taken + size > self.capacity:
            return False
        self._taken += size
        return True

    def give_back(self, size: int) -> None:
        """Take back what `take` or `allocate` handed out."""
        self._taken -= whole_granules(size)

    def allocate(self, size: int) -> int | None:
        """Return the address of new memory, as cudaMalloc does; None where it is not there."""
        return self.reserve_addresses(size) if self.take(size) else None

    def reserve_addresses(self, size: int) -> int:
        """Return the first of `size` addresses without memory behind them, as cuMemAddressReserve does."""
        address = self._next_address
        self._next_address += whole_granules(size)
        return address


# What a request becomes: its rounded size, and the segment that is asked of the card where nothing cached fits.
#
# Facts of c10/core/AllocatorConfig.h and c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.13.

SMALLEST_BLOCK = 512
LARGEST_SMALL = 1024 * 1024
"""The largest rounded size that the small pool serves."""
SMALL_SEGMENT = 2 * 1024 * 1024
GRANULE = 2 * 1024 * 1024
"""What the card is handed out in, and what large segments are rounded to."""
OWN_SEGMENT = 10 * 1024 * 1024
"""From this size on a block gets a segment of its own size."""
LARGEST_REQUEST = 1 << 60
"""PyTorch refuses this many bytes before it looks at anything."""


def rounded_size(size: int, settings: AllocatorSettings) -> int:
    """Return the bytes of the block that a request takes.

    >>> from batchwright.simulated.allocator.settings import AllocatorSettings
    >>> rounded_size(1, AllocatorSettings()), rounded_size(513, AllocatorSettings())
    (512, 1024)
    >>> rounded_size(1200 * 1024, AllocatorSettings(roundup_power2_divisions=4)) // 1024
    1280
    """
    if settings.roundup_power2_divisions:
        divisions = settings.divisions_of(size)
        if divisions > 1 and size > SMALLEST_BLOCK * divisions:
            step = (1 << (size.bit_length() - 1)) // divisions
            return -(-size // step) * step
    return max(-(-size // SMALLEST_BLOCK), 1) * SMALLEST_BLOCK


def segment_size(rounded: int, settings: AllocatorSettings) -> int:
    """Return the bytes that cudaMalloc is asked for.

    >>> from batchwright.simulated.allocator.settings import AllocatorSettings
    >>> [segment_size(mib << 20, AllocatorSettings()) >> 20 for mib in (1, 2, 9, 10, 11)]
    [2, 20, 20, 10, 12]
    """
    if rounded <= LARGEST_SMALL:
        return SMALL_SEGMENT
    if rounded < OWN_SEGMENT:
        return settings.large_segment_size
    return whole_granules(rounded)


def whole_granules(size: int) -> int:
    """Round up to what the card hands out.

    >>> whole_granules(11 << 20) >> 20
    12
    """
    return -(-size // GRANULE) * GRANULE


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
