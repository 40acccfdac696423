"""A confidence interval for a ratio of levels: Fieller's set, which knows when it has no upper end.

The noise scale is T over |G|^2. Where the latter cannot be told from 0, no upper end exists, and the usual formulas
(delta, jackknife) state a narrow interval all the same: of 95 % they covered 66 % and less. Fieller's set
{B : (a - B c)^2 <= t^2 Var(a - B c)} then has no upper end, and keeps its coverage.

Along training both levels drift, and a mean over a window is that of the window's middle. A trend that a test chooses
is too sure of itself: where the test just fails, the mean is off by as much as its error. So no trend is chosen. Every
one on a grid is fitted, x = level * exp(b s + g s^2) with s from -1 to 0 (now), and weighs by its likelihood and by a
prior without units: no drift at all, or one whose log changes over the window by about 0.3, 1 or 3. A break is one more
way: the recent half or quarter by itself, with another trend before it. The set is averaged over these ways: it begins
where the chance of a larger ratio is 97.5 %, and ends where it is 2.5 %.

Promises:
- value and interval are of the present, the end of the window; without drift they are those of the means;
- without drift the plain mean has most of the weight; with drift that shows, the trends that explain it have;
- every fit is linear in the observations, so its error is known from their spread;
- the spread is taken from differences of neighbours (von Neumann 1941), in which a drift does not show;
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
    from collections.abc import Callable

    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]


# The prior: the scale of the log change over the window, and how likely it is taken to be. A curvature of the log is
# taken to be half as large as its slope. They are round numbers that span what a window can hold. The share of "no
# drift" was chosen among 0, 0.25, 0.4 and 0.5 by coverage and width on simulated runs whose speeds of drift are among
# those of benchmarks/noise_coverage.py; docs/reference/benchmarks.md has the coverage over these and over others.
_SCALES = ((0.0, 0.4), (0.3, 0.2), (1.0, 0.2), (3.0, 0.2))
_CURVATURE = 0.5
_BREAK, _RECENT = 0.1, (0.5, 0.25)
_LEAST_RECENT, _LEAST_BEFORE = 8, 5
# Points of a grid in units of its spread, and how often it is drawn closer around what the observations allow.
_GRID = np.linspace(-2.5, 2.5, 6)
_ZOOMS = 3
_NEGLIGIBLE = 1e-4
_STEEPEST = 12.0


@dataclass(frozen=True)
class Levels:
    """The present level as a mixture: each way has a weight, and its level is a linear combination of observations."""

    weights: Floats
    kernels: Floats
    """One row for each way: the level is the row times the observations."""
    shapes: Floats
    """One row for each way: the course of the quantity, 1 now."""


def variances(x: Floats, y: Floats, units: Floats) -> Floats:
    """Return the covariance of each pair of observations, from differences of neighbours, smoothed along the run.

    A slow drift does not show in differences (von Neumann 1941); a change of the spread itself does.
    """
    of_unit = np.diff(x) * np.diff(y) / (1 / units[1:] + 1 / units[:-1])
    reach = max(len(x) // 3, 4)
    total = np.concatenate([[0.0], np.cumsum(of_unit)])
    at = np.arange(len(x))
    first, last = np.clip(at - reach, 0, None), np.clip(at + reach, None, len(of_unit))
    smoothed: Floats = (total[last] - total[first]) / (last - first) / units
    return smoothed


def present_levels(x: Floats, variance: Floats, place: Floats, course: Floats | None = None) -> Levels:
    """Return the ways to the present level of a series; `course` is one that it follows where nothing drifts.

    >>> place = (np.arange(50) - 49) / 50
    >>> falls = present_levels(np.exp(-2 * place), np.full(50, 1e-4), place)
    >>> bool(abs(falls.weights @ (falls.kernels @ np.exp(-2 * place)) - 1) < 0.01)
    True
    """
    precision, number = 1 / variance, len(x)
    base = np.ones(number) if course is None else course
    whole = _ways(x, precision, place, base)
    recents = [round(number * share) for share in _RECENT]
    recents = [n for n in recents if n >= _LEAST_RECENT and number - n >= _LEAST_BEFORE]
    logs, kernels, shapes = [whole[0] + math.log(1 - _BREAK if recents else 1.0)], [whole[1]], [whole[2]]
    # A level of its own for what was before a break costs what any free number does: half the log of the observations.
    price = 0.5 * math.log(number)
    for n in recents:
        log, kernel, shape = _ways(x[-n:], precision[-n:], place[-n:] / -place[-n], base[-n:])
        span = max(place[-n] - place[0], 1e-9)
        before = _ways(x[:-n], precision[:-n], (place[:-n] - place[-n]) / span, base[:-n])[0]
        logs.append(log + float(np.logaddexp.reduce(before)) - price + math.log(_BREAK / len(recents)))
        kernels.append(np.pad(kernel, ((0, 0), (number - n, 0))))
        shapes.append(np.pad(shape, ((0, 0), (number - n, 0)), mode="edge"))
    every = np.concatenate(logs)
    weights = np.exp(every - every.max())
    kept = weights > _NEGLIGIBLE
    return Levels(weights[kept] / weights[kept].sum(), np.concatenate(kernels)[kept], np.concatenate(shapes)[kept])


def _ways(x: Floats, precision: Floats, place: Floats, base: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the log weights, the kernels and the courses of all trends of a stretch."""
    logs, kernels, shapes = [], [], []
    for scale, share in _SCALES:
        if scale == 0:
            points, prior = np.zeros((1, 2)), np.zeros(1)
        else:
            points, prior = _grid(x, precision, place, base, np.array([scale, scale * _CURVATURE]))
        log, kernel, shape = _fit(x, precision, place, base, points)
        logs.append(log + prior + math.log(share))
        kernels.append(kernel)
        shapes.append(shape)
    return np.concatenate(logs), np.concatenate(kernels), np.concatenate(shapes)


