"""How the samples of one optimizer step are cut over devices and micro-batches, counted over an epoch, and run.

Promises:
- accumulation is the fewest micro-batches that fit, whatever the policy;
- no micro-batch exceeds the cap, and any two differ by at most one sample;
- every answer but a divisor is a closed formula: the cost does not grow with the batch; a divisor takes no more trials
  than half the cap, or half the root of the number if that is less;
- forwards of an epoch are counted per device; ranks run the same number. With `drop_last` the incomplete micro-batch is
  dropped, and nothing else. An incomplete last window is run to its end and updates once, as Trainer, accelerate,
  Lightning and `Accumulator` do.

Promises of the batch sampler:
- every sample of the dataset once per epoch over all ranks (with `drop_last`, all but an incomplete micro-batch);
- the same order for the same (seed, epoch) on every rank, so the ranks never share a sample;
- every rank yields the same number of batches; an empty micro-batch repeats one sample at weight 0.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, cast, get_args

from batchwright.errors import InvalidInputError
from batchwright.units import counted, whole_number

Policy = Literal["nearest", "at-least", "at-most", "exact"]
POLICIES: tuple[Policy, ...] = get_args(Policy)


@dataclass(frozen=True)
class Weight:
    """How many micro-batches of one size a window holds, and what each counts for in its mean."""

    micro_batch: int
    count: int
    weight: float


@dataclass(frozen=True)
class Split:
    """`samples` cut as evenly as they go over `devices` ranks of `accumulation` micro-batches each.

    >>> split = Split(samples=10, accumulation=2, devices=3)
    >>> [list(split.micro_batches(rank)) for rank in range(3)]
    [[2, 2], [1, 2], [1, 2]]
    >>> [(w.micro_batch, w.count, w.weight) for w in split.weights]
    [(2, 4, 0.2), (1, 2, 0.1)]
    """

    samples: int
    accumulation: int
    devices: int

    @property
    def slots(self) -> int:
        """Micro-batches in the window, over all devices."""
        return self.accumulation * self.devices

    @property
    def largest(self) -> int:
        """Samples in the largest micro-batch."""
        return -(-self.samples // self.slots)

    @property
    def smallest(self) -> int:
        """Samples in the smallest micro-batch; 0 if there are fewer samples than micro-batches."""
        return self.samples // self.slots

    @property
    def is_even(self) -> bool:
        """Whether all micro-batches have the same size."""
        return self.samples % self.slots == 0

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The sizes that occur, largest first; the weights of all micro-batches together sum to one."""
        num_large = self.samples % self.slots
        runs = [(self.largest, num_large), (self.smallest, self.slots - num_large)]
        return tuple(Weight(size, count, size / self.samples) for size, count in runs if count)

    def rank_samples(self, rank: int) -> int:
        """Samples that one rank processes; ranks differ by at most one."""
        return self.samples // self.devices + (rank < self.samples % self.devices)

    def rank_offset(self, rank: int) -> int:
        """Samples that the ranks before this one process."""
        return rank * (self.samples // self.devices) + min(rank, self.samples % self.devices)

    def micro_batches(self, rank: int) -> Iterator[int]:
        """Yield the sizes of one rank's micro-batches in the order they run."""
        small, num_large = divmod(self.rank_samples(rank), self.accumulation)
        # Small ones first: the last micro-batch is the one that synchronises gradients, and it must not be
        # the empty one if there are fewer samples than micro-batches.
        for step in range(self.accumulation):
            yield small + (step >= self.accumulation - num_large)

    def samples_in_first(self, steps: int) -> int:
        """Samples that all devices together have processed after `steps` micro-batches."""
        ranks_with_more = self.samples % self.devices
        return ranks_with_more * self._rank_samples_in_first(steps, self.rank_samples(0)) + (
            self.devices - ranks_with_more
        ) * self._rank_samples_in_first(steps, self.samples // self.devices)

    def _rank_samples_in_first(self, steps: int, rank_samples: int) -> int:
        small, num_large = divmod(rank_samples, self.accumulation)
        return steps * small + max(0, steps - (self.accumulation - num_large))


def divisors(number: int, *, at_most: int) -> list[int]:
    """List the divisors of a number within a cap, smallest first.

    >>> divisors(360, at_most=20)
    [1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 15, 18, 20]
    """
    sizes = {1}
    for prime in _prime_factors(number, at_most=at_most):
        sizes |= {size * prime for size in sizes if size * prime <= at_most}
    return sorted(sizes)


def largest_divisor(number: int, *, at_most: int) -> int:
    """Return the largest divisor of a number within a cap.

    >>> largest_divisor(256, at_most=48), largest_divisor(7, at_most=3)
    (32, 1)
    """
    return divisors(number, at_most=at_most)[-1]


def _prime_factors(number: int, *, at_most: int) -> Iterator[int]:
    """Yield the prime factors within a cap, each as often as it occurs."""
    rest = number
    # No divisor within the cap has a prime factor above it, so a small cap makes huge numbers cheap.
    for factor in chain((2,), range(3, at_most + 1, 2)):
        if factor * factor > rest:
            break
        while rest % factor == 0:
            rest //= factor
            yield factor
    if 1 < rest <= at_most:
        yield rest


def least_accumulation(effective_batch: int, *, max_micro_batch: int, devices: int) -> int:
    """Return the fewest micro-batches per device that hold the effective batch.

    >>> least_accumulation(1024, max_micro_batch=48, devices=4)
    6
    """
    return -(-effective_batch // (max_micro_batch * devices))


def choose_split(effective_batch: int, *, max_micro_batch: int, devices: int, policy: Policy) -> Split:
    """Cut an effective batch: accumulation first, then the micro-batch as the policy wants it.

    >>> choose_split(1024, max_micro_batch=48, devices=4, policy="nearest")
    Split(samples=1032, accumulation=6, devices=4)
    >>> choose_split(1024, max_micro_batch=48, devices=4, policy="at-most")
    Split(samples=1008, accumulation=6, devices=4)
    """
    accumulation = least_accumulation(effective_batch, max_micro_batch=max_micro_batch, devices=devices)
    if effective_batch < devices and policy in ("at-most", "exact"):
        raise InvalidInputError(
            f"effective batch {effective_batch:,} is below the number of devices, {devices:,}: "
            f"{counted(devices - effective_batch, 'device')} would have no sample, "
            f'which policy="{policy}" does not allow.',
            remedy=f'policy="nearest" or policy="at-least" (one sample each, effective batch {devices:,}), '
            f"or at most {effective_batch:,} devices",
        )
    if policy == "exact":
        return Split(effective_batch, accumulation, devices)
    slots = accumulation * devices
    below, remainder = divmod(effective_batch, slots)
    if policy == "at-most":
        if below == 0:
            # Only at a cap of 1 (a larger cap would have needed fewer micro-batches): one micro-batch less.
            return Split((accumulation - 1) * devices, accumulation - 1, devices)
        return Split(below * slots, accumulation, devices)
    rounds_up = remainder > 0 if policy == "at-least" else 2 * remainder >= slots
    return Split(max(1, below + rounds_up) * slots, accumulation, devices)


@dataclass(frozen=True)
class LastWindow:
    """The incomplete window at the end of an epoch."""

    samples: int
    micro_batches: int
    update: bool = True
    """Always; files of earlier runs may say otherwise."""


@dataclass(frozen=True)
class Epoch:
    """One pass over `samples`.

    >>> epoch = count_epoch(10_000, Split(samples=32, accumulation=2, devices=1), drop_last=True)
    >>> epoch.forwards, epoch.updates, epoch.last_window
    (625, 313, LastWindow(samples=16, micro_batches=1, update=True))
    """

    samples: int
    forwards: int
    updates: int
    dropped: int
    last_window: LastWindow | None


def count_epoch(samples: int, split: Split, *, drop_last: bool) -> Epoch:
    """Count the forwards per device and the updates of one epoch."""
    windows, rest = divmod(samples, split.samples)
    if drop_last:
        # The most micro-batches, whole on every device, that the rest fills: found by halving, not by stepping.
        whole = bisect_right(range(1, split.accumulation + 1), rest, key=split.samples_in_first) if rest else 0
        kept = split.samples_in_first(whole)
    else:
        kept, whole = rest, -(-rest // (split.largest * split.devices))
    if not kept:
        return Epoch(samples, windows * split.accumulation, windows, rest, None)
    forwards = windows * split.accumulation + whole
    return Epoch(samples, forwards, windows + 1, rest - kept, LastWindow(kept, whole))


@dataclass
class PlanBatchSampler:
    """Yields lists of sample numbers; hand it to `DataLoader(dataset, batch_sampler=...)`.

    >>> sampler = PlanBatchSampler(Split(samples=4, accumulation=2, devices=1), rank=0, samples=6, shuffle=False)
    >>> list(zip(sampler, sampler.weights()))
    [([0, 1], 0.5), ([2, 3], 0.5), ([4, 5], 1.0)]
    """

    split: Split
    rank: int
    samples: int
    drop_last: bool = False
    seed: int = 0
    shuffle: bool = True
    epoch: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.rank >= self.split.devices:
            raise InvalidInputError(
                f"rank {self.rank} does not exist in a plan for {self.split.devices} devices; "
                f"ranks run from 0 to {self.split.devices - 1}."
            )

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order is yielded next, as torch's own distributed sampler does."""
        self.epoch = whole_number(epoch, "epoch", least=0)

    def windows(self) -> Iterator[Split]:
        """Yield the split of each optimizer step in the epoch; only the last one may differ."""
        epoch = count_epoch(self.samples, self.split, drop_last=self.drop_last)
        last = epoch.last_window
        for _ in range(epoch.updates - (last is not None)):
            yield self.split
        if last is not None:
            yield Split(last.samples, last.micro_batches, self.split.devices)

    def weights(self) -> Iterator[float]:
        """Yield the weight of each batch, in step with it: its share of the samples of its optimizer step.

        The weights of one step sum to one over all ranks. If ranks average gradients (DDP), multiply by the
        number of ranks.
        """
        for window in self.windows():
            for size in window.micro_batches(self.rank):
                yield size / window.samples

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        start = 0
        for window in self.windows():
            at = start + window.rank_offset(self.rank)
            for size in window.micro_batches(self.rank):
                # A loader cannot collate an empty batch, and a rank that sits a pass out would hang the others.
                yield [int(i) for i in order[at : at + size]] or [int(order[start])]
                at += size
            start += window.samples

    def __len__(self) -> int:
        return count_epoch(self.samples, self.split, drop_last=self.drop_last).forwards

    def _order(self) -> Sequence[int]:
        if not self.shuffle:
            return range(self.samples)
        # Imported here: planning itself needs no numpy, only running the plan does.
        import numpy as np

        return cast("Sequence[int]", np.random.default_rng([self.seed, self.epoch]).permutation(self.samples))
