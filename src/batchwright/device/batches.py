"""A batch of any form: made for a size and a shape, checked against the size, moved to a device.

Promises:
- tensors are found in lists, tuples, mappings, dataclasses, `BatchEncoding` and whatever torch's pytree knows;
- what has its own `.to` is moved by it (a PackedSequence keeps its lengths on the CPU), and the user's own
  object is not changed;
- a batch in which nothing has the size asked for is an error, unless the workload brings its own `split`.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch._guards import detect_fake_mode
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.data import DataLoader, default_collate

from batchwright.errors import InvalidInputError
from batchwright.state.untouched import current_keep
from batchwright.units import counted

if TYPE_CHECKING:
    from batchwright.workload import Workload


def make_batch(workload: Workload, micro_batch: int, shape: Mapping[str, Any], device: torch.device) -> Any:
    """Make `micro_batch` samples of a shape on a device, and check that there are as many."""
    current_keep(workload)
    if workload.batch is not None:
        batch = workload.batch(micro_batch, **shape)
    else:
        batch = _batch_from_data(workload, micro_batch, shape)
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
        if _moves_itself(leaf):
            # BatchEncoding.to changes the object it is called on; a user may hand out the same one each time.
            mine: Any = copy.copy(leaf) if isinstance(leaf, MutableMapping) else leaf
            return mine.to(device)
        if isinstance(leaf, MutableMapping):
            moved = copy.copy(leaf)
            for key in list(leaf):
                moved[key] = move_batch(leaf[key], device)
            return moved
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            twin = copy.copy(leaf)
            for field in dataclasses.fields(leaf):
                object.__setattr__(twin, field.name, move_batch(getattr(leaf, field.name), device))
            return twin
        return leaf

    # A PackedSequence is a tuple to pytree, but one whose tensors must not all move.
    return tree_map(move, batch, is_leaf=_moves_itself)


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
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
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


def _batch_from_data(workload: Workload, micro_batch: int, shape: Mapping[str, Any]) -> Any:
    check_data_has_no_shape(workload, shape)
    data = workload.data
    if len(data) < micro_batch:
        raise InvalidInputError(
            f"asked for {counted(micro_batch, 'sample')}, but data= holds {counted(len(data), 'sample')}.",
            remedy=f"a micro-batch of at most {len(data)}" if len(data) else "a dataset that is not empty",
        )
    # The loader that training would use; it draws a seed, which needs a real value, so the trace collates by hand.
    if detect_fake_mode() is None:
        return next(iter(DataLoader(data, batch_size=micro_batch, collate_fn=workload.collate)))
    samples = [data[i] for i in range(micro_batch)]
    return default_collate(samples) if workload.collate is None else workload.collate(samples)
