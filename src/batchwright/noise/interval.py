"""A confidence interval for a ratio of means: Fieller's set, which knows when it has no upper end.

The noise scale is a mean of T over a mean of |G|^2. Where the latter cannot be told from 0, no upper end exists, and
the usual formulas (delta, jackknife) state a narrow interval all the same: of 95 % they covered 66 % and less.
Fieller's set {B : (a - B c)^2 <= t^2 Var(a - B c)} then has no upper end, and keeps its coverage.

Promises:
- the spread is taken from differences of neighbours (von Neumann 1941), so that a slow drift along training, which is
  no error of the mean, does not widen the interval;
- observations may weigh differently.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from batchwright.units import LARGEST_COUNT

if TYPE_CHECKING:
    import numpy.typing as npt

# Fewer differences than this say next to nothing of a spread.
LEAST_OBSERVATIONS = 5
# The chance that the upper end shows after as many steps as `further_steps` says.
_POWER = 0.8


@dataclass(frozen=True)
class Interval:
    """Where a ratio lies; the upper end is infinite where it is not resolved."""

    value: float
    low: float
    high: float
    further_steps: int | None = None
    """As many more until the upper end is likely to be resolved; None where the denominator is not above 0."""

    @property
    def resolved(self) -> bool:
        """Whether there is an upper end."""
        return math.isfinite(self.high)


def fieller(
    numerators: npt.ArrayLike,
    denominators: npt.ArrayLike,
    weights: npt.ArrayLike | None = None,
    *,
    confidence: float = 0.95,
) -> Interval | None:
    """Return the interval of mean(numerators) / mean(denominators), in the order they were seen; None for too few.

    >>> found = fieller([4.0, 6.0, 5.0, 5.5, 4.5] * 8, [1.0, 1.2, 0.8, 1.1, 0.9] * 8)
    >>> round(found.value, 2), found.resolved, found.low < 5 < found.high
    (5.0, True, True)
    >>> fieller([5.0, 6.0, 4.0, 5.0, 5.0], [1.0, -1.0, 2.0, -1.5, 0.1]).resolved
    False
    """
    a, c = np.asarray(numerators, float), np.asarray(denominators, float)
    if len(a) < LEAST_OBSERVATIONS:
        return None
    w = np.full(len(a), 1 / len(a)) if weights is None else np.asarray(weights, float) / np.sum(weights)
    mean_a, mean_c = float(w @ a), float(w @ c)
    var_a, var_c, cov = _of_neighbours(a, a, w), _of_neighbours(c, c, w), _of_neighbours(a, c, w)
    number = 1 / float(w @ w)
    # What a variance from differences is worth, in degrees of freedom: about two thirds of the usual.
    freedom = 2 * (number - 1) ** 2 / (3 * number - 4)
    t = student_t(0.5 + confidence / 2, freedom)
    low, high = _set_of_ratios(mean_a, mean_c, t * t * var_a, t * t * var_c, t * t * cov)
    # T itself is not negative; its estimate may be, where there is next to no noise.
    value = max(mean_a, 0.0) / mean_c if mean_c > 0 else math.inf
    if math.isfinite(high):
        low, high = min(low, value), max(high, value)  # squares of the smallest numbers are 0
    return Interval(
        value=value,
        low=low,
        high=high,
        further_steps=0 if math.isfinite(high) else _further_steps(mean_c, var_c, len(a), t),
    )


def _of_neighbours(x: npt.NDArray[np.float64], y: npt.NDArray[np.float64], w: npt.NDArray[np.float64]) -> float:
    """The covariance of two weighted means, from differences of neighbours."""
    pairs = w[1:] * w[:-1] * np.diff(x) * np.diff(y)
    return float(pairs.sum() / 2 * len(w) / (len(w) - 1))


def _set_of_ratios(a: float, c: float, var_a: float, var_c: float, cov: float) -> tuple[float, float]:
    """Solve (c^2 - v_c) B^2 - 2 (a c - v_ac) B + (a^2 - v_a) <= 0 for B >= 0."""
    lead, middle, last = c * c - var_c, a * c - cov, a * a - var_a
    root = middle * middle - lead * last
    if lead > 0 and c > 0:
        # Then the roots are real: the set holds a/c.
        width = math.sqrt(max(root, 0.0))
        return max((middle - width) / lead, 0.0), max((middle + width) / lead, 0.0)
    if root <= 0 or lead == 0:
        return 0.0, math.inf
    # What lies between the roots is left out. With one of them on each side of 0 it is all below the upper one, and
    # the ratio is at least that; with both above 0, small ratios are possible too.
    ends = ((middle - math.sqrt(root)) / lead, (middle + math.sqrt(root)) / lead)
    return (max(ends) if min(ends) < 0 < max(ends) else 0.0), math.inf


def _further_steps(c: float, var_c: float, number: int, t: float) -> int | None:
    if c <= 0:
        return None
    wanted = ((t + NormalDist().inv_cdf(_POWER)) * (math.sqrt(max(var_c, 0.0)) / c)) ** 2 * number
    # Beyond that it says no more than that there is no telling.
    return max(math.ceil(wanted) - number, 1) if wanted < LARGEST_COUNT else None


def student_t(probability: float, freedom: float) -> float:
    """Return the quantile of Student's t: exact up to 2 degrees of freedom, else by Cornish and Fisher's series.

    >>> [round(student_t(0.975, n), 2) for n in (2, 5, 30, 1000)]
    [4.3, 2.57, 2.04, 1.96]
    """
    if freedom <= 1:
        return math.tan(math.pi * (probability - 0.5))
    if freedom <= 2:
        return (2 * probability - 1) / math.sqrt(2 * probability * (1 - probability))
    z, v = NormalDist().inv_cdf(probability), freedom
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * v**4)
    )
