"""Squared norms of gradients, exact enough to be subtracted from each other.

A plain fp32 reduction over a million entries is off by up to 1e-4 of itself, and T is a small difference of large
squares. Norms over rows of about a thousand entries, added up in fp64, are right to 1e-7 and take no longer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from batchwright.accumulate.shards import local_part, num_copies

if TYPE_CHECKING:
    from collections.abc import Sequence

_ROW = 1024


def square(gradient: torch.Tensor) -> torch.Tensor:
    """Return the squared norm as a tensor of no dimensions, on the gradient's device.

    >>> round(square(torch.full((3, 1000), 2.0)).item(), 2)
    12000.0
    """
    dense = gradient.coalesce().values() if gradient.is_sparse else gradient
    if dense.dim() == 2 and not dense.is_contiguous():
        dense = dense.t()
    exact = torch.float32 if dense.dtype.itemsize < 4 else None
    wide = torch.float32 if dense.device.type == "mps" else torch.float64
    if dense.numel() <= _ROW or not dense.is_contiguous():
        rows = (
            torch.linalg.vector_norm(dense, dim=-1, dtype=exact) if dense.dim() > 1 else dense.to(exact or dense.dtype)
        )
        small: torch.Tensor = rows.abs().to(wide).square_().sum()
        return small
    flat = dense.detach().view(-1)
    whole = flat.numel() // _ROW * _ROW
    total: torch.Tensor = (
        torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1, dtype=exact).to(wide).square_().sum()
    )
    if whole < flat.numel():
        total += torch.linalg.vector_norm(flat[whole:], dtype=exact).to(wide).square_()
    return total


def add_by_group(
    squares: Sequence[torch.Tensor], groups: Sequence[int], num_groups: int, device: torch.device
) -> torch.Tensor:
    """Add up squares of the same group; no host waits for a device.

    >>> add_by_group([torch.tensor(1.0), torch.tensor(2.0), torch.tensor(4.0)], [0, 1, 0], 2, torch.device("cpu"))
    tensor([5., 2.])
    """
    if not squares:
        return torch.zeros(num_groups, device=device)
    stacked = torch.stack([each.to(device) for each in squares])
    if num_groups == 1:
        return stacked.sum(dim=0, keepdim=True)
    index = torch.tensor(groups, device=device)
    return stacked.new_zeros(num_groups, *stacked.shape[1:]).index_add_(0, index, stacked)


def squares_of_gradients(
    parameters: Sequence[torch.Tensor], groups: Sequence[int], num_groups: int, device: torch.device
) -> torch.Tensor:
    """Return the squares of the gradients that parameters hold now, by group, of shards this rank's."""
    found = [(p.grad, group) for p, group in zip(parameters, groups, strict=True) if p.grad is not None]
    squares = [square(local_part(gradient)) / num_copies(gradient) for gradient, _ in found]
    return add_by_group(squares, [group for _, group in found], num_groups, device)
