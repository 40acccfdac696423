"""Do the ranks draw from the same data? Where each has a stratum of its own, the spread between them is no noise.

Told by the size of the gradients: where one rank's are larger or smaller than another's again and again, by more than
chance allows. Strata whose gradients differ only in direction are not seen.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_LEAST_STEPS = 20
# So many standard errors; with few ranks and a look at every step, chance alone hardly ever gets there.
_TOO_FAR = 6.0


class RanksAlike:
    """Keeps the mean and spread of each rank's deviation from the mean over ranks.

    >>> alike = RanksAlike()
    >>> [alike.add((1.0 + step % 3, 9.0 + step % 2)) for step in range(30)].count(True)
    1
    """

    warning = (
        "the gradients of some ranks are larger than those of others throughout: ranks with data of their own (sorted "
        "or stratified) make the spread between them look like noise. Shuffle before the data is cut over ranks"
    )

    def __init__(self) -> None:
        self._number = 0
        self._means: list[float] = []
        self._squares: list[float] = []
        self._has_warned = False

    def add(self, squares: Sequence[float]) -> bool:
        """Take the mean |g|^2 of each rank's parts of one step; return whether it is time to warn."""
        total = sum(squares)
        if len(squares) < 2 or not total or self._has_warned:
            return False
        if len(squares) != len(self._means):
            self._number, self._means, self._squares = 0, [0.0] * len(squares), [0.0] * len(squares)
        self._number += 1
        for rank, value in enumerate(squares):
            # In parts of the mean, so that steps of large gradients do not outweigh the others.
            share = value * len(squares) / total - 1
            before = share - self._means[rank]
            self._means[rank] += before / self._number
            self._squares[rank] += before * (share - self._means[rank])
        if self._number < _LEAST_STEPS:
            return False
        errors = [math.sqrt(square / (self._number - 1) / self._number) for square in self._squares]
        self._has_warned = (
            any(abs(mean) > _TOO_FAR * error for mean, error in zip(self._means, errors, strict=True))
            and max(map(abs, self._means)) > 1e-3
        )
        return self._has_warned
