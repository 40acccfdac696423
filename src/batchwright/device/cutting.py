"""Count the samples of a batch, and cut it into smaller ones.

Promises:
- every tensor whose dimension 0 is the number of samples is cut there, and every list of that length;
- what all samples share (position ids of shape (1, length), a flag) goes to each piece as it is;
- a batch that cannot be cut is an error that names what to hand in.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch

from batchwright.device.batches import tensors_in
from batchwright.errors import InvalidInputError
from batchwright.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def num_samples(batch: Any) -> int | None:
    """Count the samples of a batch: dimension 0 of its first tensor, or the length of a list; None where nothing tells.

    >>> num_samples({"ids": torch.ones(4, 7), "positions": torch.ones(1, 7)}), num_samples(["a", "b"]), num_samples("a")
    (4, 2, None)
    """
    first = next((tensor for tensor in tensors_in(batch) if tensor.dim() > 0), None)
    if first is not None:
        return first.shape[0]
    return len(batch) if isinstance(batch, list) else None


def cut(batch: Any, sizes: Sequence[int], split: Callable[..., Sequence[Any]] | None = None) -> list[Any]:
    """Cut a batch into pieces of these sizes; `split(batch, sizes)` does it where dimension 0 is not the samples.

    >>> [piece["x"].tolist() for piece in cut({"x": torch.arange(5), "scale": 2.0}, [2, 3])]
    [[0, 1], [2, 3, 4]]
    """
    if split is not None:
        pieces = list(split(batch, sizes))
        if len(pieces) != len(sizes):
            raise InvalidInputError(
                f"split was asked for {counted(len(sizes), 'piece')} of {list(sizes)} samples; received {len(pieces)}."
            )
        return pieces
    total = num_samples(batch)
    if total is None or total != sum(sizes):
        raise InvalidInputError(
            f"a batch of {'unknown size' if total is None else counted(total, 'sample')} cannot be cut into "
            f"{' + '.join(map(str, sizes))}.",
            remedy="split=lambda batch, sizes: [...] says how to cut a batch of your own form",
        )
    ends = list(itertools.accumulate(sizes))
    return [_taken(batch, end - size, end, total) for size, end in zip(sizes, ends, strict=True)]


def _taken(part: Any, start: int, end: int, total: int) -> Any:
    if isinstance(part, torch.Tensor):
        return part[start:end] if part.dim() > 0 and part.shape[0] == total else part
    if isinstance(part, MutableMapping):
        twin = copy.copy(part)
        for key in list(part):
            twin[key] = _taken(part[key], start, end, total)
        return twin
    if isinstance(part, Mapping):
        return {key: _taken(value, start, end, total) for key, value in part.items()}
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        changes = {
            field.name: _taken(getattr(part, field.name), start, end, total) for field in dataclasses.fields(part)
        }
        return dataclasses.replace(part, **changes)
    if isinstance(part, list) and len(part) == total and not any(isinstance(item, torch.Tensor) for item in part):
        return part[start:end]
    if isinstance(part, tuple) and hasattr(part, "_fields"):
        return type(part)(*(_taken(item, start, end, total) for item in part))
    if isinstance(part, list | tuple):
        # A list of tensors is a list of columns, (inputs, labels), unless each is one sample.
        if isinstance(part, list) and len(part) == total and all(_is_one_sample(item, total) for item in part):
            return part[start:end]
        return type(part)(_taken(item, start, end, total) for item in part)
    return part


def _is_one_sample(item: Any, total: int) -> bool:
    return isinstance(item, torch.Tensor) and (item.dim() == 0 or item.shape[0] != total)
