"""Batches dealt to ranks: one for each in every round, of like cost, in shuffled order.

Promises:
- every rank has as many batches as the others, and no sample comes twice;
- where batches do not go up in rounds, some are split; where there are fewer samples than places, ranks repeat one that
  counts nothing, in the last round;
- within a round costs are as alike as the batches allow, so that ranks hardly wait for each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rounds:
    """Where each batch starts and ends in the order of the epoch: rounds x ranks."""

    starts: Numbers
    stops: Numbers
    num_repeats: int = 0
    """The last ranks' batches of the last round that only keep them in step: they repeat a sample at weight 0."""

    @property
    def number(self) -> int:
        """Rounds of the epoch."""
        return len(self.starts)

    def is_repeat(self, index: int, rank: int) -> bool:
        """Whether a batch counts nothing."""
        return self.num_repeats > 0 and index == self.number - 1 and rank >= self.starts.shape[1] - self.num_repeats


def deal(
    starts: Numbers, stops: Numbers, costs: npt.NDArray[np.float64], *, ranks: int, rng: np.random.Generator
) -> Rounds:
    """Deal batches to ranks.

    >>> found = deal(np.array([0, 4, 7]), np.array([4, 7, 8]), np.array([4.0, 3.0, 1.0]), ranks=2,
    ...              rng=np.random.default_rng(0))
    >>> sorted(zip(found.starts.ravel().tolist(), found.stops.ravel().tolist()))
    [(0, 4), (4, 5), (5, 7), (7, 8)]
    """
    number = len(starts)
    if number == 0:
        return Rounds(np.zeros((0, ranks), np.int64), np.zeros((0, ranks), np.int64))
    split = _to_split(stops - starts, ranks, rng)
    whole = np.delete(np.arange(number), split)
    # Of like cost together; who gets what within a round is shuffled.
    whole = rng.permuted(whole[np.argsort(-costs[whole], kind="stable")].reshape(-1, ranks), axis=1)
    first, last, repeats = starts[whole], stops[whole], 0
    if len(split):
        begins, ends = _pieces(starts[split], stops[split], -(-len(split) // ranks) * ranks)
        repeats = -len(begins) % ranks
        ends = np.append(ends, np.repeat(begins[:1] + 1, repeats)).reshape(-1, ranks)
        begins = np.append(begins, np.repeat(begins[:1], repeats)).reshape(-1, ranks)
        first, last = np.vstack([first, begins]), np.vstack([last, ends])
    order = rng.permutation(len(first) - (repeats > 0))
    first[: len(order)], last[: len(order)] = first[order], last[order]
    return Rounds(first, last, repeats)


def _to_split(sizes: Numbers, ranks: int, rng: np.random.Generator) -> Numbers:
    """Choose batches to split, so that their pieces and the others go up in rounds.

    Any will do that has samples enough, so that no kind of sample always ends up in pieces. Where there are too few of
    those, the largest, a round more of them at a time until they have a sample for every place.
    """
    left = len(sizes) % ranks
    if not left:
        return np.zeros(0, np.int64)
    enough = np.flatnonzero(sizes >= -(-ranks // left))
    if len(enough) >= left:
        return rng.choice(enough, left, replace=False)
    by_samples = np.argsort(-sizes, kind="stable")
    takes = np.arange(left, len(sizes) + 1, ranks)
    is_enough = np.cumsum(sizes[by_samples])[takes - 1] >= ranks * np.arange(1, len(takes) + 1)
    return by_samples[: takes[np.argmax(is_enough)] if is_enough.any() else len(sizes)]


def _pieces(starts: Numbers, stops: Numbers, places: int) -> tuple[Numbers, Numbers]:
    """Split batches into as many pieces as there are places, the largest pieces first; fewer where samples are."""
    sizes = stops - starts
    parts = np.ones(len(sizes), np.int64)
    for _ in range(places - len(sizes)):
        most = np.argmax(np.where(sizes > parts, sizes / parts, 0.0))
        if sizes[most] <= parts[most]:
            break
        parts[most] += 1
    batch = np.repeat(np.arange(len(sizes)), parts)
    piece: Numbers = np.arange(len(batch)) - np.repeat(np.cumsum(parts) - parts, parts)
    begins = starts[batch] + (piece * sizes[batch] // parts[batch]).astype(np.int64)
    ends = starts[batch] + ((piece + 1) * sizes[batch] // parts[batch]).astype(np.int64)
    by_size = np.argsort(begins - ends, kind="stable")
    return begins[by_size], ends[by_size]
