"""A batch of any form: made for a size and a shape, checked, moved to a device, counted, cut, and joined again.

Promises:
- tensors are found in lists, tuples, mappings, dataclasses, `BatchEncoding` and whatever torch's pytree knows;
- what has its own `.to` is moved by it (a PackedSequence keeps its lengths on the CPU), and the user's own object is
  not changed;
- a batch in which nothing has the size asked for is an error, unless the workload brings its own `split`;
- a number of samples is right or asked for: where parts of a batch begin with different sizes (class weights, an edge
  index, a mask that all share) it is an error that says what to hand in, unless the size is known from elsewhere;
- every tensor whose dimension 0 is the number of samples is cut there, and every list of that length; what all samples
  share (position ids of shape (1, length), a flag) goes to each piece as it is;
- joined samples keep their order. Where lengths differ, the shorter are filled up at their end: labels with -100, which
  losses ignore, all else with 0.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch._guards import detect_fake_mode
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.data import DataLoader, default_collate

from batchwright.errors import InvalidInputError
from batchwright.state.untouched import current_keep
from batchwright.units import counted, shortened

if TYPE_CHECKING:
    from batchwright.workload import Workload


def make_batch(workload: Workload, micro_batch: int, shape: Mapping[str, Any], device: torch.device) -> Any:
    """Make `micro_batch` samples of a shape on a device, and check that there are as many."""
    current_keep(workload)
    make = workload.batch
    batch = _batch_from_data(workload, micro_batch, shape) if make is None else make(micro_batch, **shape)
    if workload.split is None:
        check_size(batch, micro_batch)
    return move_batch(batch, device)


def move_batch(batch: Any, device: torch.device) -> Any:
    """Return the batch with every tensor in it on the device; what is no tensor stays as it is.

    >>> moved = move_batch({"x": torch.ones(2, 3), "names": ["a", "b"]}, torch.device("meta"))
    >>> moved["x"].device.type, moved["names"]
    ('meta', ['a', 'b'])
    """

    def move(leaf: Any) -> Any:
        if not _moves_itself(leaf):
            return leaf
        # BatchEncoding.to changes the object it is called on; a user may hand out the same one each time.
        mine: Any = copy.copy(leaf) if isinstance(leaf, MutableMapping) else leaf
        return mine.to(device)

    # A PackedSequence is a tuple to pytree, but one whose tensors must not all move.
    return map_batch(move, batch, is_leaf=_moves_itself)


def map_batch(change: Callable[[Any], Any], batch: Any, *, is_leaf: Callable[[Any], bool]) -> Any:
    """Return the batch with every leaf changed, those in mappings and dataclasses too; the user's own objects stay."""

    def visit(value: Any) -> Any:
        is_mapping = isinstance(value, MutableMapping)
        if is_leaf(value) or not (is_mapping or _is_dataclass(value)):
            return change(value)
        twin: Any = copy.copy(value)
        for name in list(value) if is_mapping else [field.name for field in dataclasses.fields(value)]:
            if is_mapping:
                twin[name] = map_batch(change, value[name], is_leaf=is_leaf)
            else:
                object.__setattr__(twin, name, map_batch(change, getattr(value, name), is_leaf=is_leaf))
        return twin

    return tree_map(visit, batch, is_leaf=is_leaf)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in a batch.

    >>> [tuple(t.shape) for t in tensors_in({"x": torch.ones(2, 3), "pair": (torch.ones(2), "text")})]
    [(2, 3), (2,)]
    """
    for leaf in tree_iter(batch):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):
            yield from tensors_in(dict(leaf))
        elif _is_dataclass(leaf):
            yield from tensors_in([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])


def check_size(batch: Any, micro_batch: int) -> None:
    """Say so where no part of a batch has the size that was asked for.

    >>> check_size({"x": torch.ones(4, 8)}, 4)
    >>> check_size({"x": torch.ones(8, 8)}, 4)
    Traceback (most recent call last):
    ...
    batchwright.errors.InvalidInputError: the batch ignores its size: asked for 4 samples, received tensors of 8.
      try: batch=lambda n: ... must make n samples; where they do not lie along dimension 0, hand in split=...
    """
    # One part of the right size is enough: position ids of shape (1, length), masks that all samples share and
    # targets as a list of n dicts are common, and a batch of unequal parts fails in the user's own code anyway.
    leading = {tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim() > 0}
    if micro_batch in leading or _has_length(batch, micro_batch):
        return
    if not leading:
        if isinstance(batch, list | tuple):
            leading = {len(batch)}
        else:
            return  # An object of the user's own, or no tensors yet: nothing here tells its size.
    raise InvalidInputError(
        f"the batch ignores its size: asked for {counted(micro_batch, 'sample')}, "
        f"received tensors of {', '.join(map(str, sorted(leading)))}.",
        remedy="batch=lambda n: ... must make n samples; where they do not lie along dimension 0, hand in split=...",
    )


def _has_length(batch: Any, micro_batch: int) -> bool:
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return any(
        isinstance(part, list | tuple) and len(part) == micro_batch
        for part in itertools.chain([batch] if isinstance(batch, list) else [], parts)
    )


def _moves_itself(value: Any) -> bool:
    return callable(getattr(value, "to", None)) and not isinstance(value, type)


def check_data_has_no_shape(workload: Workload, shape: Mapping[str, Any]) -> None:
    """Refuse a shape where samples are taken as they are."""
    if shape and workload.data is not None:
        raise InvalidInputError(
            f"a shape ({', '.join(shape)}) was asked for, but the workload takes its samples from data=.",
            remedy="hand in batch=lambda n, seq_len=...: ... to make samples of a shape",
        )


class SamplesChosen(ABC):
    """A dataset that says itself which samples make a batch."""

    @abstractmethod
    def choose(self, micro_batch: int) -> list[Any]:
        """Return the samples of a batch."""


def _batch_from_data(workload: Workload, micro_batch: int, shape: Mapping[str, Any]) -> Any:
    check_data_has_no_shape(workload, shape)
    data = workload.data
    if len(data) < micro_batch:
        raise InvalidInputError(
            f"asked for {counted(micro_batch, 'sample')}, but data= holds {counted(len(data), 'sample')}.",
            remedy=f"a micro-batch of at most {len(data)}" if len(data) else "a dataset that is not empty",
        )
    if isinstance(data, SamplesChosen):
        samples = data.choose(micro_batch)
        return default_collate(samples) if workload.collate is None else workload.collate(samples)
    # The loader that training would use; it draws a seed, which needs a real value, so the trace collates by hand.
    if detect_fake_mode() is None:
        return next(iter(DataLoader(data, batch_size=micro_batch, collate_fn=workload.collate)))
    samples = [data[i] for i in range(micro_batch)]
    return default_collate(samples) if workload.collate is None else workload.collate(samples)


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
    clear = clear_num_samples(batch, expected)
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
    parts, sizes = list(_parts(batch)), possible_sizes(batch)
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


def possible_sizes(batch: Any) -> set[int]:
    """Return every number of samples that some part of a batch speaks for.

    >>> possible_sizes({"x": torch.ones(4, 7), "weights": torch.ones(5), "names": ["a"] * 4, "scale": 2.0})
    {4, 5}
    """
    return {part if isinstance(part, int) else part.size(0) for part in _parts(batch)}


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
    elif _is_dataclass(batch):
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
        return any(
            entry.dim() == 0 if isinstance(entry, torch.Tensor) else isinstance(entry, int | float | str)
            for entry in item
        )
    return getattr(item, "ndim", 0) == 0 and not isinstance(item, PackedSequence)


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
    if _is_dataclass(part):
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
        if (
            isinstance(part, list)
            and len(part) == total
            and all(isinstance(item, torch.Tensor) and (item.dim() == 0 or item.shape[0] != total) for item in part)
        ):
            return part[start:end]
        return type(part)(_taken(item, start, end, total) for item in part)
    return part


IGNORED = -100
"""The label of what a loss leaves out, in torch as in transformers."""


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
    is_label = "label" in name.lower() or any(bool((tensor == IGNORED).any()) for tensor in tensors)
    longest = [max(tensor.shape[d] for tensor in tensors) for d in range(1, tensors[0].dim())]
    filled = []
    for tensor in tensors:
        missing = [longest[d - 1] - tensor.shape[d] for d in range(tensor.dim() - 1, 0, -1)]
        filled.append(F.pad(tensor, [n for amount in missing for n in (0, amount)], value=IGNORED if is_label else 0))
    return torch.cat(filled)
