"""A step that cannot be right is refused: a loss that cannot be trained on, or a step that did nothing.

Promises:
- each refusal is an `InvalidInputError` that says what to change; without it everything would seem to fit;
- a model comes back without a hook of ours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from batchwright.device.out_of_memory import is_too_small
from batchwright.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn


def scalar_loss(loss: Any) -> torch.Tensor:
    """Return what `loss=` returned if it is one real number in a tensor, or say what it is instead."""
    if not isinstance(loss, torch.Tensor):
        raise InvalidInputError(
            f"loss= must return a scalar tensor; received {type(loss).__name__}{_where_it_is(loss)}."
        )
    if loss.numel() != 1:
        raise InvalidInputError(
            f"loss= must return a scalar tensor; received one of shape {tuple(loss.shape)}.",
            remedy="loss.mean(), the mean over the batch's units",
        )
    if loss.is_complex() or loss.layout is not torch.strided:
        kind = "a complex number" if loss.is_complex() else f"a tensor of layout {loss.layout}"
        raise InvalidInputError(
            f"loss= must return a real scalar in a dense tensor; received {kind}.",
            remedy="loss.abs() or loss.real" if loss.is_complex() else "loss.to_dense()",
        )
    return loss


def checked_loss(loss: Any) -> torch.Tensor:
    """Return the loss if it can be differentiated, or say why it cannot."""
    checked = scalar_loss(loss)
    if not checked.requires_grad:
        raise InvalidInputError(
            "loss= returned a tensor that does not require a gradient, so there is nothing to train.",
            remedy="compute it from the model it receives, without no_grad(), detach() or .item()",
        )
    return checked


def _where_it_is(returned: Any) -> str:
    if isinstance(getattr(returned, "loss", None), torch.Tensor):
        return "; it has a .loss, return that"
    if isinstance(returned, Mapping) and isinstance(returned.get("loss"), torch.Tensor):
        return "; it has a ['loss'], return that"
    if isinstance(returned, list | tuple) and returned and isinstance(returned[0], torch.Tensor):
        return "; if its first entry is the loss, return that"
    if isinstance(returned, float | int):
        return "; return the tensor itself, without float() or .item()"
    return ""


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
def needing_larger_micro_batches(asked: str) -> Iterator[None]:
    """Say by which split batch normalization got a single value per channel: one sample has no spread."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, InvalidInputError) or not is_too_small(error):
            raise
        raise InvalidInputError(
            f"{asked} has micro-batches that are too small for batch normalization in training mode.",
            details=[str(error)],
            remedy="micro-batches of 2 samples or more; or GroupNorm, or frozen statistics (module.eval())",
        ) from error


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
