"""The piece of a gradient that this rank holds, and how many ranks hold the same piece."""

from __future__ import annotations

import math

import torch


def local_part(gradient: torch.Tensor) -> torch.Tensor:
    """Return this rank's piece of a gradient; all of it where it is not sharded."""
    # Most are plain, and asking for their type is the quicker question.
    if type(gradient) is torch.Tensor or not hasattr(gradient, "to_local"):
        return gradient
    local: torch.Tensor = gradient.to_local()
    return local


def num_copies(gradient: torch.Tensor) -> float:
    """Count the ranks that hold the same piece, of those that share the mesh.

    >>> num_copies(torch.ones(2))
    1.0
    """
    mesh = None if type(gradient) is torch.Tensor else getattr(gradient, "device_mesh", None)
    if mesh is None:
        return 1.0
    placements = getattr(gradient, "placements", ())
    return float(math.prod(mesh.size(i) for i, placement in enumerate(placements) if placement.is_replicate()))
