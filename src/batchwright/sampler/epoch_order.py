"""Samples of an epoch in an order in which neighbours are of like length, and the cuts between batches.

Every sample is thrown into one of several windows at random, and each window is sorted, longest first. One window is a
full sort: nearly no padding, but the same batch-mates in every epoch. Many windows are nearly random. Window, length
and sample share one 64-bit key, so that a single sort of plain integers does all of it.

Promises:
- the order depends on the seed and the epoch alone;
- a batch never reaches over the end of a window, and costs at most the budget;
- no loop over samples: one sort, then as many vector operations as a window has batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from batchwright.sampler.cost import Budget

    Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class CutOrder:
    """The samples of an epoch, and where each batch starts; the last ends with the samples."""

    order: npt.NDArray[np.int32] | Numbers
    starts: Numbers

    @property
    def stops(self) -> Numbers:
        """Where each batch ends."""
        return np.append(self.starts[1:], len(self.order))


def cut_in_windows(
    lengths: Numbers, budget: Budget, *, num_windows: int, num_classes: int, rng: np.random.Generator
) -> CutOrder:
    """Throw samples into windows, sort each, and cut them into batches within the budget.

    `lengths` has one or two columns. With two, a window is parted into classes by the second before it is sorted by the
    first, so that neighbours are alike in both.

    >>> from batchwright.sampler.cost import Budget
    >>> lengths = np.array([[5], [1], [4], [2], [3]])
    >>> cut = cut_in_windows(lengths, Budget(9), num_windows=1, num_classes=1, rng=np.random.default_rng(0))
    >>> cut.order.tolist(), cut.starts.tolist()
    ([0, 2, 4, 3, 1], [0, 1, 3])
    """
    number = len(lengths)
    if number == 0:
        return CutOrder(np.zeros(0, np.int32), np.zeros(0, np.int64))
    if lengths.shape[1] == 2 and np.ptp(lengths[:, 1]) > np.ptp(lengths[:, 0]):
        lengths = lengths[:, ::-1]  # sorted by the one that differs more
    # Samples of one length are in random order too: by their number they would meet again in every epoch.
    mixed = rng.permutation(number)
    groups = rng.integers(0, num_windows, number)
    if lengths.shape[1] == 2 and num_classes > 1:
        groups = groups * num_classes + _classes(lengths[mixed, 1], num_classes)
    order: Any
    order, ends = _sorted(lengths[mixed, 0], groups, num_windows * num_classes)
    order = mixed.astype(order.dtype)[order]
    padded = lengths[order, 0]
    if lengths.shape[1] == 2:
        # The second length of a batch is at most the longest of its group: a bound, so the budget holds.
        starts = np.concatenate(([0], ends[:-1]))
        longest = np.maximum.reduceat(lengths[order, 1], starts)
        padded = padded + np.repeat(longest, np.diff(np.append(starts, number)))
    return CutOrder(order, _cut(budget.most_samples(padded), ends))


def _sorted(lengths: Numbers, groups: Numbers, num_groups: int) -> tuple[npt.NDArray[np.int32] | Numbers, Numbers]:
    """Return the samples by group, longest first, and where each group that has any ends."""
    number, longest = len(lengths), int(lengths.max())
    index_bits, length_bits = max(number - 1, 1).bit_length(), longest.bit_length()
    kind: Any = np.int32 if number < 2**31 else np.int64
    if index_bits + length_bits + num_groups.bit_length() > 63:
        order = np.lexsort((-lengths, groups)).astype(kind)
        in_order = groups[order]
    else:
        key = groups.astype(np.int64)
        key <<= length_bits
        key |= longest - lengths
        key <<= index_bits
        key |= np.arange(number)
        key.sort()
        order = (key & ((1 << index_bits) - 1)).astype(kind)
        in_order = key >> (index_bits + length_bits)
    ends: Numbers = np.append(np.flatnonzero(in_order[1:] != in_order[:-1]) + 1, number)
    return order, ends


def _cut(most: Numbers, ends: Numbers) -> Numbers:
    """Walk all groups at once, each from batch to batch, and return where batches start."""
    at, stops, found = np.concatenate(([0], ends[:-1])), ends, []
    while len(at):
        found.append(at)
        at = at + np.maximum(most[at], 1)
        is_left = at < stops
        at, stops = at[is_left], stops[is_left]
    return np.sort(np.concatenate(found))


def _classes(second: Numbers, num_classes: int) -> Numbers:
    """Part samples into classes of about as many each by their second length, alike ones together."""
    edges = np.unique(np.quantile(second, np.arange(1, num_classes) / num_classes, method="lower"))
    return np.searchsorted(edges, second, side="left")
