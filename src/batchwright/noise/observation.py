"""One look at the noise of a gradient: what the parts of a batch say about its spread and its size.

Notation, with g the gradient of one unit (a sample, a token): G its mean, T the trace of its covariance. The mean
gradient of n units has E|g_n|^2 = |G|^2 + T/n. The noise scale is T/|G|^2: the units at
which noise and signal are equal.

Promises:
- T and |G|^2 are unbiased, each by itself; |G|^2 is then negative on many steps, and is left so: whoever averages first
  and divides last gets the ratio right, and whoever clamps before does not;
- parts may be of different sizes: micro-batches, those of other ranks, single examples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Observation:
    """Unbiased estimates from one optimizer step."""

    trace: float
    """T, of one unit."""
    signal: float
    """|G|^2; negative at times."""
    units: float
    """Units that went into it: N."""
    parts: int
    """Independent parts that were told apart: K."""

    @property
    def is_finite(self) -> bool:
        """Whether it can be averaged."""
        return math.isfinite(self.trace) and math.isfinite(self.signal)


@dataclass(frozen=True)
class Squares:
    """All that is needed of the gradients of a step: three sums, which add up over micro-batches and ranks.

    A part of n units has the mean gradient g. Kept are the sum of n |g|^2, of n, and how many parts there are.

    >>> one, other = Squares.of([5.0], [1]), Squares.of([1.0], [1])
    >>> one + other
    Squares(weighted=6.0, units=2.0, parts=2)
    """

    weighted: float = 0.0
    units: float = 0.0
    parts: int = 0

    def __add__(self, other: Squares) -> Squares:
        return Squares(self.weighted + other.weighted, self.units + other.units, self.parts + other.parts)

    @staticmethod
    def of(squares: Sequence[float], sizes: Sequence[float]) -> Squares:
        """Sum up parts from |g|^2 and n of each; a part without units tells nothing and is left out."""
        told = [(square, size) for square, size in zip(squares, sizes, strict=True) if size > 0]
        return Squares(sum(s * n for s, n in told), float(sum(n for _, n in told)), len(told))

    def observe(self, square_of_mean: float, *, population: float | None = None) -> Observation | None:
        """Return the estimates, given |mean g|^2 over all parts, weighted by their units; None for fewer than two.

        Takes the variance of a part's gradient as T/n. `population` is the size, in units, of a dataset that is
        drawn from without replacement: two parts are then a little less alike than independent ones, by T/D.

        >>> Squares.of([5.0, 1.0], [1, 1]).observe(2.0)
        Observation(trace=2.0, signal=1.0, units=2.0, parts=2)
        >>> Squares.of([5.0], [1]).observe(5.0) is None
        True
        """
        if self.parts < 2:
            return None
        trace = (self.weighted - self.units * square_of_mean) / (self.parts - 1)
        signal = square_of_mean - trace / self.units
        if population is not None:
            signal += trace / population
        return Observation(trace, signal, self.units, self.parts)


def ratio(trace: float, signal: float) -> float:
    """Return T/|G|^2 of averages: infinite where there is no signal.

    >>> ratio(2.0, 0.5), ratio(2.0, -0.1), ratio(0.0, 0.0)
    (4.0, inf, inf)
    """
    return trace / signal if signal > 0 else math.inf
