"""The longest batches first: what a probe sees of a loader is what will need the most memory.

Promises:
- only the order of samples changes, and only where they differ in length; numbers that are drawn stay the program's;
- samples are read as the loader reads them, for a limited time, once for all probes, and by workers alone: a sample
  that may be read only once is still there for the program;
- on a simulated card, where nobody needs their values, a large batch of samples that are equally long is filled up with
  copies of its first ones: reading 20,000 of them took longer than all else;
- there, one worker reads one batch ahead, however many the program has: what is read beyond the cut is for nothing;
- where the order cannot be changed (streams, samplers of batches), a note says that the first batches were probed.
"""

from __future__ import annotations

import copy
import json
import random
import sys
import time
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sized
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from batchwright.fitting.fit import measure_length
from batchwright.units import counted

if TYPE_CHECKING:
    from pathlib import Path

# So long are samples read.
_SECONDS = 10.0
# A worker that gives nothing for so long is given up.
_MOST_SECONDS = 30.0
# So many at once, and, if the first of them are alike, no more.
_AT_ONCE = 16
# The head of the order: more samples than the windows of a probe hold.
_MOST = 65_536
# So many samples of a batch are read if the others are like them.
_MOST_READ = 128


class _Reader(DataLoader[Any]):
    """Reads lengths instead of batches; no loader of the program's."""


class LongestBatches:
    """Reorders the loaders of a program as they begin."""

    def __init__(self, file: Path, notes: MutableMapping[str, None], *, fills_up: bool = False) -> None:
        self._file, self._notes, self._fills_up = file, notes, fills_up
        # Datasets whose samples are equally long.
        self._alike: dict[int, weakref.ref[Any]] = {}
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self._num_seen = 0

    @staticmethod
    def is_own(loader: object) -> bool:
        """Whether a loader was made here."""
        return isinstance(loader, _Reader)

    def lead(self, loader: Any) -> None:
        """Have a loader begin with its longest samples; called before each pass."""
        if self.is_own(loader) or loader in self._seen:
            return
        self._seen.add(loader)
        self._num_seen += 1
        if self._fills_up and loader.num_workers > 0:
            loader.num_workers = loader.prefetch_factor = 1
        batches = loader.batch_sampler
        if isinstance(loader.dataset, IterableDataset):
            self._notes["a stream of samples cannot be reordered: its first batches were probed"] = None
            return
        if batches is None or not isinstance(loader.dataset, Sized) or len(loader.dataset) < 2:
            return
        order = self._find_order(loader)
        if order is None:
            if self._fills_up:
                self._fill_up(loader)
            return
        if type(batches) is not BatchSampler:
            self._notes[
                f"samples differ in length, and {type(batches).__name__} groups them: its first batches were probed"
            ] = None
            return
        batches.sampler = _Led(order, batches.sampler)
        self._notes[f"the longest of {counted(len(loader.dataset), 'sample')} were probed first"] = None

    def _fill_up(self, loader: Any) -> None:
        with suppress(TypeError):  # there are no weak references to it
            self._alike[id(loader.dataset)] = weakref.ref(loader.dataset)
            if (loader.batch_size or 0) > _MOST_READ:
                self._notes[
                    f"of each batch {_MOST_READ} samples were read: the others are as long, and were copied"
                ] = None

    def fetch(self, fetch: Callable[[Any, Any], Any], fetcher: Any, indices: Any) -> Any:
        """Read the samples of a batch and collate them, as torch's `fetch` does, or only the first of them."""
        alike = self._alike.get(id(fetcher.dataset), lambda: None)
        if alike() is not fetcher.dataset or not fetcher.auto_collation or len(indices) <= _MOST_READ:
            return fetch(fetcher, indices)
        collate, missing = fetcher.collate_fn, len(indices) - _MOST_READ

        def collate_filled_up(samples: list[Any]) -> Any:
            return collate([*samples, *(tree_map(_copy, samples[number % _MOST_READ]) for number in range(missing))])

        fetcher.collate_fn = collate_filled_up
        try:
            return fetch(fetcher, indices[:_MOST_READ])
        finally:
            fetcher.collate_fn = collate

    def _find_order(self, loader: Any) -> list[int] | None:
        """Return the longest samples, or None if all are equally long; what an earlier probe found is read."""
        known = json.loads(self._file.read_text()) if self._file.exists() else {}
        key = f"{self._num_seen}:{type(loader.dataset).__name__}:{len(loader.dataset)}"
        if key not in known:
            state = torch.get_rng_state(), random.getstate(), _numpy_state()
            try:
                known[key] = _order_of(_read_lengths(loader))
            except Exception as error:
                known[key] = None
                self._notes[f"the lengths of samples could not be read: {type(error).__name__}: {error}"] = None
            torch.set_rng_state(state[0])
            random.setstate(state[1])
            if state[2] is not None:
                sys.modules["numpy"].random.set_state(state[2])
            self._file.write_text(json.dumps(known))
        order: list[int] | None = known[key]
        return order


class _Led:
    """A sampler that gives certain numbers first, and then what the program's gives."""

    def __init__(self, head: list[int], sampler: Any) -> None:
        self._head, self._sampler = head, sampler

    def __iter__(self) -> Iterator[int]:
        head = set(self._head)
        yield from self._head
        yield from (index for index in self._sampler if index not in head)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


def _copy(leaf: Any) -> Any:
    """Copy what a collating function may change in place; a tensor's values are of no importance."""
    return leaf if isinstance(leaf, torch.Tensor) else copy.copy(leaf)


def _read_lengths(loader: Any) -> list[int]:
    lengths: list[int] = []
    end = time.monotonic() + _SECONDS
    reader = _Reader(
        loader.dataset, batch_size=_AT_ONCE, num_workers=max(loader.num_workers, 1), collate_fn=_lengths,
        multiprocessing_context=loader.multiprocessing_context, timeout=_MOST_SECONDS,
    )  # fmt: skip
    for part in reader:
        lengths += part
        if time.monotonic() > end or (len(lengths) == _AT_ONCE and len(set(lengths)) == 1):
            break
    return lengths


def _lengths(samples: list[Any]) -> list[int]:
    return [measure_length(sample) for sample in samples]


def _order_of(lengths: list[int]) -> list[int] | None:
    """Return the numbers of the longest, the longest first.

    >>> _order_of([3, 9, 5]), _order_of([4, 4])
    ([1, 2, 0], None)
    """
    if len(set(lengths)) <= 1:
        return None
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))[:_MOST]


def _numpy_state() -> Any:
    numpy: Any = sys.modules.get("numpy")
    return None if numpy is None else numpy.random.get_state()
