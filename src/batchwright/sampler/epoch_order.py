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

# As many as these leave next to no ties.
_TIE_BITS = 16


@dataclass(frozen=True)
class CutOrder:
    """The samples of an epoch, and where each batch starts; the last ends with the samples."""

    order: npt.NDArray[np.int32] | Numbers
    starts: Numbers
    longest: Numbers
    """Tokens that each batch is padded to."""
    padded: Numbers
    """Tokens of each sample, both lengths together, in this order."""

    def padded_to(self, starts: Numbers, stops: Numbers) -> Numbers:
        """Return what parts of batches are padded to: their longest sample; of two lengths, about that."""
        if not len(starts):
            return np.zeros(0, np.int64)
        edges = np.stack([starts, np.minimum(stops, len(self.padded) - 1)], axis=1).ravel()
        return np.maximum(np.maximum.reduceat(self.padded, edges)[::2], self.padded[stops - 1])

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
    >>> cut.order.tolist(), cut.starts.tolist(), cut.longest.tolist()
    ([0, 2, 4, 3, 1], [0, 1, 3], [5, 4, 2])
    """
    number = len(lengths)
    if number == 0:
        nothing = np.zeros(0, np.int64)
        return CutOrder(np.zeros(0, np.int32), nothing, nothing, nothing)
    has_two = lengths.shape[1] == 2
    if has_two and np.ptp(lengths[:, 1]) > np.ptp(lengths[:, 0]):
        lengths = lengths[:, ::-1]  # sorted by the one that differs more
    groups = rng.integers(0, num_windows, number, dtype=np.uint32).astype(np.int64)
    if has_two and num_classes > 1:
        groups = groups * num_classes + _classes(lengths[:, 1], num_classes)
    order, padded, ends = _sorted(lengths[:, 0], groups, num_windows * num_classes, rng)
    if not has_two:
        starts = _cut(padded, budget, ends)
        return CutOrder(order, starts, padded[starts], padded)
    second = lengths[order, 1]
    starts = _cut_by_two(padded, second, budget, ends)
    return CutOrder(order, starts, padded[starts] + np.maximum.reduceat(second, starts), padded + second)


def _sorted(
    lengths: Numbers, groups: Numbers, num_groups: int, rng: np.random.Generator
) -> tuple[Any, Numbers, Numbers]:
    """Return the samples by group, longest first, their lengths, and where each group that has any ends.

    Samples of one length are in random order: by their number they would meet again in every epoch.
    """
    number, longest = len(lengths), int(lengths.max())
    index_bits, length_bits = max(number - 1, 1).bit_length(), longest.bit_length()
    spare = 63 - index_bits - length_bits - num_groups.bit_length()
    kind: Any = np.int32 if number < 2**31 else np.int64
    if spare < 0:
        order = np.lexsort((rng.random(number), -lengths, groups)).astype(kind)
        in_order, sorted_lengths = groups[order], lengths[order]
    else:
        tie_bits = min(spare, _TIE_BITS)
        # In place, and ties in half the bytes: with millions of samples every further array costs as much as the sort.
        key = groups
        key <<= length_bits
        key += longest
        key -= lengths
        key <<= tie_bits
        key |= rng.integers(0, 1 << tie_bits, number, dtype=np.uint32)
        key <<= index_bits
        key |= np.arange(number, dtype=kind)
        key.sort()
        order = (key & ((1 << index_bits) - 1)).astype(kind)
        key >>= index_bits + tie_bits
        sorted_lengths = key & ((1 << length_bits) - 1)
        np.subtract(longest, sorted_lengths, out=sorted_lengths)
        key >>= length_bits
        in_order = key
    ends: Numbers = np.append(np.flatnonzero(in_order[1:] != in_order[:-1]) + 1, number)
    return order, sorted_lengths, ends


def _cut(padded: Numbers, budget: Budget, ends: Numbers) -> Numbers:
    """Walk all groups at once, each from batch to batch, and return where batches start."""
    at, stops, found = np.concatenate(([0], ends[:-1])), ends, []
    # How many fit is looked up: by length where there are fewer lengths than samples, else by sample.
    longest = int(padded.max())
    by_length = longest < len(padded)
    most = np.maximum(budget.most_samples(np.arange(1, longest + 1) if by_length else padded), 1)
    while len(at):
        found.append(at)
        at = at + (most[padded[at] - 1] if by_length else most[at])
        is_left = at < stops
        at, stops = at[is_left], stops[is_left]
    return np.sort(np.concatenate(found))


def _cut_by_two(first: Numbers, second: Numbers, budget: Budget, ends: Numbers) -> Numbers:
    """The same for samples of two lengths, sorted by the first: how far a batch goes depends on what it meets.

    The longest second length of a stretch bounds that of a batch within it. So each batch begins with what its whole
    group allows, is tried at stretches that double, and takes the most samples that some stretch allows.
    """
    at, stops, found = np.concatenate(([0], ends[:-1])), ends, []
    bound = np.maximum.reduceat(second, at)
    while len(at):
        found.append(at)
        best = np.minimum(np.maximum(budget.most_samples(first[at] + bound), 1), stops - at)
        reach = 2 * best
        open_ones = np.arange(len(at))
        while len(open_ones):
            begin, end = at[open_ones], np.minimum(at[open_ones] + reach[open_ones], stops[open_ones])
            edges = np.stack([begin, np.minimum(end, len(second) - 1)], axis=1).ravel()
            longest = np.maximum(np.maximum.reduceat(second, edges)[::2], second[end - 1])
            most = np.minimum(budget.most_samples(first[begin] + longest), end - begin)
            best[open_ones] = np.maximum(best[open_ones], most)
            # A stretch that is not full, and not the end, may be longer.
            goes_on = (most == end - begin) & (end < stops[open_ones])
            open_ones = open_ones[goes_on]
            reach[open_ones] *= 2
        if budget.multiple_of > 1:
            best -= np.where(best >= budget.multiple_of, best % budget.multiple_of, 0)
        at = at + best
        is_left = at < stops
        at, stops, bound = at[is_left], stops[is_left], bound[is_left]
    return np.sort(np.concatenate(found))


def _classes(second: Numbers, num_classes: int) -> Numbers:
    """Part samples into classes of about as many each by their second length, alike ones together."""
    edges = np.unique(np.quantile(second, np.arange(1, num_classes) / num_classes, method="lower"))
    return np.searchsorted(edges, second, side="left")