def _grid(x: Floats, precision: Floats, place: Floats, base: Floats, scales: Floats) -> tuple[Floats, Floats]:
    """Return points (slope, curvature) where the observations allow them, and the log of their prior mass."""
    centre, spread = np.zeros(2), scales.copy()
    for zoom in range(_ZOOMS + 1):
        slopes, curvatures = np.meshgrid(centre[0] + _GRID * spread[0], centre[1] + _GRID * spread[1])
        points = np.stack([slopes.ravel(), curvatures.ravel()], axis=1)
        prior = -0.5 * ((points / scales) ** 2).sum(axis=1)
        if zoom == _ZOOMS:
            break
        log = _fit(x, precision, place, base, points)[0] + prior
        weights = np.exp(log - log.max())
        weights /= weights.sum()
        centre = weights @ points
        allowed = np.sqrt(weights @ (points - centre) ** 2)
        # A grid that is too coarse sees one point only: it is drawn in by steps.
        spread = np.maximum(np.minimum(spread, np.maximum(allowed, spread / 3)), 1e-4 * scales)
    cell = (_GRID[1] - _GRID[0]) ** 2 * spread.prod()
    return points, prior + math.log(cell / (2 * math.pi * scales.prod()))


def _fit(x: Floats, precision: Floats, place: Floats, base: Floats, points: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the log likelihood of each trend at its best level, the kernel of that level, and the course."""
    logs = points[:, :1] * place + points[:, 1:] * place**2
    shapes = base * np.exp(np.clip(logs, -_STEEPEST, _STEEPEST))
    weighted = precision * shapes
    known = (weighted * shapes).sum(axis=1)
    return 0.5 * (weighted @ x) ** 2 / known, weighted / known[:, None], shapes


# Fewer differences than this say next to nothing of a spread.
LEAST_OBSERVATIONS = 5
# The chance that the upper end shows after as many steps as `further_steps` says.
_POWER = 0.8
# Below it, relative to the largest observation, a number is rounding.
_TINY = 1e-100


@dataclass(frozen=True)
class Interval:
    """Where a ratio lies; the upper end is infinite if it is not resolved."""

    value: float
    low: float
    high: float
    further_steps: int | None = None
    """As many more until the upper end is likely to be resolved; None if the denominator is not above 0."""
    numerator: float = math.nan
    denominator: float = math.nan
    """The levels whose ratio it is."""

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
    drifts: bool = True,
) -> Interval | None:
    """Return the interval of the present ratio of two series, in the order they were seen; None for too few.

    `drifts=False` takes both to stand still, and gives the ratio of their means.

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
    present = _present(a, c, w, confidence) if drifts else None
    if present is not None:
        return present
    mean_a, mean_c = float(w @ a), float(w @ c)
    var_a, var_c, cov = _of_neighbours(a, a, w), _of_neighbours(c, c, w), _of_neighbours(a, c, w)
    t = _quantile(w, confidence)
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
        numerator=mean_a,
        denominator=mean_c,
    )


