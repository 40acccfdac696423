"""Indexing a tensor of the card with Python values: `y[:, [0, 2]]`, `y[[True, False]]`, `y[range(3)]`, numpy arrays.

torch makes an index tensor of such a value on the device itself, past every mode, and on a simulated card nothing can
be made that way. So the index is made here, on the host, and moved, which takes what it takes on CUDA.

Promises:
- what torch takes for one index and what for several is told apart as torch does it;
- a tensor of the host cannot be indexed with one of the card, as on CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from batchwright.simulated.backend import is_on_card

_MASKS = (torch.bool, torch.uint8)
# torch/csrc/autograd/python_variable_indexing.cpp: a sequence as long as this is always one index.
_ALWAYS_ONE = 32


def index_on_card(index: Any, target: torch.device) -> Any:
    """Return an index of a tensor on the card with every Python sequence in it made a tensor there."""
    if isinstance(index, tuple) or _is_several(index):
        return tuple(_one_index(part, target) for part in index)
    return _one_index(index, target)


def refuse_index_of_card(index: Any) -> None:
    """Raise what CUDA raises where a tensor of the host is indexed with one of the card."""
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, torch.Tensor) and is_on_card(part):
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")


def _is_sequence(value: Any) -> bool:
    # An array of numpy is no Sequence of Python's; torch takes it for one.
    is_array = hasattr(value, "__array_interface__") and getattr(value, "ndim", 0) > 0
    return is_array or (isinstance(value, Sequence) and not isinstance(value, str | bytes))


def _is_several(index: Any) -> bool:
    """Whether a list is taken for a tuple of indices: a short one of anything but plain numbers."""
    if not isinstance(index, Sequence) or isinstance(index, str | bytes) or len(index) >= _ALWAYS_ONE:
        return False
    return any(
        part is None or part is Ellipsis or isinstance(part, torch.Tensor | slice) or _is_sequence(part)
        for part in index
    )


def _one_index(value: Any, target: torch.device) -> Any:
    if isinstance(value, torch.Tensor) or not _is_sequence(value):
        return value
    made = torch.tensor(_numbers(value), device="cpu")
    return (made if made.dtype in _MASKS else made.to(torch.int64)).to(target)


def _numbers(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()  # torch reads the single tensors of a list
    if hasattr(value, "__array_interface__"):
        return value.tolist()
    return [_numbers(part) for part in value] if _is_sequence(value) else value
