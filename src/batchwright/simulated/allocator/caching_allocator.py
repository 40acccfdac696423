"""PyTorch's CUDA caching allocator without a card: the same blocks, the same bytes, the same out-of-memory.

Follows c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.13 for everything outside of graphs and private pools.

Promises:
- what a sequence of calls reserves, allocates and cannot get is, byte for byte, what the real allocator would on a card
  whose cudaMalloc hands out `capacity` bytes in whole granules of 2 MiB; the same calls give the same addresses;
- in a snapshot the blocks of a segment follow one another without a gap and add up to it. A stretch of mapped pages of
  an expandable segment is a segment of its own, as in PyTorch's. The requested size of a block that is not active is 0
  (PyTorch leaves there what its last holder asked for). Where a real one has stack frames, this one has the module and
  the operator that asked; pytorch.org/memory_viz and `torch.cuda._memory_viz` read it;
- what a run asked for is kept as plain numbers (`Requests`) and can be asked again of another card: the kernels of a
  step depend on a card's generation, not on its memory, so one trace answers for every card of a kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchwright.errors import InvalidInputError
from batchwright.simulated.allocator.segments import (
    LARGEST_REQUEST,
    LARGEST_SMALL,
    SMALLEST_BLOCK,
    UNLIMITED,
    AllocatorCounters,
    Block,
    BlockPool,
    CardMemory,
    CardSegments,
    Listener,
    rounded_size,
)
from batchwright.simulated.allocator.settings import AllocatorSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchwright.device.device import Owner


_DEFAULTS = AllocatorSettings()

# The host runs ahead of the card until the queue of launches is full: about as many as the CUDA driver queues.
FARTHEST_AHEAD = 1024


class SimulatedOutOfMemory(Exception):  # noqa: N818 - what the card ran into, not a mistake of the caller
    """The card has no room, after everything that could be given back was; all numbers are bytes."""

    def __init__(self, requested: int, allocated: int, reserved: int, free: int, capacity: int) -> None:
        self.requested, self.allocated, self.reserved = requested, allocated, reserved
        self.free, self.capacity = free, capacity
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
    set_per_process_memory_fraction puts on reserved memory, in bytes. `listener(action, address, size)` hears what a
    memory history records: alloc, free_requested, free_completed, segment_alloc, segment_free, segment_map,
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
        self._listener = listener or (lambda *_: None)
        self._card = CardMemory(UNLIMITED if capacity is None else capacity)
        self._segments = CardSegments(
            self._card, settings, self.stats, allowed=memory_fraction, listener=self._listener
        )
        self.stream = 0
        """The stream that work is queued on just now; blocks are handed out from its own pools."""
        self._pools: dict[tuple[int, bool], BlockPool] = {}
        self._nothing = Block(0, 0, self._pool(is_small=True))
        self._active: dict[int, Block] = {}
        self.num_launched = 0
        self._waiting: dict[int, tuple[int, Block]] = {}
        self.when_passed: Callable[[Block], object] = lambda _: None
        """Told of each block that was freed earlier, and is free for others now."""

    @property
    def is_limited(self) -> bool:
        """Whether the card can run out of memory."""
        return self._card.capacity < UNLIMITED

    @property
    def free_on_card(self) -> int:
        """Bytes that cudaMalloc could still hand out: what torch.cuda.mem_get_info shows as free."""
        return self._card.free

    def malloc(self, size: int) -> Block:
        """Hand out a block, or raise SimulatedOutOfMemory; 0 bytes are no block at all, with address 0."""
        if not size:
            return self._nothing
        if size >= LARGEST_REQUEST:
            raise self._out_of_memory(size)
        rounded = rounded_size(size, self.settings)
        pool = self._pool(is_small=rounded <= LARGEST_SMALL)
        block = self._cached(rounded, pool) or self._from_the_card(size, rounded, pool)
        return self._hand_out(block, rounded, size)

    def free(self, block: Block) -> None:
        """Take a block back; one that another stream uses is free for others once that stream has passed."""
        if block is self._nothing:
            return
        if not block.allocated or self._active.get(block.address) is not block:
            raise InvalidInputError(f"{block!r} was not handed out by this allocator, or was freed before.")
        del self._active[block.address]
        self._listener("free_requested", block.address, block.requested_size)
        self.stats.allocated.subtract(block.size)
        self.stats.num_allocations.subtract(1)
        if block.streams:
            block.waits = True
            self._waiting[block.address] = (self.num_launched, block)
        else:
            self._take_in(block)

    def _take_in(self, block: Block) -> None:
        stats = self.stats
        size = block.size
        block.allocated = block.waits = False
        block.streams = frozenset()
        self._listener("free_completed", block.address, block.requested_size)
        stats.requested.subtract(block.requested_size)
        swallowed = block.swallow_neighbours()
        block.pool.insert(block)
        if block.segment_start is None:
            if block.is_split:
                stats.inactive_split.add(size)
            else:
                stats.inactive_split.subtract(swallowed)

    def record_stream(self, block: Block, stream: int) -> None:
        """Note that work queued on a stream uses a block, as `Tensor.record_stream` does."""
        if stream != block.pool.stream and block is not self._nothing:
            block.streams |= {stream}

    def launched(self) -> None:
        """Note that an operator was launched: what was queued long before it has passed."""
        self.num_launched += 1
        if self._waiting:
            self.passed(self.num_launched - FARTHEST_AHEAD)

    def passed(self, number: int | None = None) -> None:
        """Take in what waits for operators up to a number; by default for any, as the host waited for the card."""
        for address, (queued, block) in list(self._waiting.items()):
            if number is None or queued <= number:
                del self._waiting[address]
                self._take_in(block)
                self.when_passed(block)

    def passed_block(self, block: Block) -> None:
        """Take in one block that waits, if it still does."""
        if self._waiting.get(block.address, (0, None))[1] is block:
            del self._waiting[block.address]
            self._take_in(block)

    def empty_cache(self) -> None:
        """Give back to the card what is cached and not split, once all streams have passed."""
        self.passed()
        self.stats.num_sync_all_streams += 1
        for pool in self._pools_by_size():
            self._segments.give_back_cached(pool)

    def segments(self) -> list[dict[str, Any]]:
        """Return every segment with its blocks, by address, as `torch.cuda.memory_snapshot` does; without frames."""
        waiting = [block for _, block in self._waiting.values()]
        blocks = [
            *self._active.values(),
            *waiting,
            *(block for pool in self._pools.values() for block in pool.free_blocks()),
        ]
        heads = [block for block in blocks if block.previous is None or not block.previous.mapped]
        return [_segment_from(head) for head in sorted(heads, key=lambda block: block.address)]

    def _pool(self, *, is_small: bool) -> BlockPool:
        key = (self.stream, is_small)
        if key not in self._pools:
            self._pools[key] = BlockPool(is_small, self.stream)
        return self._pools[key]

    def _pools_by_size(self) -> list[BlockPool]:
        return sorted(self._pools.values(), key=lambda pool: pool.is_small)

    def _cached(self, rounded: int, pool: BlockPool) -> Block | None:
        if self._segments.collects:
            pool.searches += 1
        block = pool.best_fit(rounded)
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

    def _from_the_card(self, size: int, rounded: int, pool: BlockPool) -> Block:
        if self._segments.collects:
            for cached in self._pools_by_size():
                if not cached.is_small:
                    self._segments.collect_old(cached)
        block = self._taken(size, rounded, pool)
        if block is None and self._segments.give_back_unsplittable(rounded, pool):
            block = self._taken(size, rounded, pool)
        if block is None:
            self.empty_cache()
            self.stats.num_alloc_retries += 1
            block = self._taken(size, rounded, pool)
        if block is None:
            self.stats.num_ooms += 1
            self._listener("oom", self._card.free, rounded)
            raise self._out_of_memory(size)
        return block

    def _taken(self, size: int, rounded: int, pool: BlockPool) -> Block | None:
        if self.settings.throw_on_cudamalloc_oom and self._segments.passes_allowed(rounded):
            self.stats.num_oom_rejections += 1
            raise self._out_of_memory(size)
        return self._segments.take(rounded, pool)

    def _hand_out(self, block: Block, rounded: int, size: int) -> Block:
        stats = self.stats
        was_split = block.is_split
        if self._is_worth_splitting(block, rounded):
            rest = block.cut_back(block.size - rounded)
            rest.pool.insert(rest)
            if block.segment_start is None:
                if was_split:
                    stats.inactive_split.subtract(rounded)
                else:
                    stats.inactive_split.add(rest.size)
        elif was_split and block.segment_start is None:
            stats.inactive_split.subtract(block.size)
        block.allocated = True
        block.requested_size = size
        self._active[block.address] = block
        stats.allocated.add(block.size)
        stats.num_allocations.add(1)
        stats.requested.add(size)
        self._listener("alloc", block.address, size)
        return block

    def _is_worth_splitting(self, block: Block, rounded: int) -> bool:
        rest = block.size - rounded
        if block.pool.is_small or block.segment_start is not None:
            return rest >= SMALLEST_BLOCK
        unsplittable = self.settings.max_split_size
        return rest > LARGEST_SMALL and (unsplittable is None or rounded < unsplittable)

    def _out_of_memory(self, size: int) -> SimulatedOutOfMemory:
        stats, card = self.stats, self._card
        return SimulatedOutOfMemory(size, stats.allocated.current, stats.reserved.current, card.free, card.capacity)


def _state_of(block: Block) -> str:
    if block.waits:
        return "active_pending_free"
    return "active_allocated" if block.allocated else "inactive"


def _segment_from(head: Block) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    block: Block | None = head
    while block is not None and block.mapped:
        blocks.append(
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested_size if block.allocated else 0,
                "state": _state_of(block),
                "frames": [],
            }
        )
        block = block.next
    allocated = sum(record["size"] for record in blocks if record["state"] == "active_allocated")
    return {
        "device": 0,
        "address": head.address,
        "total_size": sum(record["size"] for record in blocks),
        "allocated_size": allocated,
        "active_size": sum(record["size"] for record in blocks if record["state"] != "inactive"),
        "requested_size": sum(record["requested_size"] for record in blocks),
        "stream": head.pool.stream,
        "segment_type": "small" if head.pool.is_small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": head.segment_start is not None,
        "frames": [],
        "blocks": blocks,
    }


class History:
    """What the allocator did, in order, and for whom."""

    def __init__(self) -> None:
        self.owner: Owner = ("", "", "")
        self._entries: list[dict[str, Any]] = []
        self._owners: dict[int, Owner] = {}

    def listen(self, action: str, address: int, size: int) -> None:
        """Note one event of the allocator."""
        if action == "alloc":
            self._owners[address] = self.owner
        owner = self._owners.get(address, self.owner)
        place = "device_free" if action == "oom" else "addr"
        # The official viewer draws by order; a time that rises is all it needs.
        self._entries.append(
            {
                "action": action,
                place: address,
                "size": size,
                "stream": 0,
                "frames": _frames(owner),
                "time_us": len(self._entries),
            }
        )

    def snapshot(self, allocator: CachingAllocator) -> dict[str, Any]:
        """Return what `torch.cuda.memory._snapshot()` would."""
        segments = allocator.segments()
        for block in (block for segment in segments for block in segment["blocks"]):
            block["frames"] = _frames(self._owners.get(block["address"], ("", "", "")))
        settings = allocator.settings
        return {
            "segments": segments,
            "device_traces": [self._entries],
            "allocator_settings": {
                "PYTORCH_CUDA_ALLOC_CONF": "",
                "max_split_size": -1 if settings.max_split_size is None else settings.max_split_size,
                "garbage_collection_threshold": settings.garbage_collection_threshold,
                "expandable_segments": settings.expandable_segments,
                "pinned_num_register_threads": 1,
                "release_lock_on_cudamalloc": False,
                "pinned_use_cuda_host_register": False,
                "roundup_power2_divisions": {},
            },
            "external_annotations": [],
        }


def _frames(owner: Owner) -> list[dict[str, Any]]:
    operator, module, phase = owner
    frames = [(operator, module), (phase, "")]
    return [{"name": name, "filename": place or "step", "line": 0} for name, place in frames if name]


# An allocation's stream stands above its size in one number, so that lines through the numbers of two runs keep it.
_STREAM_BITS = 48


def size_and_stream(event: int) -> tuple[int, int]:
    """Take an allocation among requests apart.

    >>> size_and_stream(512), size_and_stream((3 << 48) + 512)
    ((512, 0), (512, 3))
    """
    return event & ((1 << _STREAM_BITS) - 1), event >> _STREAM_BITS


# Beyond every number of an allocation: what was freed and waits for a stream; twice as far, what has waited.
_WAITS = 1 << 60
_ANOTHER = frozenset((-1,))


class Requests:
    """Allocations in order, by their size and stream, and what was freed, by the number of its allocation."""

    def __init__(self) -> None:
        self.events: list[int] = []
        self._numbers: dict[int, int] = {}
        self._count = 0

    def took(self, block: Block, num_bytes: int) -> None:
        """Note an allocation."""
        self._numbers[id(block)] = self._count
        self._count += 1
        self.events.append(num_bytes + (block.pool.stream << _STREAM_BITS))

    def gave_back(self, block: Block) -> None:
        """Note what was freed, and whether it waits for another stream."""
        number = self._numbers.get(id(block)) if block.streams else self._numbers.pop(id(block), None)
        if number is not None:
            self.events.append(-1 - number - (_WAITS if block.streams else 0))

    def passed(self, block: Block) -> None:
        """Note that what was freed before is free for others."""
        number = self._numbers.pop(id(block), None)
        if number is not None:
            self.events.append(-1 - number - 2 * _WAITS)


def goes_through(events: Sequence[int], capacity: int, settings: AllocatorSettings, total_bytes: int) -> bool:
    """Whether a run's requests can all be met on a card that hands out so many bytes.

    >>> from batchwright.simulated.allocator.settings import AllocatorSettings
    >>> events = [30 << 20, -1, 40 << 20]  # freed before the second is asked for
    >>> [goes_through(events, mib << 20, AllocatorSettings(), mib << 20) for mib in (38, 40, 70)]
    [False, True, True]
    """
    return peaks_within(events, capacity, settings, total_bytes) is not None


def peaks_within(
    events: Sequence[int], capacity: int, settings: AllocatorSettings, total_bytes: int
) -> tuple[int, int] | None:
    """Return the allocated and the reserved peak of a run's requests; None if they cannot all be met.

    >>> from batchwright.simulated.allocator.settings import AllocatorSettings
    >>> peaks_within([30 << 20, -1, 40 << 20], 40 << 20, AllocatorSettings(), 40 << 20) == (40 << 20, 40 << 20)
    True
    """
    allocator = CachingAllocator(capacity, settings, settings.allowed_bytes(total_bytes))
    try:
        _replay(events, allocator)
    except SimulatedOutOfMemory:
        return None
    return allocator.stats.allocated.peak, allocator.stats.reserved.peak


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
            size, allocator.stream = size_and_stream(event)
            blocks.append(allocator.malloc(size))
            continue
        what, number = divmod(-1 - event, _WAITS)
        if what == 1:
            blocks[number].streams = _ANOTHER
        if what < 2:
            allocator.free(blocks[number])
        else:
            allocator.passed_block(blocks[number])
