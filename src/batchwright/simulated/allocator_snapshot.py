"""The segments and blocks of an allocator at one moment, as a memory snapshot shows them.

Promises:
- the blocks of a segment follow one another without a gap, and their sizes add up to the segment's;
- a stretch of mapped pages of an expandable segment is a segment of its own, as in PyTorch's snapshot;
- the requested size of a block that is not active is 0 (PyTorch leaves there what its last holder asked for).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batchwright.simulated.cached_blocks import Block


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
