"""Which rank this process is, as the launcher says in the environment; free of torch.

Promises:
- a variable that makes no sense is refused with its value and what to do, never with a traceback;
- who prints is decided without raising: in doubt, this process does.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from batchwright.errors import InvalidInputError
from batchwright.units import shortened

TIMEOUT_VARIABLE = "BATCHWRIGHT_RANK_TIMEOUT"
_DEFAULT_SECONDS = 60.0
_REMEDY = "torchrun --nproc-per-node N -m batchwright ..., which sets it; or unset WORLD_SIZE and RANK for one process"


@dataclass(frozen=True)
class Place:
    """One process among those of a launcher; alone without one."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def is_alone(self) -> bool:
        """Whether there are no other ranks."""
        return self.world_size == 1


def read_place() -> Place:
    """Read WORLD_SIZE, RANK and their like.

    >>> read_place().is_alone
    True
    """
    world_size, rank = _number("WORLD_SIZE", least=1), _number("RANK", least=0)
    if world_size is None or world_size == 1:
        return Place()
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if rank is None or missing:
        raise InvalidInputError(f"WORLD_SIZE is {world_size}, but {' and '.join(missing)} is not set.", remedy=_REMEDY)
    _number("MASTER_PORT", least=1)
    if rank >= world_size:
        raise InvalidInputError(
            f"RANK is {rank} and WORLD_SIZE {world_size}: ranks are counted from 0.", remedy=_REMEDY
        )
    local_rank, local_world_size = _number("LOCAL_RANK", least=0), _number("LOCAL_WORLD_SIZE", least=1)
    return Place(
        rank,
        world_size,
        rank if local_rank is None else local_rank,
        world_size if local_world_size is None else local_world_size,
    )


def is_first_rank() -> bool:
    """Whether this process speaks for all ranks; alone it does."""
    try:
        return read_place().rank == 0
    except InvalidInputError:
        return True


def rank_timeout() -> float:
    """Seconds that ranks wait for one that does nothing: `BATCHWRIGHT_RANK_TIMEOUT`, by default 60.

    >>> rank_timeout()
    60.0
    """
    text = os.environ.get(TIMEOUT_VARIABLE, "").strip()
    if not text:
        return _DEFAULT_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 1 <= seconds <= 1e6:
        raise InvalidInputError(
            f"{TIMEOUT_VARIABLE} is a number of seconds from 1 to 1,000,000; received {shortened(text)}.",
            remedy=f"{TIMEOUT_VARIABLE}=300",
        )
    return seconds


def _number(name: str, *, least: int) -> int | None:
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    # What int() takes and a launcher never writes (1_0, +4, other digits) is refused too.
    if not (text.isascii() and text.isdigit()) or len(text) > 9 or int(text) < least:
        raise InvalidInputError(
            f"the environment variable {name} must be a whole number from {least} on; received {shortened(text)}.",
            remedy=_REMEDY,
        )
    return int(text)
