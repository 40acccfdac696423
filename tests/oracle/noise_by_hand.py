"""The noise of a step by its definition: every gradient is made anew, by itself, and kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn


def flat_gradient(model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
    weights = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, weights, allow_unused=True)
    return torch.cat(
        [
            (torch.zeros_like(w) if g is None else g.to_dense()).reshape(-1).double()
            for w, g in zip(weights, found, strict=True)
        ]
    )


def observe_by_hand(
    model: nn.Module, loss: Callable[[Any, Any], torch.Tensor], parts: Sequence[Any], sizes: Sequence[float]
) -> tuple[float, float]:
    """T and |G|^2 from the spread of the parts' gradients around their mean, in fp64 sums."""
    gradients = [flat_gradient(model, loss(model, part)) for part in parts]
    total = sum(sizes)
    mean = torch.stack([g * (n / total) for g, n in zip(gradients, sizes, strict=True)]).sum(0)
    spread = sum(n * float((g - mean).square().sum()) for g, n in zip(gradients, sizes, strict=True))
    trace = spread / (len(parts) - 1)
    return trace, float(mean.square().sum()) - trace / total
