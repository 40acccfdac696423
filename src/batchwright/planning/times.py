"""The time of one optimizer step: `accumulation * (alpha + beta * micro_batch) + sigma`.

alpha is what every pass costs whatever its size (launches, communication set-up), beta what a sample costs,
sigma what the optimizer costs once per step. All three are seconds and never negative.

Promises:
- measured points are fitted by least squares on relative error, since the noise of a timing grows with it;
- what the points cannot tell is named in `unknown`, and the simplest model that fits them is taken;
- without points the model says so: every sample costs the same, and only ratios mean anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import TYPE_CHECKING, Any

from batchwright.errors import InvalidInputError
from batchwright.units import positive_seconds, shortened, whole_number

if TYPE_CHECKING:
    from batchwright.planning.split import Split


_COEFFICIENTS = ("alpha", "beta", "sigma")
# Simplest explanation first, so that a tie (one point only) goes to "time in proportion to samples".
_SUBSETS = sorted(
    chain.from_iterable(combinations(range(3), size) for size in (1, 2, 3)),
    key=lambda s: (1 not in s, len(s)),
)


@dataclass(frozen=True)
class TimedPoint:
    """One measurement: a pass over one micro-batch, or, with `accumulation`, a whole optimizer step."""

    micro_batch: int
    seconds: float
    accumulation: int | None = None

    def shares(self) -> tuple[float, float, float]:
        """How often alpha, beta and sigma are paid in this measurement."""
        passes = self.accumulation or 1
        return (passes, passes * self.micro_batch, 1.0 if self.accumulation else 0.0)


@dataclass(frozen=True)
class TimeModel:
    """Seconds of a step at any split, with the points it rests on.

    >>> model = fit_times({4: 0.11, 8: 0.19})
    >>> round(model.alpha, 6), round(model.beta, 6), model.unknown
    (0.03, 0.02, ('sigma',))
    """

    alpha: float
    beta: float
    sigma: float
    points: tuple[TimedPoint, ...] = ()
    unknown: tuple[str, ...] = _COEFFICIENTS
    largest_error: float | None = None

    @property
    def source(self) -> str:
        """`measured` if it rests on points, `formula` if it is only the model."""
        return "measured" if self.points else "formula"

    def step_seconds(self, split: Split) -> float:
        """Seconds of one optimizer step on the busiest device."""
        return split.accumulation * self.alpha + split.rank_samples(0) * self.beta + self.sigma

    def covers(self, micro_batch: int) -> bool:
        """Whether a micro-batch lies within the sizes that were measured."""
        sizes = [point.micro_batch for point in self.points]
        return bool(sizes) and min(sizes) <= micro_batch <= max(sizes)

    def to_dict(self) -> dict[str, Any]:
        """Return the model as plain data."""
        return {
            "source": self.source,
            "alpha_seconds": self.alpha if self.points else None,
            "beta_seconds": self.beta if self.points else None,
            "sigma_seconds": self.sigma if self.points else None,
            "unknown": list(self.unknown),
            "largest_error": self.largest_error,
            "points": [
                {"micro_batch": p.micro_batch, "accumulation": p.accumulation, "seconds": p.seconds}
                for p in self.points
            ],
        }


# With nothing measured: a sample costs one unit, a pass and an optimizer step nothing. So accumulation looks
# free, which is a lower bound on its cost.
ASSUMED = TimeModel(alpha=0.0, beta=1.0, sigma=0.0)


# Seconds by micro-batch, or by (micro-batch, accumulation) for a whole optimizer step.
Times = Mapping[int | tuple[int, int], float] | Mapping[int, float] | Iterable[TimedPoint] | TimeModel


def fit_times(times: Times) -> TimeModel:
    """Fit the three coefficients to measured points."""
    if isinstance(times, TimeModel):
        return times
    points = tuple(_checked(point) for point in _as_points(times))
    if not points:
        raise InvalidInputError(
            "no times received; times are seconds by micro-batch, such as {4: 0.11, 8: 0.19}, or by "
            "(micro-batch, accumulation) for a whole optimizer step, such as {(4, 8): 0.95}."
        )
    rows = [[share / point.seconds for share in point.shares()] for point in points]
    alpha, beta, sigma = solution = solve_not_negative(rows, _SUBSETS)
    error = max(abs(_residual(row, solution)) for row in rows)
    return TimeModel(alpha, beta, sigma, points, unknown=_unidentified(rows), largest_error=error)


def solve_not_negative(rows: Sequence[Sequence[float]], subsets: Iterable[tuple[int, ...]]) -> list[float]:
    """Solve `rows @ x = 1` in least squares with no coefficient below 0, over the best of some subsets of columns.

    Of two that are as good the first is taken; one whose solution is not unique is passed over.

    >>> [round(x, 6) for x in solve_not_negative([[1, 2], [1, 4]], [(0,), (1,), (0, 1)])]
    [1.0, 0.0]
    """
    best, error = None, math.inf
    for subset in subsets:
        solution = _least_squares(rows, subset)
        if solution is None or min(solution) < 0:
            continue
        residual = sum(_residual(row, solution) ** 2 for row in rows)
        if residual < error - 1e-12:
            best, error = solution, residual
    assert best is not None, "a single column always has a solution that is not negative"
    return best


def _as_points(times: Mapping[Any, float] | Iterable[TimedPoint]) -> Iterable[TimedPoint]:
    if isinstance(times, Mapping):
        pairs = ((size if isinstance(size, tuple) and len(size) == 2 else (size, None), s) for size, s in times.items())
        return (TimedPoint(size[0], seconds, size[1]) for size, seconds in pairs)
    if isinstance(times, str) or not isinstance(times, Iterable):
        raise InvalidInputError(
            f"times must be a mapping of micro-batch to seconds, or timed points; received {shortened(times)}."
        )
    return times


def _checked(point: object) -> TimedPoint:
    if not isinstance(point, TimedPoint):
        raise InvalidInputError(
            f"times must be a mapping of micro-batch to seconds, or timed points; received {shortened(point)}."
        )
    return TimedPoint(
        whole_number(point.micro_batch, "micro-batch in times"),
        positive_seconds(point.seconds, f"time of micro-batch {point.micro_batch}"),
        None if point.accumulation is None else whole_number(point.accumulation, "accumulation in times"),
    )


def _unidentified(rows: Sequence[Sequence[float]]) -> tuple[str, ...]:
    """Name the coefficients that these points cannot tell: those whose axis is no combination of the rows."""
    scale = [max(column) or 1.0 for column in zip(*rows, strict=True)]
    scaled = [[x / s for x, s in zip(row, scale, strict=True)] for row in rows]
    # The square root of what `_least_squares` calls singular, since it works on squares.
    _, rank = _eliminate(scaled, 3, smallest=1e-6)
    axes = {name: [float(i == j) for i in range(3)] for j, name in enumerate(_COEFFICIENTS)}
    return tuple(name for name, axis in axes.items() if _eliminate([*scaled, axis], 3, smallest=1e-6)[1] > rank)


def _residual(row: Sequence[float], solution: Sequence[float]) -> float:
    return sum(a * x for a, x in zip(row, solution, strict=True)) - 1.0


def _least_squares(rows: Sequence[Sequence[float]], subset: tuple[int, ...]) -> list[float] | None:
    """Solve `rows @ x = 1` over some of the columns, the others at zero; None if that is not unique."""
    scale = [max(abs(row[j]) for row in rows) for j in subset]
    if not all(scale):
        return None
    columns = [[row[j] / s for row in rows] for j, s in zip(subset, scale, strict=True)]
    matrix = [[sum(map(float.__mul__, a, b)) for b in columns] + [sum(a)] for a in columns]
    solved, rank = _eliminate(matrix, len(subset), smallest=1e-12 * len(rows))
    if rank < len(subset):
        return None
    solution = [0.0] * len(rows[0])
    for position, (j, s) in enumerate(zip(subset, scale, strict=True)):
        solution[j] = solved[position][-1] / solved[position][position] / s
    return solution


def _eliminate(rows: list[list[float]], num_columns: int, *, smallest: float) -> tuple[list[list[float]], int]:
    """Eliminate column by column (Gauss and Jordan), without numpy; return the rows, pivots first, and the rank."""
    left, rank = list(rows), 0
    for column in range(num_columns):
        pivot = max(range(rank, len(left)), key=lambda row: abs(left[row][column]), default=None)
        if pivot is None or abs(left[pivot][column]) < smallest:
            continue
        left[rank], left[pivot] = left[pivot], left[rank]
        for row in range(len(left)):
            if row != rank:
                factor = left[row][column] / left[rank][column]
                left[row] = [x - factor * y for x, y in zip(left[row], left[rank], strict=True)]
        rank += 1
    return left, rank
