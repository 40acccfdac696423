"""Samples that are over the budget by themselves: an error, left out, or each a batch of its own, as asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from batchwright.errors import InvalidInputError
from batchwright.units import counted, shortened

if TYPE_CHECKING:
    import numpy.typing as npt

    from batchwright.sampler.cost import Budget

    Numbers = npt.NDArray[np.int64]

OVERSIZE = ("error", "drop", "single")


@dataclass(frozen=True)
class Usable:
    """The samples that take part, all where None, and how many were left out or stand alone."""

    samples: Numbers | None = None
    num_dropped: int = 0
    num_single: int = 0


def usable_samples(lengths: Numbers, budget: Budget, choice: str) -> Usable:
    """Find the samples over the budget, and do with them as was chosen.

    >>> from batchwright.sampler.cost import Budget
    >>> usable_samples(np.array([[5], [9]]), Budget(8), "drop").samples
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
