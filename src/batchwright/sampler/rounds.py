"""Batches dealt to ranks: one for each in every round, of like cost, in shuffled order.

Promises:
- every rank has as many batches as the others, and no sample comes twice;
- batches are split where they do not go up in rounds; where there are fewer samples than places, ranks repeat one that
  counts nothing, in the last round;
- within a round costs are as alike as the batches allow, so that ranks hardly wait for each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from batchwright.sampler.cost import Budget
    from batchwright.sampler.epoch_order import CutOrder

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
        if not 0 <= index < self.number:
            raise IndexError(f"batch {index} of {self.number}")
        return self.num_repeats > 0 and index == self.number - 1 and rank >= self.starts.shape[1] - self.num_repeats


def deal(cut: CutOrder, budget: Budget, *, ranks: int, rng: np.random.Generator, least_rounds: int = 0) -> Rounds:
    """Deal the batches of an epoch to ranks, in `least_rounds` or more where there are samples enough for them.

    >>> from batchwright.sampler.cost import Budget
    >>> from batchwright.sampler.epoch_order import CutOrder
    >>> lengths = np.array([4, 4, 3, 3, 3, 2, 2, 1])
    >>> cut = CutOrder(np.arange(8), np.array([0, 2, 5]), np.array([4, 3, 2]), lengths)
    >>> found = deal(cut, Budget(9), ranks=2, rng=np.random.default_rng(0))
    >>> sorted(zip(found.starts.ravel().tolist(), found.stops.ravel().tolist()))
    [(0, 2), (2, 5), (5, 7), (7, 8)]
    """
    number = len(cut.starts)
    if number == 0:
        return Rounds(np.zeros((0, ranks), np.int64), np.zeros((0, ranks), np.int64))
    rounds = max(-(-number // ranks), min(least_rounds, len(cut.order) // ranks))
    begins, ends, padded = _split(cut, rounds * ranks, ranks, rng)
    # Of like cost together, then shuffled: who gets what within a round, and the rounds among each other.
    by_cost = np.argsort(-budget.cost.of(ends - begins, padded), kind="stable")
    begins, ends = begins[by_cost], ends[by_cost]
    repeats = rounds * ranks - len(begins)
    begins = np.append(begins, np.repeat(begins[:1], repeats)).reshape(rounds, ranks)
    ends = np.append(ends, np.repeat(begins[0, :1] + 1, repeats)).reshape(rounds, ranks)
    places = np.tile(np.arange(ranks), (rounds, 1))
    shuffled = rounds - (repeats > 0)
    places[:shuffled] = rng.permuted(places[:shuffled], axis=1)
    order = np.append(rng.permutation(shuffled), np.arange(shuffled, rounds))[:, None]
    return Rounds(begins[order, places[order[:, 0]]], ends[order, places[order[:, 0]]], repeats)


def _split(cut: CutOrder, places: int, ranks: int, rng: np.random.Generator) -> tuple[Numbers, Numbers, Numbers]:
    """Split batches until there are as many as places; all into single samples where even that is too few.

    Returns where each begins and ends, and what it is padded to. Any batch may be split that has samples enough, so
    that no kind of sample always ends up in pieces; where too few have, the largest are.
    """
    starts, stops = cut.starts, cut.stops
    sizes, more = stops - starts, places - len(starts)
    if more == 0:
        return starts, stops, cut.longest
    if places >= len(cut.order):
        begins = np.arange(len(cut.order))
        return begins, begins + 1, cut.padded
    # Those that are split fill rounds of their own, two pieces each where that comes out.
    wanted = min(len(starts), len(starts) % ranks + more // ranks * ranks)
    enough = np.flatnonzero(sizes * wanted >= wanted + more)
    if len(enough) >= wanted:
        chosen = rng.choice(enough, wanted, replace=False)
    else:
        chosen = np.argsort(-sizes, kind="stable")
        chosen = chosen[: int(np.searchsorted(np.cumsum(sizes[chosen] - 1), more)) + 1]
    kept = np.delete(np.arange(len(starts)), chosen)
    parts = _parts(sizes[chosen], more)
    pieces = [_pieces(cut, int(starts[i]), int(stops[i]), number) for i, number in zip(chosen, parts, strict=True)]
    begins = np.concatenate([starts[kept], *(piece[:-1] for piece in pieces)])
    ends = np.concatenate([stops[kept], *(piece[1:] for piece in pieces)])
    return begins, ends, np.concatenate([cut.longest[kept], cut.padded_to(begins[len(kept) :], ends[len(kept) :])])


def _parts(sizes: Numbers, more: int) -> list[int]:
    """How many pieces to make of each batch, `more` than there are batches, the largest pieces first."""
    parts = np.ones(len(sizes), np.int64) + more // len(sizes)
    np.minimum(parts, sizes, out=parts)
    for _ in range(len(sizes) + more - int(parts.sum())):
        parts[np.argmax(np.where(sizes > parts, sizes / parts, 0.0))] += 1
    found: list[int] = parts.tolist()
    return found


def _pieces(cut: CutOrder, start: int, stop: int, parts: int) -> Numbers:
    """Where to cut a batch into pieces of about as many tokens, at least one sample each."""
    reached = np.cumsum(cut.padded[start:stop])
    inner = np.searchsorted(reached, reached[-1] * np.arange(1, parts) / parts) + 1
    least = np.arange(1, parts)
    inner = np.minimum(np.maximum.accumulate(np.maximum(inner - least, 0)) + least, stop - start - least[::-1])
    return start + np.concatenate(([0], inner, [stop - start]))
