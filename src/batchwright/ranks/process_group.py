"""The process group that ranks train in, with a time limit of its own."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from batchwright.errors import BatchwrightError, RankFailedError, StepFailedError
from batchwright.ranks.session import Session, together
from batchwright.ranks.watch import BUSY_FACTOR

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def process_group(on: str) -> Iterator[str]:
    """Join the other ranks under torchrun, and yield this rank's device; alone, or inside a group, do nothing.

    >>> with process_group("cpu") as device:
    ...     device
    'cpu'
    """
    import torch.distributed as dist

    with together() as ranks:
        if ranks.is_alone or dist.is_initialized():
            yield on
            return
        hook_before = sys.excepthook  # torch puts the rank before every later traceback
        prefix = ranks.new_group_prefix()
        join_group(ranks, ranks.store, prefix)
        try:
            yield on if on == "cpu" or ":" in on else f"{on}:{ranks.place.local_rank}"
            dist.barrier()
        except BaseException as error:
            # What all ranks refuse alike is no reason to end them. Else the others lose their peer with the group, and
            # must know why before it goes.
            is_refusal = isinstance(error, BatchwrightError) and not isinstance(
                error, StepFailedError | RankFailedError
            )
            raised = error if is_refusal and ranks.all_come_to(f"{prefix}/refused") else ranks.fail(error)
            if raised is error:
                raise
            raise raised from error
        finally:
            dist.destroy_process_group()
            sys.excepthook = hook_before


def join_group(ranks: Session, store: Any, prefix: str) -> None:
    """Make the default process group of a session's ranks."""
    from torch.distributed import PrefixStore, init_process_group  # type: ignore[attr-defined]

    init_process_group(
        store=PrefixStore(prefix, store),
        rank=ranks.rank,
        world_size=ranks.world_size,
        # The watch judges earlier, and knows who is late; this is for a rank whose watch is dead.
        timeout=timedelta(seconds=(BUSY_FACTOR + 1) * ranks.limit_seconds),
        # gloo for what lives on the CPU, the accelerator's own for the rest: torch picks by device.
    )
