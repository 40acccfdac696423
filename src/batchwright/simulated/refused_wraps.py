"""Ways to spread a model that are not simulated: refused by name where they start, before torch fails inside.

Classes are refused as they are made, so it does not matter how a `wrap` came by them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch.distributed.algorithms.join import Joinable
from torch.distributed.fsdp import FullyShardedDataParallel

from batchwright.errors import CannotTraceError
from batchwright.simulated.torch_patches import Patch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SHARD = "fully_shard (FSDP2) shards the same way and is simulated"
_STAGE = "estimate one stage as a model of its own"


def refused_wraps() -> Iterator[Patch]:
    """Refuse what is not simulated as soon as one is made."""
    refused: list[tuple[Any, str, str]] = [
        (FullyShardedDataParallel, "FullyShardedDataParallel (FSDP1)", _SHARD),
        # What can be joined is DDP, whose place replica.py takes, and this optimizer; importing it takes a second.
        (Joinable, "ZeroRedundancyOptimizer", _SHARD),
    ]
    pipelining = sys.modules.get("torch.distributed.pipelining")
    if pipelining is not None:
        refused.append((pipelining.PipelineStage, "pipeline parallelism", _STAGE))
    for kind, called, remedy in refused:
        yield Patch(kind, "__init__", _refusal(called, remedy))


def _refusal(called: str, remedy: str) -> Callable[..., None]:
    def refuse(*_: Any, **__: Any) -> None:
        raise CannotTraceError(f"{called} is not simulated.", remedy=remedy)

    return refuse
