"""The noise scale from a list of gradients, without any training loop: one step, one number."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch

from batchwright.errors import InvalidInputError
from batchwright.noise.gradient_squares import square
from batchwright.noise.observation import Squares, ratio
from batchwright.units import shortened


def estimate(gradients: Any, micro_batch: float | Sequence[float] = 1) -> float | None:
    """Return T/|G|^2 from the gradients of the micro-batches of one step, each the mean over its samples.

    >>> round(estimate([torch.tensor([3.0, 1.0]), torch.tensor([1.0, 1.0])], micro_batch=8), 6)
    4.0
    >>> estimate([torch.zeros(2), torch.zeros(2)]), estimate([])
    (inf, None)

    A gradient is a tensor, or a list or dict of tensors; `gradients` may be one tensor with a row each. `micro_batch`
    is the samples of a micro-batch, or a list with those of each. Without gradients the answer is None; where the
    signal is zero, or is not told from zero by these micro-batches, it is infinite. One step says little:
    `NoiseScale` averages over many, and has an interval.
    """
    rows = [] if gradients is None else [_flat(gradient) for gradient in gradients]
    if not rows:
        return None
    if len({row.numel() for row in rows}) > 1:
        raise InvalidInputError(
            f"the gradients are of different sizes: {sorted({row.numel() for row in rows})} numbers.",
            remedy="the gradients of the same weights, one for each micro-batch",
        )
    sizes = _sizes(micro_batch, len(rows))
    squares = [float(square(row.double())) for row in rows]
    usable = [index for index, value in enumerate(squares) if math.isfinite(value) and sizes[index] > 0]
    if len(usable) < len(rows):
        warnings.warn(
            f"{len(rows) - len(usable)} of {len(rows)} gradients left out: infinite, not a number, or of no samples",
            stacklevel=2,
        )
    if len(usable) < 2:
        raise InvalidInputError(
            f"a noise scale needs the gradients of two micro-batches or more; received {len(usable)} that can be used.",
            remedy="cut the batch in two, and hand in both gradients",
        )
    units = sum(sizes[index] for index in usable)
    mean = sum((rows[index].double() * (sizes[index] / units) for index in usable), torch.zeros(()))
    seen = Squares.of([squares[i] for i in usable], [sizes[i] for i in usable]).observe(float(square(mean)))
    assert seen is not None
    return ratio(seen.trace, seen.signal)


def _flat(gradient: Any) -> torch.Tensor:
    if isinstance(gradient, torch.Tensor):
        dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
        return (torch.view_as_real(dense) if dense.is_complex() else dense).reshape(-1)
    parts = list(gradient.values()) if isinstance(gradient, Mapping) else gradient
    if not isinstance(parts, Sequence) or not parts or not all(isinstance(part, torch.Tensor) for part in parts):
        raise InvalidInputError(
            f"a gradient is a tensor, or a list or dict of tensors; received {shortened(gradient)}."
        )
    return torch.cat([_flat(part) for part in parts])


def _sizes(micro_batch: Any, number: int) -> list[float]:
    sizes = [micro_batch] * number if isinstance(micro_batch, Real) else list(micro_batch)
    if len(sizes) != number:
        raise InvalidInputError(f"{number} gradients, but {len(sizes)} sizes of micro-batches.")
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, Real) or not 0 <= float(size) < math.inf:
            raise InvalidInputError(f"a micro-batch holds 0 samples or more; received {shortened(size)}.")
    return [float(size) for size in sizes]
