"""One rank of a probe across ranks: its own session and process group, the model wrapped."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from batchwright.ranks.meeting import Address
from batchwright.ranks.place import Place
from batchwright.ranks.process_group import join_group
from batchwright.ranks.session import Session, join_as_child

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batchwright.fitting.job import Rendezvous
    from batchwright.ranks.failure import RankFailure
    from batchwright.workload import Workload


@contextmanager
def among_children(meeting: Rendezvous, on_failure: Callable[[RankFailure], None]) -> Iterator[Session]:
    """Meet the child ranks of this probe, before anything of the user's is loaded."""
    # What users' code reads; the addresses are those of this probe, not of the launcher's group.
    os.environ.update(
        RANK=str(meeting.rank),
        LOCAL_RANK=str(meeting.local_rank),
        WORLD_SIZE=str(meeting.world_size),
        MASTER_ADDR=meeting.host,
        MASTER_PORT=str(meeting.port),
    )
    place = Place(meeting.rank, meeting.world_size, meeting.local_rank)
    with join_as_child(place, Address(meeting.host, meeting.port), meeting.prefix, on_failure=on_failure) as session:
        yield session


def join_children(session: Session) -> None:
    """Make the process group of this probe; it is left by ending the process, which never waits."""
    join_group(session, session.store, "group")
    # Joined here, so that connecting is not charged to the first step, and a rank that is missing is named early.
    torch.distributed.barrier()


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
