"""The predicted run as PyTorch's own memory snapshot, for pytorch.org/memory_viz and `torch.cuda._memory_viz`.

Promises:
- segments, blocks and history are those of the replayed allocator, event by event;
- where a real snapshot has stack frames, this one has the module and the operator that asked.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from batchwright.user_files import replace_file

if TYPE_CHECKING:
    from pathlib import Path

    from batchwright.device.kernels import Owner
    from batchwright.simulated.allocator.caching_allocator import CachingAllocator


class History:
    """What the allocator did, in order, and for whom."""

    def __init__(self) -> None:
        self.owner: Owner = ("", "", "")
        self._entries: list[dict[str, Any]] = []
        self._owners: dict[int, Owner] = {}

    def listen(self, action: str, address: int, size: int, stream: int) -> None:
        """Note one event of the allocator."""
        if action == "alloc":
            self._owners[address] = self.owner
        owner = self._owners.get(address, self.owner)
        entry = {"action": action, "addr": address, "size": size, "stream": stream, "frames": _frames(owner)}
        if action == "oom":
            entry["device_free"] = entry.pop("addr")
        # The official viewer draws by order; a time that rises is all it needs.
        self._entries.append({**entry, "time_us": len(self._entries)})

    def snapshot(self, allocator: CachingAllocator) -> dict[str, Any]:
        """Return what `torch.cuda.memory._snapshot()` would."""
        return {
            "segments": [self._segment(segment) for segment in allocator.segments()],
            "device_traces": [self._entries],
            "allocator_settings": _settings(allocator),
            "external_annotations": [],
        }

    def _segment(self, segment: Any) -> dict[str, Any]:
        return {
            "device": 0,
            "address": segment.address,
            "total_size": segment.total_size,
            "allocated_size": segment.allocated_size,
            "active_size": segment.active_size,
            "requested_size": segment.requested_size,
            "stream": segment.stream,
            "segment_type": segment.segment_type,
            "segment_pool_id": (0, 0),
            "is_expandable": segment.is_expandable,
            "frames": [],
            "blocks": [
                {
                    "address": block.address,
                    "size": block.size,
                    "requested_size": block.requested_size,
                    "state": block.state,
                    "frames": _frames(self._owners.get(block.address, ("", "", ""))),
                }
                for block in segment.blocks
            ],
        }


def write_snapshot(file: Path, history: History, allocator: CachingAllocator) -> None:
    """Write the snapshot as `torch.cuda.memory._dump_snapshot` does."""
    replace_file(file, pickle.dumps(history.snapshot(allocator)), what="the snapshot", option="snapshot=FILE")


def _frames(owner: Owner) -> list[dict[str, Any]]:
    operator, module, phase = owner
    frames = [(operator, module), (phase, "")]
    return [{"name": name, "filename": place or "step", "line": 0} for name, place in frames if name]


def _settings(allocator: CachingAllocator) -> dict[str, Any]:
    settings = allocator.settings
    return {
        "PYTORCH_CUDA_ALLOC_CONF": "",
        "max_split_size": -1 if settings.max_split_size is None else settings.max_split_size,
        "garbage_collection_threshold": settings.garbage_collection_threshold,
        "expandable_segments": settings.expandable_segments,
        "pinned_num_register_threads": 1,
        "release_lock_on_cudamalloc": False,
        "pinned_use_cuda_host_register": False,
        "roundup_power2_divisions": {},
    }
