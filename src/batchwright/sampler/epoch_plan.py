"""One epoch planned: which samples make which batch, for which rank, in which round.

Promises:
- every sample comes exactly once, for any number of ranks;
- a plan is a function of seed, epoch and what is left of the epoch: it is made anew, never replayed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from batchwright.sampler.epoch_order import cut_in_windows
from batchwright.sampler.rounds import Rounds, deal

if TYPE_CHECKING:
    import numpy.typing as npt

    from batchwright.sampler.cost import Budget

    Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Mixing:
    """How far samples are thrown about before they are sorted."""

    num_windows: int
    num_classes: int = 1
    """By the second length, where there are two."""


@dataclass(frozen=True)
class EpochPlan:
    """The batches of an epoch, or of what was left of one."""

    lengths: Numbers
    samples: npt.NDArray[np.int32] | Numbers
    """In the order of the batches."""
    rounds: Rounds
    budget: Budget

    def batch(self, index: int, rank: int) -> list[int]:
        """Return the samples of one rank in one round."""
        found: list[int] = self.samples[self.rounds.starts[index, rank] : self.rounds.stops[index, rank]].tolist()
        return found

    def left_after(self, num_rounds: int) -> Numbers:
        """Return the samples that the first rounds leave over."""
        taken = np.zeros(len(self.samples) + 1, np.int64)
        np.add.at(taken, self.rounds.starts[:num_rounds], 1)
        np.add.at(taken, self.rounds.stops[:num_rounds], -1)
        return np.sort(self.samples[np.cumsum(taken[:-1]) == 0]).astype(np.int64)

    @cached_property
    def _real(self) -> npt.NDArray[np.bool_]:
        real = np.ones(self.rounds.starts.shape, bool)
        if self.rounds.num_repeats:
            real[-1, -self.rounds.num_repeats :] = False
        return real

    @cached_property
    def sizes(self) -> Numbers:
        """Samples of each batch: rounds x ranks, 0 where it only keeps step."""
        return (self.rounds.stops - self.rounds.starts) * self._real

    @cached_property
    def longest(self) -> Numbers:
        """Tokens that each batch is padded to."""
        return self._reduced(np.maximum)

    @cached_property
    def tokens(self) -> Numbers:
        """Tokens of each batch that are no padding."""
        return self._reduced(np.add)

    @cached_property
    def costs(self) -> npt.NDArray[np.float64]:
        """What each batch costs."""
        return np.where(self.sizes > 0, self.budget.cost.of(self.sizes, self.longest), 0.0)

    def _reduced(self, how: np.ufunc) -> Numbers:
        """Reduce the lengths of each batch, the columns apart, and add up the columns."""
        shape = self.rounds.starts.shape
        if not len(self.samples):
            return np.zeros(shape, np.int64)
        flat = self.rounds.starts.ravel()
        # Batches tile the order but for repeats, which come last: reduce by starts in order, then put back.
        in_order = np.argsort(flat, kind="stable")
        unique, back = np.unique(flat[in_order], return_inverse=True)
        total = sum(how.reduceat(self.lengths[self.samples, column], unique) for column in range(self.lengths.shape[1]))
        found = np.empty(len(flat), np.int64)
        found[in_order] = np.asarray(total)[back]
        return found.reshape(shape) * self._real


def plan_epoch(
    lengths: Numbers,
    budget: Budget,
    mixing: Mixing,
    *,
    ranks: int,
    rng: np.random.Generator,
    left: Numbers | None = None,
) -> EpochPlan:
    """Plan an epoch, or what is `left` of one, for so many ranks.

    >>> from batchwright.sampler.cost import Budget
    >>> lengths = np.array([[5], [1], [4], [2], [3]])
    >>> plan = plan_epoch(lengths, Budget(9), Mixing(1), ranks=2, rng=np.random.default_rng(0))
    >>> sorted(sample for index in range(plan.rounds.number) for rank in (0, 1) for sample in plan.batch(index, rank))
    [0, 1, 2, 3, 4]
    """
    some = lengths if left is None else lengths[left]
    cut = cut_in_windows(some, budget, num_windows=mixing.num_windows, num_classes=mixing.num_classes, rng=rng)
    samples = cut.order if left is None else left[cut.order]
    costs = budget.cost.of(cut.stops - cut.starts, cut.longest)
    return EpochPlan(lengths, samples, deal(cut.starts, cut.stops, costs, ranks=ranks, rng=rng), budget)
