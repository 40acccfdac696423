"""Blocks of memory, in the order of their addresses, and the pool that keeps the free ones ready for the best fit.

A segment is a chain of blocks. A block is handed out, waiting for other streams, free (in its pool), or, in an
expandable segment, not mapped: addresses without memory.

Promises:
- two free neighbours are never left apart, nor two unmapped ones;
- of the free blocks of a stream that are large enough, the smallest is found first, and of equal ones that with
  the lowest address.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchwright.simulated.allocator.segments import ExpandableSegment


class Counter:
    """A number with its peak, and by how much it ever rose and fell.

    >>> counter = Counter()
    >>> counter.add(3); counter.subtract(1); counter
    Counter(current=2, peak=3)
    """

    __slots__ = ("_at_reset", "current", "peak", "risen")

    def __init__(self) -> None:
        self.current = 0
        self.peak = 0
        self.risen = 0
        self._at_reset = 0

    def __repr__(self) -> str:
        return f"Counter(current={self.current}, peak={self.peak})"

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
    active: Counter = field(default_factory=Counter)
    """The same, and blocks that were freed and wait for other streams."""
    reserved: Counter = field(default_factory=Counter)
    """Taken from the card: what max_memory_reserved shows."""
    requested: Counter = field(default_factory=Counter)
    """As asked for, before any rounding, of the active blocks."""
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
            self.active,
            self.reserved,
            self.requested,
            self.inactive_split,
            self.num_segments,
            self.num_allocations,
        )


_ADDRESS_BITS = 64


class Block:
    """A piece of a segment; what `malloc` returns. Only address, size, requested_size and stream are for callers."""

    __slots__ = (
        "address",
        "allocated",
        "events",
        "expandable",
        "mapped",
        "next",
        "pool",
        "previous",
        "requested_size",
        "searches_at_insert",
        "size",
        "stream",
        "used_on",
    )

    def __init__(
        self,
        address: int,
        size: int,
        stream: int,
        pool: BlockPool,
        *,
        expandable: ExpandableSegment | None = None,
        mapped: bool = True,
    ) -> None:
        self.address = address
        self.size = size
        self.stream = stream
        self.pool = pool
        self.expandable = expandable
        self.mapped = mapped
        self.requested_size = 0
        self.allocated = False
        self.used_on: set[int] | None = None
        """Other streams that its holder used it on; None for none, as almost always."""
        self.events = 0
        """Streams that it still waits for after it was freed."""
        self.searches_at_insert = 0
        self.previous: Block | None = None
        self.next: Block | None = None

    def __repr__(self) -> str:
        return f"Block(address={self.address:#x}, size={self.size}, requested_size={self.requested_size})"

    @property
    def is_split(self) -> bool:
        """Does it share its segment with other blocks?"""
        return self.previous is not None or self.next is not None

    @property
    def is_free(self) -> bool:
        """Is it neither handed out nor waited for? An unmapped block counts."""
        return not self.allocated and not self.events

    def cut_front(self, size: int) -> Block:
        """Make the first bytes a block of their own; this one keeps the rest."""
        front = Block(self.address, size, self.stream, self.pool, expandable=self.expandable, mapped=self.mapped)
        front.previous, front.next = self.previous, self
        if self.previous is not None:
            self.previous.next = front
        self.previous = front
        self.address += size
        self.size -= size
        return front

    def cut_back(self, size: int) -> Block:
        """Make the last bytes a block of their own; this one keeps the rest."""
        self.size -= size
        address = self.address + self.size
        back = Block(address, size, self.stream, self.pool, expandable=self.expandable, mapped=self.mapped)
        back.previous, back.next = self, self.next
        if self.next is not None:
            self.next.previous = back
        self.next = back
        return back

    def swallow_neighbours(self) -> int:
        """Take in free neighbours that are mapped as it is, out of their pool; return how many bytes they had."""
        before = self.size
        neighbour = self.previous
        if neighbour is not None and neighbour.is_free and neighbour.mapped == self.mapped:
            self.pool.remove(neighbour)
            self.address = neighbour.address
            self.size += neighbour.size
            self.previous = neighbour.previous
            if self.previous is not None:
                self.previous.next = self
        neighbour = self.next
        if neighbour is not None and neighbour.is_free and neighbour.mapped == self.mapped:
            self.pool.remove(neighbour)
            self.size += neighbour.size
            self.next = neighbour.next
            if self.next is not None:
                self.next.previous = self
        return self.size - before


class BlockPool:
    """The free blocks of one kind of segment, small or large; those of a stream serve only that stream."""

    __slots__ = ("_blocks", "_keys", "_unmapped", "is_small", "searches")

    def __init__(self, *, is_small: bool) -> None:
        self.is_small = is_small
        self.searches = 0
        """How often a block was looked for, counted only where cached blocks are collected by age."""
        # A key is the size above the address, one number: numbers are compared faster than pairs.
        self._keys: dict[int, list[int]] = {}
        self._blocks: dict[int, Block] = {}
        self._unmapped: dict[int, list[int]] = {}

    def insert(self, block: Block) -> None:
        """Add a free block, or one that is not mapped."""
        if not block.mapped:
            insort(self._unmapped.setdefault(block.stream, []), block.address)
            self._blocks[block.address] = block
            return
        key = block.size << _ADDRESS_BITS | block.address
        keys = self._keys.get(block.stream)
        if keys is None:
            keys = self._keys[block.stream] = []
        insort(keys, key)
        self._blocks[key] = block
        block.searches_at_insert = self.searches

    def remove(self, block: Block) -> None:
        """Take a block out, before anything about it changes."""
        if block.mapped:
            key, keys = block.size << _ADDRESS_BITS | block.address, self._keys[block.stream]
        else:
            key, keys = block.address, self._unmapped[block.stream]
        del keys[bisect_left(keys, key)]
        del self._blocks[key]

    def best_fit(self, size: int, stream: int) -> Block | None:
        """Return the smallest free block of the stream with at least `size` bytes.

        An expandable segment's last free block counts as large as it can grow, so that it is used up last.
        """
        keys = self._keys.get(stream)
        if not keys:
            return None
        index = bisect_left(keys, size << _ADDRESS_BITS)
        if index == len(keys):
            return None
        block = self._blocks[keys[index]]
        if block.expandable is not None:
            for at in range(index + 1, len(keys)):
                larger = self._blocks[keys[at]]
                if _size_when_grown(larger) >= _size_when_grown(block):
                    break
                block = larger
        return block

    def largest(self, stream: int) -> Block | None:
        """Return the largest free block of a stream."""
        keys = self._keys.get(stream)
        return self._blocks[keys[-1]] if keys else None

    def free_blocks(self) -> list[Block]:
        """Return the free blocks by stream, size and address."""
        return [self._blocks[key] for stream in sorted(self._keys) for key in self._keys[stream]]

    def unmapped_blocks(self, stream: int) -> Iterator[Block]:
        """Return the unmapped blocks of a stream from the lowest address on."""
        return (self._blocks[address] for address in self._unmapped.get(stream, ()))


def _size_when_grown(block: Block) -> int:
    after = block.next
    return block.size + (after.size if after is not None and not after.mapped else 0)