def _present(a: Floats, c: Floats, w: Floats, confidence: float) -> Interval | None:
    """The interval of now; None if there is no spread to reckon with."""
    sizes = float(np.abs(a).max()), float(np.abs(c).max())
    if not all(_TINY < size < 1 / _TINY for size in sizes) or float(w.min()) <= 0:
        return None
    a, c = a / sizes[0], c / sizes[1]
    var_a, var_c, cov = variances(a, a, w), variances(c, c, w), variances(a, c, w)
    if float(var_a.max()) < _TINY or float(var_c.max()) < _TINY:
        return None
    # Squared differences are rough where the spread falls: no observation counts as a hundred others.
    var_a, var_c = (np.maximum(spread, 1e-2 * spread.mean()) for spread in (var_a, var_c))
    cov = np.clip(cov, -np.sqrt(var_a * var_c), np.sqrt(var_a * var_c))
    place = np.cumsum(w) - w.sum()
    # Where the spread of a few steps is large by chance, so is their mean: weights by the local spread alone would
    # lean towards small observations.
    noise = present_levels(a, (var_a + var_a.mean()) / 2, place)
    levels = noise.kernels @ a
    mean_a, kernel = float(noise.weights @ levels), noise.weights @ noise.kernels
    of_a = float(kernel**2 @ var_a + noise.weights @ (levels - mean_a) ** 2)
    # Where the noise scale stands still, the signal goes as the noise does.
    course = np.clip((noise.weights * levels) @ noise.shapes / mean_a, 1e-3, 1e3) if mean_a > 0 else None
    signal = present_levels(c, (var_c + var_c.mean()) / 2, place, course)
    each_c, each_var = signal.kernels @ c, signal.kernels**2 @ var_c
    each_cov, wider = (
        (signal.kernels * kernel) @ cov,
        _quantile(w, confidence) / NormalDist().inv_cdf(0.5 + confidence / 2),
    )

    def chance_above(ratio: float) -> float:
        spread = np.sqrt(np.maximum(of_a - 2 * ratio * each_cov + ratio**2 * each_var, _TINY**2))
        return float(signal.weights @ _normal((mean_a - ratio * each_c) / (wider * spread)))

    unbounded = float(signal.weights @ _normal(-each_c / (wider * np.sqrt(each_var))))
    mean_c = float(signal.weights @ each_c)
    of_c = float(signal.weights @ (each_var + (each_c - mean_c) ** 2))
    start = max(mean_a, _TINY) / max(abs(mean_c), math.sqrt(of_c))
    tail = (1 - confidence) / 2
    low, value, high = (
        _ratio_at(chance, chance_above, unbounded, start) * (sizes[0] / sizes[1]) for chance in (1 - tail, 0.5, tail)
    )
    return Interval(
        value=value,
        low=low,
        high=high,
        further_steps=0
        if math.isfinite(high)
        else _further_steps(mean_c, of_c, len(a), wider * NormalDist().inv_cdf(1 - tail)),
        numerator=mean_a * sizes[0],
        denominator=mean_c * sizes[1],
    )


def _ratio_at(chance: float, chance_above: Callable[[float], float], unbounded: float, start: float) -> float:
    """The ratio that is exceeded with a chance: 0 where even that is less likely, infinite if none is so large."""
    if chance_above(0.0) <= chance:
        return 0.0
    if unbounded >= chance:
        return math.inf
    low, high = 0.0, start
    while chance_above(high) > chance:
        low, high = high, 2 * high
        if high > start / _TINY:
            return math.inf
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if chance_above(middle) > chance else (low, middle)
    return high


def _quantile(w: Floats, confidence: float) -> float:
    number = 1 / float(w @ w)
    # What a variance from differences is worth, in degrees of freedom: about two thirds of the usual.
    return student_t(0.5 + confidence / 2, 2 * (number - 1) ** 2 / (3 * number - 4))


def _normal(z: Floats) -> Floats:
    """The normal distribution function, by Abramowitz and Stegun 26.2.17: to 7.5e-8."""
    t = 1 / (1 + 0.2316419 * np.abs(z))
    series = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    above = np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi) * series
    return np.where(z > 0, 1 - above, above)


def _of_neighbours(x: Floats, y: Floats, w: Floats) -> float:
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
