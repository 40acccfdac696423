"""A step that cannot be right is refused: a loss that cannot be trained on, or a step that did nothing.

Promises:
- each refusal is an `InvalidInputError` that says what to change; without it everything would seem to fit;
- a model comes back without a hook of ours.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from batchwright.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn


def checked_loss(loss: Any) -> torch.Tensor:
    """Return the loss if it can be differentiated, or say why it cannot."""
    if not isinstance(loss, torch.Tensor):
        holds = "; it has a .loss, return that" if isinstance(getattr(loss, "loss", None), torch.Tensor) else ""
        raise InvalidInputError(f"loss= must return a scalar tensor; received {type(loss).__name__}{holds}.")
    if loss.numel() != 1:
        raise InvalidInputError(
            f"loss= must return a scalar tensor; received one of shape {tuple(loss.shape)}.",
            remedy="loss.mean(), the mean over the batch's units",
        )
    if not loss.requires_grad:
        raise InvalidInputError(
            "loss= returned a tensor that does not require a gradient, so there is nothing to train.",
            remedy="compute it from the model it receives, without no_grad(), detach() or .item()",
        )
    return loss


def check_that_something_trains(optimizers: Sequence[Any]) -> None:
    """Refuse a step that did nothing: everything would fit."""
    trained = [
        parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]
    ]
    # Hooks may have used a gradient up as soon as it was there (an optimizer that runs inside backward).
    if any(parameter.grad is not None or parameter._post_accumulate_grad_hooks for parameter in trained):
        return
    raise InvalidInputError(
        "the step trained nothing: after the backward none of the optimizer's parameters has a gradient.",
        remedy="compute the loss with the model that loss= receives",
    )


@contextlib.contextmanager
def must_be_called(model: nn.Module) -> Iterator[None]:
    """Refuse inference that never called the model or a part of it: everything would fit."""
    called: list[nn.Module] = []

    def note(module: nn.Module, _: Any) -> None:
        called.append(module)
        remove()

    def remove() -> None:
        while handles:
            handles.pop().remove()

    handles = [module.register_forward_pre_hook(note) for module in model.modules()]
    try:
        yield
    finally:
        remove()
    if not called:
        raise InvalidInputError(
            "the step did nothing with the model: neither it nor a part of it was called.",
            remedy="use the model that loss=, generate= and evaluate= receive",
        )
