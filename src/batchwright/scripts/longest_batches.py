"""The longest batches first: what a probe sees of a loader is what will need the most memory.

Promises:
- only the order of samples changes, and only where they differ in length; numbers that are drawn stay the program's;
- samples are read as the loader reads them, for a limited time, once for all probes, and by workers alone: a sample
  that may be read only once is still there for the program;
- where the order cannot be changed (streams, samplers of batches), a note says that the first batches were probed.
"""

from __future__ import annotations

import json
import random
import sys
import time
import weakref
from collections.abc import Iterator, MutableMapping, Sized
from typing import TYPE_CHECKING, Any

import torch
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


class _Reader(DataLoader[Any]):
    """Reads lengths instead of batches; no loader of the program's."""


class LongestBatches:
    """Reorders the loaders of a program as they begin."""

    def __init__(self, file: Path, notes: MutableMapping[str, None]) -> None:
        self._file, self._notes = file, notes
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
        batches = loader.batch_sampler
        if isinstance(loader.dataset, IterableDataset):
            self._notes["a stream of samples cannot be reordered: its first batches were probed"] = None
            return
        if batches is None or not isinstance(loader.dataset, Sized) or len(loader.dataset) < 2:
            return
        order = self._find_order(loader)
        if order is None:
            return
        if type(batches) is not BatchSampler:
            self._notes[
                f"samples differ in length, and {type(batches).__name__} groups them: its first batches were probed"
            ] = None
            return
        batches.sampler = _Led(order, batches.sampler)
        self._notes[f"the longest of {counted(len(loader.dataset), 'sample')} were probed first"] = None

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
