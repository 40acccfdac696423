"""What a batch costs, padded to its longest sample, and how many samples of a length stay within a budget.

A sample that is over the budget on its own is an error, is left out, or is a batch by itself, as `oversize` says.

Promises:
- a budget is a bound, never a target: a batch that is cut by it costs at most that;
- everything is a formula of whole arrays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

from batchwright.errors import InvalidInputError
from batchwright.units import LARGEST_COUNT, counted, shortened, whole_number

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BatchCost:
    """`fixed + per_token * n * L + per_token_squared * n * L^2` for n samples padded to L tokens.

    >>> BatchCost().of(np.array([4]), np.array([100]))
    array([400.])
    >>> BatchCost(fixed=10.0, per_token=1.0, per_token_squared=0.01).of(np.array([4]), np.array([100]))
    array([810.])
    """

    fixed: float = 0.0
    per_token: float = 1.0
    per_token_squared: float = 0.0

    def __post_init__(self) -> None:
        for name in ("fixed", "per_token", "per_token_squared"):
            value = getattr(self, name)
            if not isinstance(value, Real) or not 0 <= float(value) < math.inf:
                raise InvalidInputError(f"{name} of a cost must be 0 or more; received {shortened(value)}.")
        if not self.per_token and not self.per_token_squared:
            raise InvalidInputError("a cost must grow with the tokens: per_token or per_token_squared above 0.")

    def of(self, samples: Numbers, longest: Numbers) -> npt.NDArray[np.float64]:
        """Return the cost of batches of so many samples, padded to so many tokens."""
        return self.fixed + samples * self.of_sample(longest)

    def of_sample(self, longest: Numbers) -> npt.NDArray[np.float64]:
        """Return what each further sample of this length adds."""
        length = longest.astype(np.float64)
        return length * self.per_token + length * length * self.per_token_squared


@dataclass(frozen=True)
class Budget:
    """The most that a batch may cost, and what else bounds its samples."""

    limit: float
    cost: BatchCost = BatchCost()
    max_samples: int | None = None
    multiple_of: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.limit, bool) or not isinstance(self.limit, Real) or not 0 < float(self.limit) < math.inf:
            raise InvalidInputError(
                f"the budget of a batch must be a number above 0, of tokens or of its cost; received "
                f"{shortened(self.limit)}."
            )
        if not isinstance(self.cost, BatchCost):
            raise InvalidInputError(
                f"cost must be a BatchCost; received {shortened(self.cost)}.",
                remedy="bw.BatchCost(per_token=1.0)",
            )
        whole_number(self.multiple_of, "multiple_of")
        if self.max_samples is not None and whole_number(self.max_samples, "max_samples") < self.multiple_of:
            raise InvalidInputError(
                f"max_samples={self.max_samples} is below multiple_of={self.multiple_of}: no batch is both."
            )

    def most_samples(self, longest: Numbers) -> Numbers:
        """Return how many samples padded to each length fit; 0 where not even one does.

        >>> Budget(16_384).most_samples(np.array([8, 100, 4096, 20_000]))
        array([2048,  163,    4,    0])
        >>> Budget(16_384, multiple_of=8).most_samples(np.array([100, 4096]))
        array([160,   4])
        """
        room, per_sample = float(self.limit) - self.cost.fixed, self.cost.of_sample(longest)
        # Rounding may have gone either way: one more if that fits as well, one less if this does not.
        most = np.clip(np.floor(room / per_sample), 0, LARGEST_COUNT).astype(np.int64)
        most += (most + 1) * per_sample <= room
        most -= (most > 0) & (most * per_sample > room)
        if self.max_samples is not None:
            np.minimum(most, self.max_samples, out=most)
        if self.multiple_of > 1:
            # Fewer than one multiple are left as they are: the samples must go somewhere.
            most = np.where(most >= self.multiple_of, most - most % self.multiple_of, most)
        return most

    def to_dict(self) -> dict[str, Any]:
        """Return the budget as plain data."""
        return {
            "limit": self.limit,
            "fixed": self.cost.fixed,
            "per_token": self.cost.per_token,
            "per_token_squared": self.cost.per_token_squared,
            "max_samples": self.max_samples,
            "multiple_of": self.multiple_of,
        }


OVERSIZE = ("error", "drop", "single")


@dataclass(frozen=True)
class Usable:
    """The samples that take part, all where None, and how many were left out or stand alone."""

    samples: Numbers | None = None
    num_dropped: int = 0
    num_single: int = 0


def select_usable(lengths: Numbers, budget: Budget, choice: str) -> Usable:
    """Find the samples over the budget, and do with them as was chosen.

    >>> from batchwright.sampler.cost import Budget
    >>> select_usable(np.array([[5], [9]]), Budget(8), "drop").samples
    array([0])
    """
    if choice not in OVERSIZE:
        raise InvalidInputError(f"oversize is {', '.join(OVERSIZE)}; received {shortened(choice)}.")
    totals = lengths[:, 0] if lengths.shape[1] == 1 else lengths.sum(axis=1)
    longest = np.array([totals.max(initial=1)])
    is_any = budget.most_samples(longest)[0] < 1
    too_long = np.flatnonzero(budget.most_samples(totals) < 1) if is_any else np.zeros(0, np.int64)
    if not len(too_long) or choice == "single":
        return Usable(num_single=len(too_long))
    if choice == "drop" and len(too_long) == len(lengths):
        raise InvalidInputError(
            f"of {counted(len(lengths), 'sample')} every one costs more than the budget of {budget.limit:g} alone.",
            remedy=f"a budget of at least {float(budget.cost.of(np.array([1]), np.array([totals.min()]))[0]):g}",
        )
    if choice == "drop":
        return Usable(np.delete(np.arange(len(lengths)), too_long), num_dropped=len(too_long))
    raise InvalidInputError(
        f"{counted(len(too_long), 'sample')} of {len(lengths):,} cost more than the budget of {budget.limit:g} alone: "
        f"the first is sample {too_long[0]:,}, the longest has {int(totals.max()):,} tokens.",
        remedy='a larger budget, oversize="drop", or oversize="single" for a batch of its own',
    )
