"""Which rank this is, and how many there are."""

from __future__ import annotations

from batchwright.errors import InvalidInputError
from batchwright.units import counted, whole_number


def place_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return rank and number of ranks: as given, else the process group's, else one."""
    if (rank is None) != (world_size is None):
        raise InvalidInputError("rank and world_size go together.", remedy="both, or neither for the process group's")
    if rank is None or world_size is None:
        try:
            import torch.distributed as dist
        except ImportError:
            return 0, 1
        is_group = dist.is_available() and dist.is_initialized()
        return (dist.get_rank(), dist.get_world_size()) if is_group else (0, 1)
    rank, world_size = whole_number(rank, "rank", least=0), whole_number(world_size, "world_size")
    if rank >= world_size:
        raise InvalidInputError(f"rank {rank} of {counted(world_size, 'rank')}: they are counted from 0.")
    return rank, world_size
