"""The process group that torchrun asks for, where it started us."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def is_first_rank() -> bool:
    """Whether this process speaks for all ranks; without torchrun it does."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def process_group(on: str) -> Iterator[str]:
    """Join the other ranks under torchrun, and yield this rank's device; without torchrun do nothing.

    >>> with process_group("cpu") as device:
    ...     device
    'cpu'
    """
    import torch.distributed as dist

    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or dist.is_initialized():
        yield on
        return
    dist.init_process_group()
    try:
        yield on if on == "cpu" or ":" in on else f"{on}:{os.environ.get('LOCAL_RANK', '0')}"
        dist.barrier()
    finally:
        dist.destroy_process_group()
