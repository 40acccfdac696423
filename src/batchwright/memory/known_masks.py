"""Indexing with a mask whose values are known: how many it picks out is then known too.

Promises:
- what is made in between is what the card makes: one row of whole numbers for each that is picked;
- a mask whose values are not known is left as it is, and refused by its operator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchwright.memory.known_values import KnownValues

_aten = torch.ops.aten
# All of them take a tensor, and then its indices.
_INDEX = {
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._unsafe_index.Tensor,
    _aten._index_put_impl_.default,
}
_MASKS = (torch.bool, torch.uint8)


def without_known_masks(
    func: Callable[..., Any], args: Any, values: KnownValues, see: Callable[[torch.Tensor, str], object]
) -> Any:
    """Return the arguments with each known mask replaced by the positions it picks; `see` notes what that makes."""
    if func not in _INDEX:
        return args
    indexed, indices, *rest = args
    found: list[Any] = []
    for index in indices:
        is_mask = index is not None and index.dtype in _MASKS
        start = sum(part.dim() if part is not None and part.dtype in _MASKS else 1 for part in found)
        if is_mask and indexed.shape[start : start + index.dim()] != index.shape:
            raise IndexError(
                f"The shape of the mask {list(index.shape)} at index {start} does not match the shape of the indexed "
                f"tensor {list(indexed.shape)} at index {start}"
            )
        num_picked = values.count_nonzero(index) if is_mask else None
        if num_picked is None:
            found.append(index)
            continue
        rows = index.new_empty((num_picked, index.dim()), dtype=torch.int64)
        see(rows, "aten.nonzero")
        found += rows.unbind(1)
    return (indexed, found, *rest)
