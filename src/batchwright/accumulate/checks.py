"""What an Accumulator refuses, and what it warns of, before anything is changed."""

from __future__ import annotations

import inspect
import math
import warnings
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import LBFGS
from torch.optim.lr_scheduler import ReduceLROnPlateau

from batchwright.errors import InvalidInputError
from batchwright.units import shortened

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from batchwright.accumulate.ranks import Parallelism


BATCH_NORM_NOTE = (
    "{names}: batch normalization takes its statistics from each micro-batch, not from the whole batch, and moves its "
    "running averages once per micro-batch. No accumulation can make that equal the big batch. GroupNorm or LayerNorm "
    "do not depend on the batch; frozen statistics (module.eval()) are exact as well."
)


class BatchNormWarning(UserWarning):
    """Batch normalization under accumulation is not that of the big batch."""


def as_list(given: Any) -> list[Any]:
    """Return none, one or several things as a list."""
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]


def weights_held_by(optimizers: Iterable[Any]) -> list[nn.Parameter]:
    """Return every weight that optimizers hold, group by group."""
    return [weight for optimizer in optimizers for group in optimizer.param_groups for weight in group["params"]]


def batch_norms(model: nn.Module) -> list[str]:
    """Name the batch normalization layers that take statistics from their batch.

    >>> batch_norms(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    ['1']
    """
    kinds = nn.modules.batchnorm._BatchNorm
    return [name for name, module in model.named_modules() if isinstance(module, kinds) and module.training]


def check_construction(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    parallelism: Parallelism,
    *,
    schedulers: Sequence[Any],
    clip_norm: float | None,
    precise: bool,
    on_oom: str,
    is_single: bool,
) -> None:
    """Refuse what cannot work; warn of batch normalization where a window has more than one micro-batch."""
    if not optimizers:
        raise InvalidInputError("an accumulator needs an optimizer, or a list of them; received none.")
    for optimizer in optimizers:
        if not hasattr(optimizer, "param_groups"):
            raise InvalidInputError(f"an accumulator takes an optimizer of torch; received {shortened(optimizer)}.")
        if isinstance(optimizer, LBFGS):
            raise InvalidInputError(
                "LBFGS computes the loss again within its step, which accumulation cannot do.", remedy="SGD, AdamW, ..."
            )
        if _needs_closure(optimizer):
            raise InvalidInputError(
                f"{type(optimizer).__name__} computes the loss again within its step, by a closure that accumulation "
                "does not have.",
                remedy="SGD, AdamW, ..., or a loop of your own around such an optimizer",
            )
    for scheduler in schedulers:
        if not callable(getattr(scheduler, "step", None)):
            raise InvalidInputError(f"a scheduler has a step(); received {shortened(scheduler)}.")
        if isinstance(scheduler, ReduceLROnPlateau):
            raise InvalidInputError(
                "ReduceLROnPlateau steps by a loss of your own choice.", remedy="leave it out, and step it yourself"
            )
    if clip_norm is not None and not (
        isinstance(clip_norm, int | float) and clip_norm > 0 and not math.isnan(clip_norm)
    ):
        raise InvalidInputError(f"clip_norm must be above 0; received {shortened(clip_norm)}.")
    if on_oom not in ("raise", "split"):
        raise InvalidInputError(f'on_oom is "raise" or "split"; received {shortened(on_oom)}.')
    parallelism.check_options(precise=precise, splits=on_oom == "split")
    check_same_weights(model, optimizers)
    names = batch_norms(model)
    if names and not is_single:
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        warnings.warn(BATCH_NORM_NOTE.format(names=shown), BatchNormWarning, stacklevel=4)


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    try:
        closure = inspect.signature(optimizer.step).parameters.get("closure")
    except (TypeError, ValueError):
        return False
    return closure is not None and closure.default is closure.empty and closure.kind is not closure.VAR_POSITIONAL


def check_same_weights(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse an optimizer that has none of the model's weights: made for another model, or before this one moved."""
    weights = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        if not any(id(parameter) in weights for parameter in weights_held_by([optimizer])):
            raise InvalidInputError(
                f"{type(optimizer).__name__} holds none of the model's weights: it would step on something else.",
                remedy="make the optimizer from model.parameters(), after the model is where it stays",
            )
