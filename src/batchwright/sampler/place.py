"""Which rank this is, and how many there are."""

from __future__ import annotations

from batchwright.errors import InvalidInputError
from batchwright.units import counted, shortened, whole_number

MOST_RANKS = 2**20
"""More than any cluster has; a plan holds one place for each rank and round."""


def number_of_ranks(value: object, name: str) -> int:
    """Return a number of ranks, or say why it cannot be one.

    >>> number_of_ranks(8, "world_size")
    8
    """
    ranks = whole_number(value, name)
    if ranks > MOST_RANKS:
        raise InvalidInputError(f"{name} is at most {MOST_RANKS:,}; received {shortened(value)}.")
    return ranks


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
    rank, world_size = whole_number(rank, "rank", least=0), number_of_ranks(world_size, "world_size")
    if rank >= world_size:
        raise InvalidInputError(f"rank {rank} of {counted(world_size, 'rank')}: they are counted from 0.")
    return rank, world_size
