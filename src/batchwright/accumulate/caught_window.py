"""Run somebody's accumulation loop up to its optimizer step, and take the gradient from there.

Promises:
- the optimizer never steps: the weights are what they were;
- a loop that clips is judged by the gradient before its clipping, because clipping hides what is asked here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from batchwright.accumulate.gradients import Gradient
from batchwright.accumulate.undisturbed import without_clipping

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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

    def stop(_: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        # The optimizer itself is the first of them.
        closure = arguments[1] if len(arguments) > 1 else options.get("closure")
        if closure is not None:
            with torch.enable_grad():
                closure()
        caught.append(Gradient.of(model))
        raise _Caught

    handles = [optimizer.register_step_pre_hook(stop) for optimizer in optimizers]
    handed = optimizers[0] if len(optimizers) == 1 else tuple(optimizers)
    with without_clipping() as clipped:
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


def plain_window(loss: Callable[..., torch.Tensor]) -> Callable[..., None]:
    """Return the loop that every tutorial shows: each loss divided by the count, added up, stepped."""

    def window(model: nn.Module, optimizer: Any, micro_batches: Sequence[Any]) -> None:
        for micro_batch in micro_batches:
            (loss(model, micro_batch) / len(micro_batches)).backward()
        for each in optimizer if isinstance(optimizer, tuple) else (optimizer,):
            each.step()

    return window
