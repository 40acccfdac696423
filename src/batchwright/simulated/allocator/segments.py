"""Segments and their blocks: what is taken from a card, how it is cut, cached and found again, and when it goes back.

A segment is a chain of blocks in the order of their addresses. A block is handed out, free (in its pool), or, in an
expandable segment, not mapped: addresses without memory. A pool belongs to one stream: what one stream has freed,
another cannot be given, as work on both overlaps.

Promises:
- two free neighbours are never left apart, nor two unmapped ones;
- of the free blocks that are large enough, the smallest is found first, and of equal ones that with the lowest address;
- a piece of the card takes whole granules of 2 MiB, and none is handed out past the capacity. Addresses only rise and
  none is used twice: which of two equal blocks is taken depends on their addresses, and a driver's choice is not known,
  so this one is at least the same in every run;
- a cached segment is given back only where no block of it is in use;
- where the allowed bytes would be passed, the card is not asked;
- an expandable segment (one for each pool as long as its addresses last) adds memory at the lowest address where a
  block fits, filling gaps first, in pages of 2 MiB in the small pool and of a large segment (20 MiB) in the large one.
  It gives back only pages without a byte in use, and only where everything cached is given back. Where the card runs
  out between two gaps, what was mapped by then stays mapped, and free, as in PyTorch.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchwright.simulated.allocator.settings import AllocatorSettings


Listener = Callable[[str, int, int], None]


@dataclass(slots=True, eq=False)
class Counter:
    """A number with its peak, and by how much it ever rose and fell.

    >>> counter = Counter()
    >>> counter.add(3); counter.subtract(1); counter
    Counter(current=2, peak=3)
    """

    current: int = 0
    peak: int = 0
    risen: int = field(default=0, repr=False)
    _at_reset: int = field(default=0, repr=False)

    def add(self, amount: int) -> None:
        """Count up."""
        self.current += amount
        self.risen += amount
        if self.current > self.peak:
            self.peak = self.current

    def subtract(self, amount: int) -> None:
        """Count down."""
        self.current -= amount

    @property
    def fallen(self) -> int:
        """By how much it fell; found from the rest, because counting is done for every block."""
        return self.risen - (self.current - self._at_reset)

    def forget_changes(self) -> None:
        """Let what rose and fell start again from nothing."""
        self.risen, self._at_reset = 0, self.current


@dataclass(slots=True)
class AllocatorCounters:
    """What the allocator has done; bytes, unless the name says otherwise."""

    allocated: Counter = field(default_factory=Counter)
    """In blocks that are handed out: what max_memory_allocated shows."""
    reserved: Counter = field(default_factory=Counter)
    """Taken from the card: what max_memory_reserved shows."""
    requested: Counter = field(default_factory=Counter)
    """As asked for, before any rounding, of the same blocks."""
    inactive_split: Counter = field(default_factory=Counter)
    """Free, in segments that other blocks keep from being given back; expandable segments are not counted."""
    num_segments: Counter = field(default_factory=Counter)
    """Segments from cudaMalloc; expandable segments are not counted."""
    num_allocations: Counter = field(default_factory=Counter)
    """Blocks that are handed out."""
    num_alloc_retries: int = 0
    """How often everything cached was given back for one request."""
    num_ooms: int = 0
    num_oom_rejections: int = 0
    """Refused at once for the allowed bytes (throw_on_cudamalloc_oom)."""
    num_sync_all_streams: int = 0
    num_device_alloc: int = 0
    """Calls that took memory from the card, and those that gave some back: each is slow on a real one."""
    num_device_free: int = 0

    def reset_peaks(self) -> None:
        """Let every peak start again from what there is now."""
        for counter in self._counters():
            counter.peak = counter.current

    def reset_accumulated(self) -> None:
        """Forget by how much numbers rose and fell, and how often things happened."""
        for counter in self._counters():
            counter.forget_changes()
        self.num_alloc_retries = self.num_ooms = self.num_oom_rejections = 0
        self.num_sync_all_streams = self.num_device_alloc = self.num_device_free = 0

    def _counters(self) -> tuple[Counter, ...]:
        return (
            self.allocated,
            self.reserved,
            self.requested,
            self.inactive_split,
            self.num_segments,
            self.num_allocations,
        )


_ADDRESS_BITS = 64


@dataclass(slots=True, eq=False, repr=False)
class Block:
    """A piece of a segment; what `malloc` returns. Only address, size and requested_size are for callers."""

    address: int
    size: int
    pool: BlockPool
    segment_start: int | None = None
    """Where its expandable segment begins; None in a segment from cudaMalloc."""
    mapped: bool = True
    requested_size: int = 0
    allocated: bool = False
    searches_at_insert: int = 0
    streams: frozenset[int] = frozenset()
    """Other streams that use it: freed, it is not free before they have passed."""
    waits: bool = False
    """Whether it was freed, and waits for them."""
    previous: Block | None = None
    next: Block | None = None

    def __repr__(self) -> str:
        return f"Block(address={self.address:#x}, size={self.size}, requested_size={self.requested_size})"

    @property
    def is_split(self) -> bool:
        """Does it share its segment with other blocks?"""
        return self.previous is not None or self.next is not None

    def cut_back(self, size: int) -> Block:
        """Make the last bytes a block of their own; this one keeps the rest."""
        self.size -= size
        back = Block(self.address + self.size, size, self.pool, segment_start=self.segment_start, mapped=self.mapped)
        back.previous, back.next = self, self.next
        if self.next is not None:
            self.next.previous = back
        self.next = back
        return back

    def swallow_neighbours(self) -> int:
        """Take in free neighbours that are mapped as it is, out of their pool; return how many bytes they had."""
        before = self.size
        neighbour = self.previous
        if neighbour is not None and not neighbour.allocated and neighbour.mapped == self.mapped:
            self.pool.remove(neighbour)
            self.address = neighbour.address
            self.size += neighbour.size
            self.previous = neighbour.previous
            if self.previous is not None:
                self.previous.next = self
        neighbour = self.next
        if neighbour is not None and not neighbour.allocated and neighbour.mapped == self.mapped:
            self.pool.remove(neighbour)
            self.size += neighbour.size
            self.next = neighbour.next
            if self.next is not None:
                self.next.previous = self
        return self.size - before


@dataclass(slots=True, eq=False)
class BlockPool:
    """The free blocks of one stream's segments of one kind, small or large."""

    is_small: bool
    stream: int = 0
    searches: int = 0
    """How often a block was looked for, counted only where cached blocks are collected by age."""
    # A key is the size above the address, one number: numbers are compared faster than pairs.
    _keys: list[int] = field(default_factory=list)
    _blocks: dict[int, Block] = field(default_factory=dict)
    _unmapped: list[int] = field(default_factory=list)

    def insert(self, block: Block) -> None:
        """Add a free block, or one that is not mapped."""
        keys, key = self._place_of(block)
        insort(keys, key)
        self._blocks[key] = block
        block.searches_at_insert = self.searches

    def remove(self, block: Block) -> None:
        """Take a block out, before anything about it changes."""
        keys, key = self._place_of(block)
        del keys[bisect_left(keys, key)]
        del self._blocks[key]

    def _place_of(self, block: Block) -> tuple[list[int], int]:
        if block.mapped:
            return self._keys, block.size << _ADDRESS_BITS | block.address
        return self._unmapped, block.address

    def best_fit(self, size: int) -> Block | None:
        """Return the smallest free block with at least `size` bytes.

        An expandable segment's last free block counts as large as it can grow, so that it is used up last.
        """
        keys = self._keys
        index = bisect_left(keys, size << _ADDRESS_BITS)
        if index == len(keys):
            return None
        block = self._blocks[keys[index]]
        if block.segment_start is not None:
            for at in range(index + 1, len(keys)):
                larger = self._blocks[keys[at]]
                if _size_when_grown(larger) >= _size_when_grown(block):
                    break
                block = larger
        return block

    def largest(self) -> Block | None:
        """Return the largest free block."""
        return self._blocks[self._keys[-1]] if self._keys else None

    def free_blocks(self) -> list[Block]:
        """Return the free blocks by size and address."""
        return [self._blocks[key] for key in self._keys]

    def unmapped_blocks(self) -> Iterator[Block]:
        """Return the unmapped blocks from the lowest address on."""
        return (self._blocks[address] for address in self._unmapped)


