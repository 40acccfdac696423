"""Join micro-batches into one batch: the way back from cutting.

Promises:
- samples keep their order;
- where lengths differ, the shorter are filled up at their end: labels with -100, which losses ignore, all else with 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812

from batchwright.errors import InvalidInputError
from batchwright.units import shortened

if TYPE_CHECKING:
    from collections.abc import Sequence

_IGNORED = -100


def join(batches: Sequence[Any], name: str = "") -> Any:
    """Join batches of one form.

    >>> joined = join([{"ids": torch.ones(1, n), "labels": torch.ones(1, n)} for n in (2, 3)])
    >>> joined["ids"].tolist(), joined["labels"].tolist()
    ([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]], [[1.0, 1.0, -100.0], [1.0, 1.0, 1.0]])
    """
    first = batches[0]
    if isinstance(first, torch.Tensor):
        return _joined_tensors(batches, name)
    if isinstance(first, Mapping):
        return {key: join([batch[key] for batch in batches], str(key)) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(join(column, name) for column in zip(*batches, strict=True)))
    if isinstance(first, list | tuple):
        if any(isinstance(item, torch.Tensor | Mapping) for item in first):
            return type(first)(join(column, name) for column in zip(*batches, strict=True))
        return type(first)(item for batch in batches for item in batch)
    if all(batch == first for batch in batches):
        return first
    raise InvalidInputError(
        f"micro-batches of {type(first).__name__} cannot be joined into one batch; the first is {shortened(first)}.",
        remedy="merge=lambda batches: ... says how to make one batch of several",
    )


def _joined_tensors(tensors: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    if tensors[0].dim() == 0:
        return torch.stack(list(tensors)).mean() if tensors[0].is_floating_point() else tensors[0]
    if len({tensor.shape[1:] for tensor in tensors}) == 1:
        return torch.cat(list(tensors))
    is_label = "label" in name.lower() or any(bool((tensor == _IGNORED).any()) for tensor in tensors)
    longest = [max(tensor.shape[d] for tensor in tensors) for d in range(1, tensors[0].dim())]
    filled = []
    for tensor in tensors:
        missing = [longest[d - 1] - tensor.shape[d] for d in range(tensor.dim() - 1, 0, -1)]
        filled.append(F.pad(tensor, [n for amount in missing for n in (0, amount)], value=_IGNORED if is_label else 0))
    return torch.cat(filled)
