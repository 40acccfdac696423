"""Run a micro-batch, and where it runs out of memory, cut it in two and run the halves.

Promises:
- the gradient is that of the whole micro-batch: each piece counts by its own units;
- what a failed backward had already added is thrown away: gradients of earlier micro-batches are set aside meanwhile,
  which takes the memory of one more set of gradients;
- random numbers begin anew for the pieces where they began for the whole.
"""

from __future__ import annotations

import gc
import inspect
from typing import TYPE_CHECKING, Any

import torch

from batchwright.device.cutting import cut, num_samples
from batchwright.device.out_of_memory import is_out_of_memory
from batchwright.state.random_state import random_sources

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn


def call_loss(loss_fn: Callable[..., Any], model: nn.Module, batch: Any) -> Any:
    """Call `loss_fn(model, batch)`, or `loss_fn(batch)` where it takes one thing only.

    >>> call_loss(lambda batch: batch + 1, None, 2), call_loss(lambda model, batch: batch + 2, None, 2)
    (3, 4)
    """
    try:
        parameters = inspect.signature(loss_fn).parameters.values()
    except (TypeError, ValueError):
        return loss_fn(model, batch)
    required = [
        p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return loss_fn(batch) if len(required) == 1 else loss_fn(model, batch)


def run_in_pieces(batch: Any, run: Callable[[Any], None], parameters: Sequence[nn.Parameter]) -> int:
    """Run a batch, whole if it fits; return how often something was cut. One sample that does not fit is an error."""
    waiting, num_cuts = [batch], 0
    while waiting:
        piece = waiting.pop(0)
        samples = num_samples(piece) or 0
        put_back = random_sources(parameters[0].device)
        # Cutting and running again must happen outside `except`: the traceback holds the failed step's tensors.
        if _ran(piece, run, parameters, can_be_cut=samples > 1):
            continue
        for source in put_back.values():
            source()
        waiting = [*cut(piece, [samples - samples // 2, samples // 2]), *waiting]
        num_cuts += 1
        gc.collect()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
    return num_cuts


def _ran(piece: Any, run: Callable[[Any], None], parameters: Sequence[nn.Parameter], *, can_be_cut: bool) -> bool:
    aside = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    for parameter, _ in aside:
        parameter.grad = None
    has_run = False
    try:
        run(piece)
        has_run = True
    except Exception as error:
        if not can_be_cut or not is_out_of_memory(error):
            raise
    finally:
        if not has_run:
            for parameter in parameters:
                parameter.grad = None
        for parameter, gradient in aside:
            if parameter.grad is not None:
                gradient.add_(parameter.grad)
            parameter.grad = gradient
    return has_run
