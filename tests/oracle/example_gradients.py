"""Per-example gradients by one forward and one backward of the whole model for each sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


def one_sample(batch: Any, sample: int) -> Any:
    """Take one sample out of a tensor, or out of each tensor of a dict, as a batch of one."""
    if isinstance(batch, torch.Tensor):
        return batch[sample : sample + 1]
    return {key: tensor[sample : sample + 1] for key, tensor in batch.items()}


def example_squares(
    model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], torch.Tensor], *, samples: int
) -> dict[str, torch.Tensor]:
    """Return for each trainable weight the squared norms of the gradients of its samples' losses, by name."""
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    squares = {name: torch.zeros(samples, dtype=torch.float64) for name in weights}
    for sample in range(samples):
        model.zero_grad()
        loss(model, one_sample(batch, sample)).backward()
        for name, weight in weights.items():
            assert weight.grad is not None
            squares[name][sample] = weight.grad.double().square().sum()
    model.zero_grad()
    return squares
