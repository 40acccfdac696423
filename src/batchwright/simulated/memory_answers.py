"""What torch answers about the memory of a simulated card; `torch.cuda` and `torch.accelerator` ask one allocator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchwright.catalogue.gpus import context_of
from batchwright.simulated.memory_snapshot import History

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchwright.catalogue.gpus import Card
    from batchwright.simulated.caching_allocator import CachingAllocator

# As torch.cuda.memory_stats names them, and as the allocator does. No other stream ever uses a block here, so that
# blocks are active as long as they are allocated.
_FAMILIES = {
    "allocated_bytes": "allocated",
    "reserved_bytes": "reserved",
    "active_bytes": "active",
    "requested_bytes": "requested",
    "inactive_split_bytes": "inactive_split",
    "segment": "num_segments",
    "allocation": "num_allocations",
    "active": "num_allocations",
}
_COUNTS = (
    *("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free"),
    "num_oom_rejections",
)


def memory_answers(card: Card, allocator: CachingAllocator) -> dict[str, Callable[..., Any]]:
    """Return what each question about memory is answered with."""
    stats = allocator.stats
    return {
        "mem_get_info": lambda device=None: (_free(card, allocator), card.total_bytes),
        "get_memory_info": lambda device=None: (_free(card, allocator), card.total_bytes),
        "device_memory_used": lambda device=None: card.total_bytes - _free(card, allocator),
        "memory_allocated": lambda device=None: stats.allocated.current,
        "max_memory_allocated": lambda device=None: stats.allocated.peak,
        "memory_reserved": lambda device=None: stats.reserved.current,
        "max_memory_reserved": lambda device=None: stats.reserved.peak,
        "memory_stats": lambda device=None: _memory_stats(allocator),
        "memory_stats_as_nested_dict": lambda device=None: _nested(_memory_stats(allocator)),
        "memory_summary": lambda device=None, abbreviated=False: _summary(card, allocator),
        "memory_snapshot": lambda mempool_id=None, include_traces=True: History().snapshot(allocator)["segments"],
        "_snapshot": lambda device=None, augment_with_fx_traces=False: History().snapshot(allocator),
        "reset_peak_memory_stats": lambda device=None: allocator.reset_peaks(),
        "reset_accumulated_memory_stats": lambda device=None: stats.reset_accumulated(),
        "get_allocator_backend": lambda: "native",
        "empty_cache": allocator.empty_cache,
    }


def _free(card: Card, allocator: CachingAllocator) -> int:
    """What nobody has taken; of a card with room to spare, no more than there is."""
    left = card.total_bytes - context_of(card).typical_bytes - allocator.stats.reserved.current
    return max(min(allocator.free_on_card, left), 0)


def _summary(card: Card, allocator: CachingAllocator) -> str:
    told = "\n".join(f"{name}: {number:,}" for name, number in _memory_stats(allocator).items())
    return f"{card.product}, simulated\n{told}"


def _memory_stats(allocator: CachingAllocator) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, ours in _FAMILIES.items():
        counter = getattr(allocator.stats, ours)
        found[f"{name}.all.current"], found[f"{name}.all.peak"] = counter.current, counter.peak
        found[f"{name}.all.allocated"], found[f"{name}.all.freed"] = counter.risen, counter.fallen
    return found | {name: getattr(allocator.stats, name) for name in _COUNTS}


def _nested(stats: dict[str, int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, number in stats.items():
        *path, last = name.split(".")
        place = found
        for part in path:
            place = place.setdefault(part, {})
        place[last] = number
    return found
