"""Run somebody's accumulation loop up to its optimizer step, and take the gradient from there.

Promises:
- the optimizer never steps: the weights are what they were;
- a loop that clips is judged by the gradient before its clipping, because clipping hides what is asked here.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from batchwright.accumulate.gradients import Gradient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn


class _Caught(BaseException):
    """Ends the loop at its optimizer step; no `except Exception` of the user's holds it up."""


@dataclass(frozen=True)
class CaughtWindow:
    """What a loop was about to step with."""

    gradient: Gradient
    has_stepped: bool
    """Whether it came to an optimizer step at all; if not, the gradient is what it left behind."""
    has_clipped: bool


def catch_window(
    window: Callable[..., Any], model: nn.Module, optimizers: Sequence[Any], micro_batches: Sequence[Any]
) -> CaughtWindow:
    """Call `window(model, optimizer, micro_batches)` and stop it where its optimizer would step."""
    model.zero_grad(set_to_none=True)
    caught: list[Gradient] = []

    def stop(*_: Any) -> None:
        caught.append(Gradient.of(model))
        raise _Caught

    handles = [optimizer.register_step_pre_hook(stop) for optimizer in optimizers]
    handed = optimizers[0] if len(optimizers) == 1 else tuple(optimizers)
    with _without_clipping() as clipped:
        try:
            window(model, handed, micro_batches)
        except _Caught:
            pass
        finally:
            for handle in handles:
                handle.remove()
    gradient = caught[0] if caught else Gradient.of(model)
    model.zero_grad(set_to_none=True)
    return CaughtWindow(gradient, has_stepped=bool(caught), has_clipped=bool(clipped))


@contextmanager
def _without_clipping() -> Iterator[list[str]]:
    """Have torch's functions that clip do nothing but return the norm, wherever they were imported to."""
    clipped: list[str] = []
    places = (torch.nn.utils, torch.nn.utils.clip_grad)

    def norm_only(parameters: Any, *_: Any, **__: Any) -> torch.Tensor:
        clipped.append("clip_grad_norm_")
        held = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        gradients = [parameter.grad for parameter in held if parameter.grad is not None]
        return torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())

    def nothing(*_: Any, **__: Any) -> None:
        clipped.append("clip_grad_value_")

    before = [
        (place, name, getattr(place, name)) for place in places for name in ("clip_grad_norm_", "clip_grad_value_")
    ]
    for place, name, _ in before:
        setattr(place, name, norm_only if name == "clip_grad_norm_" else nothing)
    try:
        yield clipped
    finally:
        for place, name, function in before:
            setattr(place, name, function)


def plain_window(loss: Callable[..., torch.Tensor]) -> Callable[..., None]:
    """Return the loop that every tutorial shows: each loss divided by the count, added up, stepped."""

    def window(model: nn.Module, optimizer: Any, micro_batches: Sequence[Any]) -> None:
        for micro_batch in micro_batches:
            (loss(model, micro_batch) / len(micro_batches)).backward()
        for each in optimizer if isinstance(optimizer, tuple) else (optimizer,):
            each.step()

    return window
