"""Count the samples of a batch, and cut it into smaller ones.

Promises:
- a number of samples is right or asked for: where parts of a batch begin with different sizes (class weights, an edge
  index, a mask that all share) it is an error that says what to hand in, unless the size is known from elsewhere;
- every tensor whose dimension 0 is the number of samples is cut there, and every list of that length;
- what all samples share (position ids of shape (1, length), a flag) goes to each piece as it is;
- a batch that cannot be cut is an error that names what to hand in.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import PackedSequence

from batchwright.errors import InvalidInputError
from batchwright.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WEIGH_OR_LEAVE_OUT = (
    "weight=lambda batch: ... counts it; or keep what all samples share (class weights, a mask) out of the batch"
)


def num_samples(batch: Any, expected: int | None = None, *, remedy: str = WEIGH_OR_LEAVE_OUT) -> int | None:
    """Count the samples of a batch: what its parts begin with; None where nothing tells, an error where they differ.

    `expected` is a size known from elsewhere, such as a loader's batch size; it decides where parts differ.

    >>> num_samples({"ids": torch.ones(4, 7), "positions": torch.ones(1, 7)}), num_samples(["a", "b"]), num_samples("a")
    (4, 2, None)
    >>> weighted = {"class_weights": torch.ones(5), "x": torch.ones(3, 6), "y": torch.ones(3)}
    >>> num_samples(weighted, expected=3)
    3
    >>> num_samples(weighted)
    Traceback (most recent call last):
    ...
    batchwright.errors.InvalidInputError: how many samples a batch has cannot be told: its parts begin with 3 and 5.
      try: weight=lambda batch: ... counts it; or keep what all samples share (class weights, a mask) out of the batch
    """
    sizes = possible_sizes(batch)
    clear = _clear(sizes, list(_parts(batch)), expected)
    if clear is None and sizes:
        listed = [f"{size:,}" for size in sorted(sizes)]
        shown = ", ".join(listed[:-1][:5]) + f" and {listed[-1]}"
        raise InvalidInputError(
            f"how many samples a batch has cannot be told: its parts begin with {shown}.", remedy=remedy
        )
    return clear


def clear_num_samples(batch: Any, expected: int | None = None) -> int | None:
    """Count the samples of a batch for the record only: None also where its parts differ.

    >>> clear_num_samples([torch.ones(5), torch.ones(3, 6)])
    """
    return _clear(possible_sizes(batch), list(_parts(batch)), expected)


def possible_sizes(batch: Any) -> set[int]:
    """Return every number of samples that some part of a batch speaks for.

    >>> possible_sizes({"x": torch.ones(4, 7), "weights": torch.ones(5), "names": ["a"] * 4, "scale": 2.0})
    {4, 5}
    """
    return {part if isinstance(part, int) else part.size(0) for part in _parts(batch)}


def _clear(sizes: set[int], parts: list[torch.Tensor | int], expected: int | None) -> int | None:
    if len(sizes) == 1:
        return next(iter(sizes))
    if expected is not None and expected in sizes:
        return expected
    if len(sizes) == 2 and 1 in sizes:
        size = max(sizes)
        tensors = [part for part in parts if isinstance(part, torch.Tensor)]
        whole = [tensor for tensor in tensors if tensor.size(0) == size]
        shared = [tensor for tensor in tensors if tensor.size(0) == 1]
        # (1, length) beside (samples, length) is shared by all. One sample beside five class weights is not.
        speaks_for_one = any(part == 1 for part in parts if isinstance(part, int))
        if shared and not speaks_for_one and all(any(_is_like(one, many) for many in whole) for one in shared):
            return size
    return None


def _is_like(one: torch.Tensor, many: torch.Tensor) -> bool:
    """Whether every further dimension of a shared tensor is one of those of a tensor of samples."""
    if one.is_nested or many.is_nested:
        return False
    further = {size for size in one.shape[1:] if size != 1}
    return bool(further) and further <= set(many.shape[1:])


def _parts(batch: Any) -> Iterator[torch.Tensor | int]:
    """Yield what speaks for a number of samples: tensors that have a dimension 0, and the lengths of lists."""
    if isinstance(batch, torch.Tensor):
        if batch.dim() > 0:
            yield batch
    elif isinstance(batch, PackedSequence):
        yield int(batch.batch_sizes[0])
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _parts(value)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from _parts(getattr(batch, field.name))
    elif isinstance(batch, list) and batch and all(_is_whole_sample(item) for item in batch):
        yield len(batch)
    elif isinstance(batch, list | tuple):
        for item in batch:
            yield from _parts(item)
    elif type(batch).__module__ == "numpy" and getattr(batch, "ndim", 0) > 0:
        yield len(batch)


def _is_whole_sample(item: Any) -> bool:
    """Whether an item of a list is a sample, not a column: text, a number, a mapping, or a row with a number in it."""
    if isinstance(item, torch.Tensor):
        return item.dim() == 0
    if isinstance(item, list | tuple) and not isinstance(item, PackedSequence):
        # Collating makes columns of tensors with a dimension 0; a row that is not collated mostly has a plain number.
        return any(isinstance(entry, int | float | str) or _is_scalar(entry) for entry in item)
    return getattr(item, "ndim", 0) == 0 and not isinstance(item, PackedSequence)


def _is_scalar(entry: Any) -> bool:
    return isinstance(entry, torch.Tensor) and entry.dim() == 0


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
    total = sum(sizes)
    if total not in possible_sizes(batch):
        held = sorted(possible_sizes(batch))
        size = f"parts of {' and '.join(map(str, held[:5]))}" if held else "unknown size"
        raise InvalidInputError(
            f"a batch of {size} cannot be cut into {' + '.join(map(str, sizes))} samples.",
            remedy="split=lambda batch, sizes: [...] of the Workload says how to cut a batch of your own form",
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
