"""The gradient of one big batch: all samples in one forward, plain autograd, one backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn


def joined(batches: Sequence[Any]) -> Any:
    """Put batches of tensors, tuples of them or dicts of them behind one another."""
    first = batches[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(batches))
    if isinstance(first, dict):
        return {key: torch.cat([batch[key] for batch in batches]) for key in first}
    return tuple(torch.cat(columns) for columns in zip(*batches, strict=True))


def big_batch_gradient(
    model: nn.Module, batches: Sequence[Any], loss: Callable[[nn.Module, Any], torch.Tensor]
) -> list[torch.Tensor]:
    """Return the gradient of every weight; those that the model holds are left alone."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    return list(torch.autograd.grad(loss(model, joined(batches)), weights))


def relative_error(gradient: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> float:
    """Return the norm of the difference over that of the reference, all weights together."""
    difference = sum(
        float((mine.double() - theirs.double()).square().sum())
        for mine, theirs in zip(gradient, reference, strict=True)
    )
    size = sum(float(theirs.double().square().sum()) for theirs in reference)
    return float((difference / size) ** 0.5)
