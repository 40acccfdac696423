"""How often a loop synchronises gradients: the model wrapped as it is trained, in a group of one rank.

One rank is enough to count. The gradient is the same whether one micro-batch synchronises or all do, so only the count
tells; where none does, ranks drift apart.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from batchwright.accumulate.caught_window import catch_window
from batchwright.accumulate.causes import MISSING_NO_SYNC, SYNC_LOST
from batchwright.device.step import build_optimizers
from batchwright.state.random_state import kept_random_state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchwright.accumulate.audit_result import Audit
    from batchwright.accumulate.audit_subject import Subject
    from batchwright.workload import Workload


def judge_synchronisations(found: Audit, workload: Workload, subject: Subject, sizes: Sequence[int]) -> Audit:
    """Return the audit with what the count says, where there is a window and a `wrap` that makes a DDP model."""
    if workload.wrap is None or workload.window is None or len(sizes) < 2:
        return found
    if dist.is_initialized():
        return _noted(found, "synchronisations were not counted: a process group is already there")
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with kept_random_state():
            # In place, as it is given back: an optimizer that was handed in holds these very weights.
            wrapped = workload.wrap(subject.model)
            if not isinstance(wrapped, DistributedDataParallel):
                return _noted(found, f"synchronisations were not counted: wrap= makes a {type(wrapped).__name__}")
            count = _count(workload, wrapped, subject.micro_batches(sizes))
    finally:
        dist.destroy_process_group()
    found = _noted(found, f"under DDP gradients are synchronised {count} times in a window of {len(sizes)}")
    if count == 1:
        return found
    cause = SYNC_LOST if count == 0 else MISSING_NO_SYNC
    found = replace(found, is_synchronised=count > 0)
    if found.cause is not None:
        return _noted(found, f"also {cause.name}: {cause.explanation}; {cause.remedy}")
    return replace(found, cause=cause.name, explanation=cause.explanation, remedy=cause.remedy)


def _noted(found: Audit, note: str) -> Audit:
    return replace(found, notes=(*found.notes, note))


def _count(workload: Workload, model: DistributedDataParallel, micro_batches: list[Any]) -> int:
    counts: dict[int, int] = {}

    def count(_: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        counts[bucket.index()] = counts.get(bucket.index(), 0) + 1
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    # DDP looks at the annotations, which are text under `from __future__ import annotations`.
    bucket_kind = dist.GradBucket  # type: ignore[attr-defined]
    count.__annotations__ = {"bucket": bucket_kind, "return": torch.futures.Future[torch.Tensor]}
    model.register_comm_hook(None, count)
    optimizers = build_optimizers(workload, model)
    assert workload.window is not None
    catch_window(workload.window, model, optimizers, micro_batches)
    return max(counts.values(), default=0)
