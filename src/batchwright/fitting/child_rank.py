"""One rank of a probe across ranks: its own process group, its own short time-out, the model wrapped."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchwright.fitting.job import Rendezvous
    from batchwright.workload import Workload


@contextmanager
def in_group(meeting: Rendezvous) -> Iterator[None]:
    """Join the child ranks of this probe; the group is left by ending the process, which never waits."""
    import os

    from torch import distributed
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    # What users' code reads; the addresses are those of this probe, not of the launcher's group.
    os.environ.update(
        RANK=str(meeting.rank),
        LOCAL_RANK=str(meeting.local_rank),
        WORLD_SIZE=str(meeting.world_size),
        MASTER_ADDR=meeting.host,
        MASTER_PORT=str(meeting.port),
    )
    wait = timedelta(seconds=meeting.timeout_seconds)
    store = TCPStore(meeting.host, meeting.port, is_master=False, timeout=wait)
    distributed.init_process_group(
        store=PrefixStore(meeting.prefix, store),
        rank=meeting.rank,
        world_size=meeting.world_size,
        timeout=wait,
        # gloo for what lives on the CPU, the accelerator's own for the rest: torch picks by device.
    )
    # Joined here, so that connecting is not charged to the first step, and a rank that is missing is named early.
    distributed.barrier()
    yield


def wrapped(workload: Workload) -> Workload:
    """Return the workload with a model that `wrap` has been applied to."""
    wrap, given = workload.wrap, workload.model
    if wrap is None:
        return workload

    def build() -> nn.Module:
        model = given if isinstance(given, nn.Module) else given()
        if torch.accelerator.is_available():
            model = model.to(torch.accelerator.current_accelerator())
        return wrap(model)

    return replace(workload, model=build, wrap=None)
