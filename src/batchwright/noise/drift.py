"""Where a drifting quantity stands now: its level averaged over the ways it may have come there.

Along training T and |G|^2 drift, and a mean over a window is that of the window's middle. A trend fitted to the window
gives the present level, but a trend that is chosen by a test first is too sure of itself: where the test just fails,
the mean is off by as much as its error. So no trend is chosen. Every one on a grid is fitted,
x = level * exp(b s + g s^2) with s from -1 to 0 (now), and weighs by its likelihood and by a prior that knows no unit:
no drift at all, or one whose log changes over the window by about 0.3, 1 or 3. A break is one more way: the recent half
or quarter by itself, with another trend before it.

Promises:
- without drift the plain mean has most of the weight; with drift that shows, the trends that explain it have;
- every fit is linear in the observations, so its error is known from their spread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

# The prior: the scale of the log change over the window, and how likely it is taken to be. A curvature of the log is
# taken to be half as large as its slope. They are round numbers that span what a window can hold. The share of "no
# drift" was chosen among 0, 0.25, 0.4 and 0.5 by coverage and width on simulated runs whose speeds of drift are among
# those of benchmarks/noise_coverage.py; docs/benchmarks.md has the coverage over these and over other shapes of drift.
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
        logs.append(log + _log_sum(before) - price + math.log(_BREAK / len(recents)))
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


def _log_sum(logs: Floats) -> float:
    return float(logs.max() + np.log(np.exp(logs - logs.max()).sum()))
