"""How the samples of one optimizer step are cut over devices and micro-batches.

Promises:
- accumulation is the fewest micro-batches that fit, whatever the policy;
- no micro-batch exceeds the cap, and any two differ by at most one sample;
- every answer but a divisor is a closed formula: the cost does not grow with the batch;
- a divisor takes no more trials than half the cap, or half the root of the number where that is less.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Literal, get_args

from batchwright.errors import InvalidInputError
from batchwright.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        """Samples in the smallest micro-batch; 0 where there are fewer samples than micro-batches."""
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
        # the empty one where there are fewer samples than micro-batches.
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
    found = {1}
    for prime in _prime_factors(number, at_most=at_most):
        found |= {size * prime for size in found if size * prime <= at_most}
    return sorted(found)


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
            f"which policy '{policy}' does not allow.",
            remedy=f"policy 'nearest' or 'at-least' (one sample each, effective batch {devices:,}), "
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
