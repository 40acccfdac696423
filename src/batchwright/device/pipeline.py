"""A rank of a pipeline as something that a step can train: the stages that its schedule runs.

`wrap` may return a schedule of torch.distributed.pipelining in place of a module. Then `loss(schedule, batch)` calls
`schedule.step(...)` as a training loop does, and backward runs inside of it.

Promises:
- a micro-batch is what one stage runs at once: the batch that a schedule is handed has so many of them as it says;
- what is no schedule is left as it is, and nothing of torch is imported to find that out.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch import nn

from batchwright.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable


class PipelineRank(nn.Module):
    """The stages of one rank, and the schedule that runs them."""

    def __init__(self, schedule: Any) -> None:
        super().__init__()
        self.schedule = schedule
        self.num_micro_batches = int(schedule._n_microbatches)
        own = getattr(schedule, "_stages", None) or [schedule._stage]
        self.stages = nn.ModuleDict({f"stage_{stage.stage_index}": stage.submod for stage in own})


def apply_wrap(wrap: Callable[[nn.Module], Any], model: nn.Module) -> nn.Module:
    """Return what `wrap` makes of a model, as a module."""
    wrapped = wrap(model)
    if is_schedule(wrapped):
        return PipelineRank(wrapped)
    if not isinstance(wrapped, nn.Module):
        is_stage = hasattr(wrapped, "stage_index") and hasattr(wrapped, "submod")
        raise InvalidInputError(
            f"wrap= must return a module or a pipeline's schedule; received {type(wrapped).__name__}.",
            remedy="return Schedule1F1B(stage, n_microbatches=8, loss_fn=...), and call its step in loss="
            if is_stage
            else "wrap=lambda model: DistributedDataParallel(model), or a function that ends in `return model`",
        )
    return wrapped


def is_schedule(value: Any) -> bool:
    """Whether a value is a schedule of torch.distributed.pipelining."""
    schedules = sys.modules.get("torch.distributed.pipelining.schedules")
    return schedules is not None and isinstance(value, schedules._PipelineSchedule)
