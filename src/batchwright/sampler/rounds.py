"""Batches dealt to ranks: one for each in every round, of like cost, in shuffled order.

Promises:
- every rank has as many batches as the others, and no sample comes twice;
- where the last round is short of batches, some are split; where it is short of samples, a rank repeats one that counts
  nothing;
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
    """Batches of the first rounds' last places that only keep a rank in step: they repeat a sample at weight 0."""

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
    [(0, 2), (2, 4), (4, 7), (7, 8)]
    """
    number = len(starts)
    if number == 0:
        return Rounds(np.zeros((0, ranks), np.int64), np.zeros((0, ranks), np.int64))
    # The batches with most samples can best be split; they make the last round.
    left = number % ranks
    by_samples = np.argsort(starts - stops, kind="stable")
    split, whole = by_samples[:left], by_samples[left:]
    # Of like cost together, then shuffled: rounds among each other, and who gets what within one.
    whole = whole[np.argsort(-costs[whole], kind="stable")].reshape(-1, ranks)
    whole = rng.permuted(whole, axis=1)[rng.permutation(len(whole))]
    first, last, repeats = starts[whole], stops[whole], 0
    if left:
        some, ends, repeats = _split(starts[split], stops[split], ranks)
        first, last = np.vstack([first, some]), np.vstack([last, ends])
    return Rounds(first, last, repeats)


def _split(starts: Numbers, stops: Numbers, ranks: int) -> tuple[Numbers, Numbers, int]:
    """Split fewer batches than ranks into one for each; repeats come last."""
    sizes = stops - starts
    pieces = np.ones(len(sizes), np.int64)
    for _ in range(ranks - len(sizes)):
        most = np.argmax(sizes / pieces * (sizes > pieces))
        if sizes[most] <= pieces[most]:
            break
        pieces[most] += 1
    first, last = [], []
    for start, stop, parts in zip(starts, stops, pieces, strict=True):
        edges = np.linspace(start, stop, parts + 1).round().astype(np.int64)
        first.append(edges[:-1])
        last.append(edges[1:])
    begin, end = np.concatenate(first), np.concatenate(last)
    missing = ranks - len(begin)
    return (
        np.append(begin, np.repeat(begin[:1], missing)),
        np.append(end, np.repeat(begin[:1] + 1, missing)),
        int(missing),
    )
