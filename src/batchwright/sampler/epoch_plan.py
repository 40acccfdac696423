"""One epoch planned: which samples make which batch, for which rank, in which round.

Promises:
- every sample comes exactly once, for any number of ranks;
- a plan is a function of seed, epoch and what is left of the epoch: it is made anew, never replayed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from batchwright.sampler.epoch_order import CutOrder, cut_in_windows
from batchwright.sampler.rounds import Rounds, deal

if TYPE_CHECKING:
    from collections.abc import Callable

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


@dataclass
class FirstEpoch:
    """How many batches epoch 0 has, by which every epoch has as many rounds: noted when it is planned, else counted."""

    count: Callable[[], int]
    number: int | None = None

    def batches(self) -> int:
        """Return them."""
        if self.number is None:
            self.number = self.count()
        return self.number


def rounds_of_every_epoch(first_batches: int, mixing: Mixing, ranks: int) -> int:
    """Return the rounds of every epoch: those of the first, and some to spare, so that the others do not need more.

    A Trainer and Lightning take the length of one epoch for all. Windows differ in their samples from epoch to epoch,
    and so in their batches, by about one in two or three.
    """
    return -(-(first_batches + math.ceil(2 * math.sqrt(mixing.num_windows - 1))) // ranks)


def cut_epoch(
    lengths: Numbers,
    budget: Budget,
    mixing: Mixing,
    *,
    rng: np.random.Generator,
    left: Numbers | None = None,
    most_batches: int | None = None,
) -> CutOrder:
    """Cut an epoch, or what is `left` of one, into batches; where they are too many, with less shuffling."""
    some = lengths if left is None else lengths[left]
    windows = mixing.num_windows
    while True:
        cut = cut_in_windows(some, budget, num_windows=windows, num_classes=mixing.num_classes, rng=rng)
        if windows == 1 or most_batches is None or len(cut.starts) <= most_batches:
            return cut if left is None else replace(cut, order=left[cut.order])
        windows //= 2


def plan_epoch(
    lengths: Numbers, cut: CutOrder, budget: Budget, *, ranks: int, rng: np.random.Generator, least_rounds: int = 0
) -> EpochPlan:
    """Deal the batches of an epoch to so many ranks.

    >>> from batchwright.sampler.cost import Budget
    >>> lengths, rng = np.array([[5], [1], [4], [2], [3]]), np.random.default_rng(0)
    >>> plan = plan_epoch(lengths, cut_epoch(lengths, Budget(9), Mixing(1), rng=rng), Budget(9), ranks=2, rng=rng)
    >>> sorted(sample for index in range(plan.rounds.number) for rank in (0, 1) for sample in plan.batch(index, rank))
    [0, 1, 2, 3, 4]
    """
    return EpochPlan(lengths, cut.order, deal(cut, budget, ranks=ranks, rng=rng, least_rounds=least_rounds), budget)
