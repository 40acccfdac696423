"""Run a micro-batch, and where it runs out of memory, cut it in two and run the halves.

Promises:
- the gradient is that of the whole micro-batch: each piece counts by its own units;
- what a failed backward had already added is thrown away: gradients of earlier micro-batches are set aside meanwhile,
  which takes the memory of one more set of gradients;
- random numbers begin anew for the pieces where they began for the whole, and buffers (the running statistics of batch
  normalization) are as before the failed forward.
"""

from __future__ import annotations

import gc
import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from batchwright.device.cutting import clear_num_samples, cut, num_samples
from batchwright.device.out_of_memory import is_out_of_memory
from batchwright.errors import InvalidInputError
from batchwright.state.random_state import random_sources
from batchwright.units import shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn


_REMEDY = "a batch whose tensors all begin with its samples, and what they share (class weights, a mask) kept out of it"


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


def run_in_pieces(
    batch: Any,
    run: Callable[[Any, float], None],
    parameters: Sequence[nn.Parameter],
    model: nn.Module,
    *,
    samples: int | None = None,
) -> int:
    """Run a batch, whole if it fits; return how often something was cut. One sample that does not fit is an error.

    `run` is given a piece and its part of the samples; `samples` says how many the batch has, where that is known.
    """
    total = clear_num_samples(batch, samples)
    waiting, num_cuts = [(batch, total or 0)], 0
    while waiting:
        piece, size = waiting.pop(0)
        put_back = [*random_sources(parameters[0].device).values(), *_buffer_sources(model)]
        # Cutting and running again must happen outside `except`: the traceback holds the failed step's tensors.
        part = size / total if total else 1.0
        if _ran(partial(run, piece, part), parameters, can_be_cut=size > 1 or total is None):
            continue
        if total is None:
            # Only now that it has to be cut: says what its parts begin with.
            num_samples(batch, remedy=_REMEDY)
            raise InvalidInputError(
                f"a batch that does not fit cannot be cut, as nothing tells its number of samples: {shortened(batch)}.",
                remedy=_REMEDY,
            )
        for source in put_back:
            source()
        halves = [size - size // 2, size // 2]
        waiting = [*zip(cut(piece, halves), halves, strict=True), *waiting]
        num_cuts += 1
        gc.collect()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
    return num_cuts


def _buffer_sources(model: nn.Module) -> list[Callable[[], None]]:
    """Return what puts each buffer back: its values, and the buffer itself where a forward replaces it."""

    def source(home: dict[str, torch.Tensor | None], name: str, buffer: torch.Tensor) -> Callable[[], None]:
        before = buffer.detach().clone()

        def put_back() -> None:
            with torch.no_grad():
                buffer.copy_(before)
            home[name] = buffer

        return put_back

    return [
        source(module._buffers, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]


def _ran(run: Callable[[], None], parameters: Sequence[nn.Parameter], *, can_be_cut: bool) -> bool:
    aside = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    for parameter, _ in aside:
        parameter.grad = None
    has_run = False
    try:
        run()
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
