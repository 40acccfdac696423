"""Squared norms of gradients, exact enough to be subtracted from each other.

A plain fp32 reduction over a million entries is off by up to 1e-4 of itself, and T is a small difference of large
squares. So a gradient is reduced to the norms of its rows, one operation; they are squared and added up in fp64, those
of all weights together, since the cost of many small operations is what shows in a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from batchwright.accumulate.shards import local_part, num_copies

if TYPE_CHECKING:
    from collections.abc import Sequence

# Longer rows are cut where they can be: fp32 keeps 1e-7 over about so many entries.
_LONGEST_ROW, _ROW = 4096, 1024


def row_norms(gradient: torch.Tensor) -> torch.Tensor:
    """Return the norms of the rows of a gradient, one dimension, on its device.

    >>> row_norms(torch.full((2, 4), 1.0)), row_norms(torch.tensor([3.0, 4.0]))
    (tensor([2., 2.]), tensor([5.]))
    """
    dense = gradient.coalesce().values() if gradient.is_sparse else gradient
    if dense.dim() == 2 and not dense.is_contiguous():
        dense = dense.t()  # sums along strides are slower, and rounded more
    exact = torch.float32 if dense.dtype.itemsize < 4 else None
    rows = dense.reshape(1, -1) if dense.dim() < 2 else dense.flatten(1) if dense.dim() > 2 else dense
    if rows.shape[1] > _LONGEST_ROW and rows.is_contiguous() and rows.numel() % _ROW == 0:
        rows = rows.view(-1, _ROW)
    elif rows.shape[1] > _LONGEST_ROW and exact is None and rows.device.type != "mps":
        exact = torch.float64
    norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=exact)
    return norms


def add_squares(
    norms: Sequence[torch.Tensor], groups: Sequence[int], num_groups: int, device: torch.device
) -> torch.Tensor:
    """Square the norms of rows and add them up by group; no host waits for a device.

    >>> add_squares([torch.tensor([1.0, 2.0]), torch.tensor([3.0])], [0, 1], 2, torch.device("cpu"))
    tensor([5., 9.], dtype=torch.float64)
    """
    wide = torch.float32 if device.type == "mps" else torch.float64
    totals = []
    for group in range(num_groups):
        mine = [each for each, its_group in zip(norms, groups, strict=True) if its_group == group]
        alike = [each if each.dtype == mine[0].dtype else each.to(mine[0].dtype) for each in mine]
        joined = torch.cat([each.to(device) for each in alike]) if mine else torch.zeros(1, device=device)
        totals.append(joined.to(wide).square_().sum())
    return torch.stack(totals)


def square(gradient: torch.Tensor) -> torch.Tensor:
    """Return the squared norm of one gradient, as a tensor of no dimensions.

    >>> round(square(torch.full((3, 1000), 2.0)).item(), 2)
    12000.0
    """
    return add_squares([row_norms(gradient)], [0], 1, gradient.device)[0]


def squares_of_gradients(
    parameters: Sequence[torch.Tensor], groups: Sequence[int], num_groups: int, device: torch.device
) -> torch.Tensor:
    """Return the squares of the gradients that parameters hold now, by group, of shards this rank's."""
    norms, its_groups = [], []
    for parameter, group in zip(parameters, groups, strict=True):
        gradient = parameter.grad
        if gradient is not None:
            copies = num_copies(gradient)
            found = row_norms(local_part(gradient))
            norms.append(found if copies == 1 else found / copies**0.5)
            its_groups.append(group)
    return add_squares(norms, its_groups, num_groups, device)
