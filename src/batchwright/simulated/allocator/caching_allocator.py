"""PyTorch's CUDA caching allocator without a card: the same blocks, the same bytes, the same out-of-memory.

Follows c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.13 for everything outside of graphs and private pools.

Promises:
- what a sequence of calls reserves, allocates and cannot get is, byte for byte, what the real allocator would on a card
  whose cudaMalloc hands out `capacity` bytes in whole granules of 2 MiB; the same calls give the same addresses;
- an event of another stream is complete only after `complete_events`, or where the real one waits for it;
- in a snapshot the blocks of a segment follow one another without a gap and add up to it. A stretch of mapped pages of
  an expandable segment is a segment of its own, as in PyTorch's. The requested size of a block that is not active is 0
  (PyTorch leaves there what its last holder asked for);
- what a run asked for is kept as plain numbers (`Requests`) and can be asked again of another card: the kernels of a
  step depend on a card's generation, not on its memory, so one trace answers for every card of a kind.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchwright.errors import InvalidInputError
from batchwright.simulated.allocator.blocks import AllocatorCounters, Block, BlockPool
from batchwright.simulated.allocator.segments import (
    LARGEST_REQUEST,
    LARGEST_SMALL,
    SMALLEST_BLOCK,
    UNLIMITED,
    CardMemory,
    CardSegments,
    Request,
    rounded_size,
    segment_size,
)
from batchwright.simulated.allocator.settings import AllocatorSettings

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from batchwright.simulated.allocator.segments import Listener


@dataclass(frozen=True)
class BlockRecord:
    """A block as a snapshot shows it."""

    address: int
    size: int
    requested_size: int
    state: str
    """active_allocated, active_pending_free (waits for other streams) or inactive."""


@dataclass(frozen=True)
class SegmentRecord:
    """A segment as a snapshot shows it."""

    address: int
    total_size: int
    stream: int
    segment_type: str
    """small or large."""
    is_expandable: bool
    blocks: tuple[BlockRecord, ...]

    @property
    def allocated_size(self) -> int:
        """Bytes in blocks that are handed out."""
        return sum(block.size for block in self.blocks if block.state == "active_allocated")

    @property
    def active_size(self) -> int:
        """The same, and those of blocks that wait for other streams."""
        return sum(block.size for block in self.blocks if block.state != "inactive")

    @property
    def requested_size(self) -> int:
        """Bytes asked for, in active blocks."""
        return sum(block.requested_size for block in self.blocks)


def segments_of(blocks: Iterable[Block]) -> list[SegmentRecord]:
    """Return the segments that these blocks are all of, by address."""
    heads = [block for block in blocks if block.previous is None or not block.previous.mapped]
    return [_segment(head) for head in sorted(heads, key=lambda block: block.address)]


def _segment(head: Block) -> SegmentRecord:
    records: list[BlockRecord] = []
    block: Block | None = head
    while block is not None and block.mapped:
        records.append(_record(block))
        block = block.next
    return SegmentRecord(
        address=head.address,
        total_size=sum(record.size for record in records),
        stream=head.stream,
        segment_type="small" if head.pool.is_small else "large",
        is_expandable=head.expandable is not None,
        blocks=tuple(records),
    )


def _record(block: Block) -> BlockRecord:
    state = "active_allocated" if block.allocated else "active_pending_free" if block.events else "inactive"
    return BlockRecord(block.address, block.size, 0 if state == "inactive" else block.requested_size, state)


_DEFAULTS = AllocatorSettings()


class SimulatedOutOfMemory(Exception):  # noqa: N818 - what the card ran into, not a mistake of the caller
    """The card has no room, after everything that could be given back was; all numbers are bytes."""

    def __init__(self, requested: int, allocated: int, reserved: int, free: int, capacity: int) -> None:
        self.requested = requested
        self.allocated = allocated
        self.reserved = reserved
        self.free = free
        self.capacity = capacity
        super().__init__(
            f"{requested:,} bytes asked for, {free:,} of {capacity:,} free; "
            f"{allocated:,} allocated, {reserved:,} reserved"
        )


class CachingAllocator:
    """The allocator of one simulated card.

    >>> allocator = CachingAllocator(capacity=64 << 20)
    >>> weights = allocator.malloc(3_000_000)
    >>> allocator.stats.allocated.current, allocator.stats.reserved.current
    (3000320, 20971520)
    >>> allocator.free(weights)
    >>> allocator.stats.allocated, allocator.stats.reserved
    (Counter(current=0, peak=3000320), Counter(current=20971520, peak=20971520))

    `capacity` is what cudaMalloc can hand out, None for no limit; `memory_fraction` is the cap that
    set_per_process_memory_fraction puts on reserved memory, in bytes. `listener(action, address, size, stream)` hears
    what a memory history records: alloc, free_requested, free_completed, segment_alloc, segment_free, segment_map,
    segment_unmap, and oom, whose address is the number of free bytes.
    """

    def __init__(
        self,
        capacity: int | None,
        settings: AllocatorSettings = _DEFAULTS,
        memory_fraction: int | None = None,
        *,
        listener: Listener | None = None,
    ) -> None:
        self.settings = settings
        self.stats = AllocatorCounters()
        self._listener = listener
        self._card = CardMemory(UNLIMITED if capacity is None else capacity)
        self._segments = CardSegments(self._card, settings, self.stats, allowed=memory_fraction, listener=listener)
        self._small = BlockPool(is_small=True)
        self._large = BlockPool(is_small=False)
        self._nothing = Block(0, 0, 0, self._small)
        self._active: dict[int, Block] = {}
        self._waiting: dict[int, deque[Block]] = {}
        """Freed blocks by the streams whose events they wait for, oldest first."""
        self._completed: dict[int, int] = {}
        """How many of them are no longer waited for, not yet noticed."""

    @property
    def free_on_card(self) -> int:
        """Bytes that cudaMalloc could still hand out: what torch.cuda.mem_get_info shows as free."""
        return self._card.free

    def malloc(self, size: int, stream: int = 0) -> Block:
        """Hand out a block, or raise SimulatedOutOfMemory; 0 bytes are no block at all, with address 0."""
        if size <= 0 or size >= LARGEST_REQUEST:
            return self._without_a_block(size)
        if self._completed:
            self._free_completed()
        rounded = rounded_size(size, self.settings)
        pool = self._small if rounded <= LARGEST_SMALL else self._large
        block = self._cached(rounded, stream, pool)
        if block is None:
            segment = segment_size(rounded, self.settings)
            block = self._from_the_card(Request(size, rounded, segment, stream, pool))
        return self._hand_out(block, rounded, size)

    def free(self, block: Block) -> None:
        """Take a block back; one that other streams used stays active until their events are complete."""
        if block is self._nothing:
            return
        self._check_handed_out(block)
        block.allocated = False
        self.stats.allocated.subtract(block.size)
        self.stats.num_allocations.subtract(1)
        if self._listener is not None:
            self._listener("free_requested", block.address, block.requested_size, block.stream)
        if block.used_on is None:
            self._free_block(block)
            return
        block.events = len(block.used_on)
        for stream in block.used_on:
            self._waiting.setdefault(stream, deque()).append(block)
        block.used_on = None

    def use_on_stream(self, block: Block, stream: int) -> None:
        """Tell that another stream works on the block: Tensor.record_stream."""
        if block is self._nothing:
            return
        self._check_handed_out(block)
        if stream != block.stream:
            block.used_on = {stream} | (block.used_on or set())

    def complete_events(self, stream: int | None = None) -> None:
        """Let a stream, or all, reach what was freed so far; the blocks come back with the next malloc, as there."""
        for name, blocks in self._waiting.items():
            if stream is None or stream == name:
                self._completed[name] = len(blocks)

    def empty_cache(self) -> None:
        """Give back to the card what is cached and not split, after waiting for every stream."""
        self.stats.num_sync_all_streams += 1
        self.complete_events()
        self._free_completed()
        self._segments.give_back_cached(self._large)
        self._segments.give_back_cached(self._small)

    def reset_peaks(self) -> None:
        """Let every peak start again from what there is now."""
        self.stats.reset_peaks()

    def segments(self) -> list[SegmentRecord]:
        """Return every segment with its blocks, by address."""
        return segments_of([*self._active.values(), *self._small.free_blocks(), *self._large.free_blocks()])

    def _cached(self, rounded: int, stream: int, pool: BlockPool) -> Block | None:
        if self._segments.collects:
            pool.searches += 1
        block = pool.best_fit(rounded, stream)
        if block is None:
            return None
        unsplittable = self.settings.max_split_size
        if unsplittable is not None:
            # A block too large to be split is kept for requests that are too, and then only if it is not much larger.
            if rounded < unsplittable <= block.size:
                return None
            if rounded >= unsplittable and block.size >= rounded + self.settings.largest_slack:
                return None
        pool.remove(block)
        return block

    def _from_the_card(self, request: Request) -> Block:
        if self._segments.collects:
            self._segments.collect_old(self._large)
        block = self._taken(request)
        if block is None and self._segments.give_back_unsplittable(request):
            block = self._taken(request)
        if block is None:
            self.empty_cache()
            self.stats.num_alloc_retries += 1
            # PyTorch 2.13 does not look into the pool again, though a block that was waited for may fit now.
            block = self._taken(request)
        if block is None:
            self.stats.num_ooms += 1
            if self._listener is not None:
                self._listener("oom", self._card.free, request.rounded, request.stream)
            raise self._out_of_memory(request.size)
        return block

    def _taken(self, request: Request) -> Block | None:
        if self.settings.throw_on_cudamalloc_oom and self._segments.passes_allowed(request):
            self.stats.num_oom_rejections += 1
            raise self._out_of_memory(request.size)
        return self._segments.take(request)

    def _hand_out(self, block: Block, rounded: int, size: int) -> Block:
        stats = self.stats
        was_split = block.is_split
        if self._is_worth_splitting(block, rounded):
            rest, block = block, block.cut_front(rounded)
            rest.pool.insert(rest)
            if block.expandable is None:
                if was_split:
                    stats.inactive_split.subtract(rounded)
                else:
                    stats.inactive_split.add(rest.size)
        elif was_split and block.expandable is None:
            stats.inactive_split.subtract(block.size)
        block.allocated = True
        block.requested_size = size
        self._active[block.address] = block
        stats.allocated.add(block.size)
        stats.num_allocations.add(1)
        stats.active.add(block.size)
        stats.requested.add(size)
        if self._listener is not None:
            self._listener("alloc", block.address, size, block.stream)
        return block

    def _is_worth_splitting(self, block: Block, rounded: int) -> bool:
        rest = block.size - rounded
        if block.pool.is_small or block.expandable is not None:
            return rest >= SMALLEST_BLOCK
        unsplittable = self.settings.max_split_size
        return rest > LARGEST_SMALL and (unsplittable is None or rounded < unsplittable)

    def _free_block(self, block: Block) -> None:
        stats = self.stats
        size = block.size
        del self._active[block.address]
        if self._listener is not None:
            self._listener("free_completed", block.address, block.requested_size, block.stream)
        swallowed = block.swallow_neighbours()
        block.pool.insert(block)
        if block.expandable is None:
            if block.is_split:
                stats.inactive_split.add(size)
            else:
                stats.inactive_split.subtract(swallowed)
        stats.active.subtract(size)
        stats.requested.subtract(block.requested_size)

    def _free_completed(self) -> None:
        # By stream number: the real order is that of a hash table, and only the history shows it.
        for stream in sorted(self._completed):
            blocks = self._waiting[stream]
            for _ in range(self._completed[stream]):
                block = blocks.popleft()
                block.events -= 1
                if not block.events:
                    self._free_block(block)
            if not blocks:
                del self._waiting[stream]
        self._completed.clear()

    def _check_handed_out(self, block: Block) -> None:
        if not block.allocated or self._active.get(block.address) is not block:
            raise InvalidInputError(f"{block!r} was not handed out by this allocator, or was freed before.")

    def _without_a_block(self, size: int) -> Block:
        if size < 0:
            raise InvalidInputError(f"{size} bytes were asked for; 0 and more are allowed.")
        if size:
            raise self._out_of_memory(size)
        return self._nothing

    def _out_of_memory(self, size: int) -> SimulatedOutOfMemory:
        stats, card = self.stats, self._card
        return SimulatedOutOfMemory(size, stats.allocated.current, stats.reserved.current, card.free, card.capacity)


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

    >>> from batchwright.simulated.allocator.settings import AllocatorSettings
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

    >>> from batchwright.simulated.allocator.settings import AllocatorSettings
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