def _size_when_grown(block: Block) -> int:
    after = block.next
    return block.size + (after.size if after is not None and not after.mapped else 0)


_FIRST_ADDRESS = 0x7F00_0000_0000
UNLIMITED = 1 << 46
"""64 TiB stand for a card without a limit: more than any trace asks for, and addresses stay exact in a browser."""


@dataclass(slots=True)
class CardMemory:
    """What is left of a card.

    >>> card = CardMemory(6 << 20)
    >>> hex(card.allocate(3 << 20)), card.free >> 20
    ('0x7f0000000000', 2)
    >>> card.allocate(3 << 20) is None
    True
    """

    capacity: int
    _taken: int = 0
    _next_address: int = _FIRST_ADDRESS

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


class CardSegments:
    """Takes segments from a card and gives them back; `allowed` caps what is reserved at a time, in bytes."""

    def __init__(
        self,
        card: CardMemory,
        settings: AllocatorSettings,
        counters: AllocatorCounters,
        *,
        allowed: int | None,
        listener: Listener,
    ) -> None:
        self._card, self._settings, self._counters = card, settings, counters
        self._allowed, self._listener = allowed, listener
        self.collects = allowed is not None and settings.garbage_collection_threshold > 0.0
        """Are old cached segments given back before the card is asked?"""

    def passes_allowed(self, rounded: int) -> bool:
        """Would the segment pass the allowed bytes? Pages of expandable segments are not what is compared, as there."""
        segment = segment_size(rounded, self._settings)
        return self._allowed is not None and self._counters.reserved.current + segment > self._allowed

    def take(self, rounded: int, pool: BlockPool) -> Block | None:
        """Return a free block that is in no pool, large enough; None where there is no memory for it."""
        if self.passes_allowed(rounded):
            return None
        if self._settings.expandable_segments:
            return self._room_for(rounded, pool)
        size = segment_size(rounded, self._settings)
        address = self._card.allocate(size)
        if address is None:
            return None
        self._counters.num_segments.add(1)
        self._counters.reserved.add(size)
        self._counters.num_device_alloc += 1
        self._listener("segment_alloc", address, size)
        return Block(address, size, pool)

    def give_back_cached(self, pool: BlockPool) -> None:
        """Give back everything cached that no block in use holds on to."""
        for block in pool.free_blocks():
            if self._settings.expandable_segments:
                self._unmap(block)
            elif not block.is_split:
                self._give_back(block)

    def give_back_unsplittable(self, rounded: int, pool: BlockPool) -> bool:
        """Give back one cached block that is large enough, or else the largest ones until they add up to the request.

        Only blocks of max_split_size and more are looked at; they are segments of their own.
        """
        unsplittable = self._settings.max_split_size
        if unsplittable is None or self._settings.expandable_segments:
            return False
        needed = max(rounded, unsplittable)
        block = pool.best_fit(needed) or pool.largest()
        while block is not None and block.size >= unsplittable:
            self._give_back(block)
            needed -= block.size
            if needed <= 0:
                return True
            block = pool.largest()
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
            if not block.is_split and block.segment_start is None
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
        self._listener("segment_free", block.address, block.size)

    def _room_for(self, size: int, pool: BlockPool) -> Block | None:
        """Map pages, and return a free block of at least `size` bytes, out of its pool; None without memory."""
        block = self._place_for(size, pool)
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

    def _place_for(self, size: int, pool: BlockPool) -> Block:
        for unmapped in pool.unmapped_blocks():
            before = unmapped.previous
            place = before if before is not None and not before.allocated else unmapped
            if _has_room(place, size):
                return place
        page = self._page_of(pool)
        # An eighth more than the card, so that pages can move on to higher addresses.
        wanted = self._card.capacity + self._card.capacity // 8
        num_bytes = -(-wanted // page) * page
        start = self._card.reserve_addresses(num_bytes)
        block = Block(start, num_bytes, pool, segment_start=start, mapped=False)
        pool.insert(block)
        return block

    def _page_of(self, pool: BlockPool) -> int:
        return SMALL_SEGMENT if pool.is_small else self._settings.large_segment_size

    def _map(self, block: Block, size: int) -> bool:
        page = self._page_of(block.pool)
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
        self._listener("segment_map", address, mapped)
        return True

    def _unmap(self, block: Block) -> None:
        """Unmap the pages that a free block covers from end to end."""
        start, page = block.segment_start, self._page_of(block.pool)
        assert start is not None
        address = start + -(-(block.address - start) // page) * page
        size = start + (block.address + block.size - start) // page * page - address
        if size <= 0:
            return
        block.pool.remove(block)
        if block.address < address:
            before, block = block, block.cut_back(block.address + block.size - address)
            before.pool.insert(before)
        if block.size > size:
            block.pool.insert(block.cut_back(block.size - size))
        block.mapped = False
        block.swallow_neighbours()
        if block.is_split:  # otherwise its segment has no memory left, and is forgotten
            block.pool.insert(block)
        self._card.give_back(size)
        self._counters.reserved.subtract(size)
        self._counters.num_device_free += 1
        self._listener("segment_unmap", address, size)


def _has_room(block: Block | None, size: int) -> bool:
    while size > 0 and block is not None and not block.allocated:
        size -= block.size
        block = block.next
    return size <= 0
