"""Until where a run is meant to go, and the critical batch on the way there.

A stretch of training in which the noise scale is N takes a step of batch B as far as 1/(1 + N/B) of a step without
noise (McCandlish et al. 2018, appendix D). So the critical batch of a whole run is the average of N over progress, and
a short run at its beginning sees only the first part of it. It grows by a power of the step, and is carried on.

Promises:
- the horizon is the user's: samples, hours, or a loss; if none is given, it is the data once over or ten times what was
  trained, and the words say so;
- a loss that was reached already ends the horizon there; one that the run does not fall to is refused with the reason;
- the farther the horizon lies beyond what was trained, the wider the answer.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from statistics import fmean, linear_regression, median
from typing import TYPE_CHECKING, Any

from batchwright.errors import InvalidInputError
from batchwright.planning.critical_batch import CriticalBatch, figure
from batchwright.units import counted, finite

if TYPE_CHECKING:
    from collections.abc import Callable

# The power of the step that the critical batch of tuned runs grows with, and how far that is off from task to task, on
# those for constants of benchmarks/recommendation.py. The trend of a run's own noise scale did not tell it there.
_POWER, _POWER_SPREAD = 0.6, 0.15
# Without data and without a word the run is taken to be so many times as long as what was trained.
_USUAL_LENGTH = 10
# A loss that is farther away than this, by the trend of a short run, is out of sight.
_FARTHEST = 1000
# A curve over progress is summed in so many pieces, of equal width in the logarithm of the step.
_PIECES = 64
_ENDS = 1.96
_LEAST_STRETCHES = 4
# The beginning of a training follows no trend: such a part of the steps is left out.
_SKIPPED = 0.1
# Of the square of a normal number; where a trend bends, at the beginning, single ones are large.
_MEDIAN_OF_SQUARES = 0.455


@dataclass(frozen=True)
class Stretch:
    """What some steps of a run showed, in sums that add up."""

    step: int
    """The last one."""
    observations: int
    units: float
    samples: float
    trace: float
    """T of one unit, times the observations."""
    signal: float
    """|G|^2, times the observations; negative at times."""
    loss: float = math.nan
    """The mean; not a number if it was not seen."""

    def __add__(self, later: Stretch) -> Stretch:
        return Stretch(
            later.step,
            self.observations + later.observations,
            self.units + later.units,
            self.samples + later.samples,
            self.trace + later.trace,
            self.signal + later.signal,
        )

    @property
    def signal_over_noise(self) -> float:
        """|G|^2 over T, of one sample: the inverse of the noise scale."""
        samples_per_unit = self.samples / self.units if self.samples else 1.0
        return self.signal / self.trace / samples_per_unit if self.trace > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {**asdict(self), "loss": finite(self.loss)}


@dataclass(frozen=True)
class Course:
    """How noise scale and loss went along a run at one batch.

    >>> stretches = [Stretch(n, 50, 1600, 1600, 50.0, 50.0 / (4 * n**0.5)) for n in range(50, 1050, 50)]
    >>> noise = CriticalBatch(120.0, 100.0, 150.0, "samples", 1000)
    >>> course = Course(32, noise, tuple(stretches))
    >>> round(course.until(1000).value), round(course.until(10_000).value)
    (78, 281)
    """

    batch: float
    """Samples of a step."""
    last: CriticalBatch
    """The noise scale at its end, in samples."""
    stretches: tuple[Stretch, ...]

    @property
    def steps(self) -> int:
        """How long it was trained."""
        return self.stretches[-1].step if self.stretches else self.last.observations

    @cached_property
    def _series(self) -> list[tuple[float, float, float, int]]:
        """Where each stretch begins and ends, up to 1; its signal over its noise; its observations."""
        befores = [0, *(stretch.step for stretch in self.stretches)]
        return [
            (
                (before + 0.5) / self.steps,
                (stretch.step + 0.5) / self.steps,
                stretch.signal_over_noise,
                stretch.observations,
            )
            for before, stretch in zip(befores, self.stretches, strict=False)
            if stretch.step > _SKIPPED * self.steps
        ]

    @cached_property
    def _variance(self) -> float:
        """Of the signal over the noise in one observation, by how far each stretch is off between its neighbours."""
        seen_by_number = [(seen, number) for *_, seen, number in self._series]
        squares = [
            (a - 2 * b + c) ** 2 / (1 / k + 4 / m + 1 / n)
            for (a, k), (b, m), (c, n) in zip(seen_by_number, seen_by_number[1:], seen_by_number[2:], strict=False)
        ]
        return median(squares) / _MEDIAN_OF_SQUARES

    @cached_property
    def _level(self) -> tuple[float, float]:
        """The signal over the noise at the end if it falls by the power of the step, and its error."""
        rows = [(_mean_power(begin, end, -_POWER), seen, number) for begin, end, seen, number in self._series]
        total = sum(number * shape**2 for shape, _, number in rows)
        level = sum(number * shape * seen for shape, seen, number in rows) / total
        return level, math.sqrt(self._variance / total)

    @property
    def _usable_level(self) -> float:
        level, error = self._level
        return max(level, error / 2)

    @property
    def is_known(self) -> bool:
        """Whether there is enough to see a trend in."""
        return len(self._series) >= _LEAST_STRETCHES and self._variance > 0

    def until(self, steps: float) -> CriticalBatch:
        """Return the noise scale averaged over the progress of so many steps."""
        if not self.is_known:
            return self.last
        level, error = self._level
        value, usable = self._average(steps), self._usable_level
        by_trend = _POWER_SPREAD * abs(math.log(max(steps, 1.0) / self.steps))

        def end(at: float, sign: int) -> float:
            return value * math.exp(sign * math.hypot(math.log(at / usable), _ENDS * by_trend))

        surely = level - _ENDS * error
        return replace(
            self.last,
            value=value if level > 0 else math.inf,
            low=end(max(level, 0.0) + _ENDS * error, -1),
            high=end(surely, 1) if surely > 0 else math.inf,
        )

    def growth(self, before: float, after: float, *, begin: float = 0.0) -> tuple[float, float]:
        """Return how many times larger the average to a horizon is than from a step to another; its logarithm's error.

        >>> stretches = [Stretch(n, 50, 1600, 1600, 50.0, 50.0 / (4 * n**0.5)) for n in range(50, 1050, 50)]
        >>> course = Course(32, CriticalBatch(120.0, 100.0, 150.0, "samples", 1000), tuple(stretches))
        >>> round(course.growth(100, 1000)[0], 2), round(course.growth(600, 1000, begin=400)[0], 2)
        (3.62, 0.8)
        """
        if not self.is_known:
            return 1.0, 0.0
        error = _POWER_SPREAD * abs(math.log(after / before))
        return self._average(after) / self._average(before, begin), error

    def progress(self, steps: float) -> float:
        """Return how far so many steps go, in steps without noise."""
        if not self.is_known:
            return steps / (1 + self.last.known_value / self.batch)
        return sum(far for far, _ in self._pieces(steps))

    def _average(self, steps: float, begin: float = 0.0) -> float:
        """Return the noise scale over the progress from one step to another."""
        noises = fars = 0.0
        for sign, pieces in ((1, self._pieces(steps)), (-1, self._pieces(begin) if begin else [])):
            noises += sign * sum(far * noise for far, noise in pieces)
            fars += sign * sum(far for far, _ in pieces)
        return noises / fars

    def _pieces(self, steps: float) -> list[tuple[float, float]]:
        """Progress and noise scale of each piece of a run."""
        level = self._usable_level
        edges = [0.0, *(max(steps, 1.0) ** (number / _PIECES) for number in range(_PIECES + 1))]
        noises = [((before + after) / 2 / self.steps) ** _POWER / level for before, after in pairwise(edges)]
        return [
            ((after - before) / (1 + noise / self.batch), noise)
            for (before, after), noise in zip(pairwise(edges), noises, strict=True)
        ]


def _mean_power(begin: float, end: float, power: float) -> float:
    """Return the mean of x^power from one place to another.

    >>> _mean_power(0.5, 1.5, 1.0), round(_mean_power(1.0, math.e, -1.0), 3)
    (1.0, 0.582)
    """
    if abs(power + 1) < 1e-9:
        return math.log(end / begin) / (end - begin)
    mean: float = (end ** (power + 1) - begin ** (power + 1)) / (power + 1) / (end - begin)
    return mean


@dataclass(frozen=True)
class Horizon:
    """Until where the run is meant to go."""

    steps: float
    """At the batch that the noise was measured at."""
    samples: float
    times_trained: float
    """How many times as long as what was trained."""
    words: str

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def find_horizon(
    course: Course,
    *,
    samples: float | None = None,
    hours: float | None = None,
    until_loss: float | None = None,
    data: int | None = None,
    seconds_to: Callable[[CriticalBatch, float], float] | None = None,
    is_refused: bool = False,
) -> Horizon:
    """Return the horizon that was asked for, or the usual one.

    - `samples`, `hours`, `until_loss`: one of them, or none.
    - `data`: how many samples the dataset has.
    - `seconds_to`: the least seconds in which a run with a critical batch makes so much progress.
    - `is_refused`: one was asked for that cannot be used, so that the usual one is taken.
    """
    why = "as the one that was asked for cannot be used" if is_refused else "as no horizon was given"
    if samples is not None:
        steps, words = (
            samples / course.batch,
            f"as far as {counted(int(samples), 'sample')} go at {figure(course.batch)} per step",
        )
    elif hours is not None:
        if seconds_to is None:
            raise InvalidInputError("hours need the time of a step, which was not measured.", remedy="samples=N")
        steps = _steps_in(course, 3600 * hours, seconds_to)
        words = f"as far as {hours:g} hours go"
    elif until_loss is not None:
        steps, words = _steps_to(course, until_loss)
    elif data is not None and data > course.steps * course.batch:
        steps, words = data / course.batch, f"until the data was seen once, {data:,} samples, {why}"
    else:
        steps = _USUAL_LENGTH * course.steps
        words = f"until {_USUAL_LENGTH} times what was trained, {why}"
    steps = max(steps, 1.0)
    return Horizon(steps, steps * course.batch, steps / max(course.steps, 1), words)


def _steps_in(course: Course, seconds: float, seconds_to: Callable[[CriticalBatch, float], float]) -> float:
    least, most = 1.0, 1e12
    for _ in range(60):
        middle = math.sqrt(least * most)
        if seconds_to(course.until(middle), course.progress(middle)) <= seconds:
            least = middle
        else:
            most = middle
    return least


def _steps_to(course: Course, loss: float) -> tuple[float, str]:
    seen = [stretch for stretch in course.stretches if math.isfinite(stretch.loss)]
    if not seen:
        raise InvalidInputError(
            "a loss was named as the horizon, and the run showed none.", remedy="samples=N or hours=H instead"
        )
    # One stretch may be low by chance.
    smoothed = [fmean(point.loss for point in seen[max(place - 1, 0) : place + 2]) for place in range(len(seen))]
    before = 0
    for point, mean in zip(seen, smoothed, strict=True):
        if mean <= loss:
            return (before + point.step) / 2, f"until a loss of {loss:g}, which was reached by step {point.step:,}"
        before = point.step
    late = range(len(seen) // 2 if len(seen) > 3 else 0, len(seen))
    slope, at_end = 0.0, smoothed[-1]
    if len(late) > 1 and loss > 0:
        line = linear_regression(
            [math.log(seen[n].step) for n in late], [math.log(max(seen[n].loss, 1e-30)) for n in late]
        )
        slope = line.slope
        at_end = math.exp(line.intercept + slope * math.log(course.steps))
    lowest = min(point.loss for point in seen)
    if slope >= 0 or loss <= 0:
        raise InvalidInputError(
            f"the loss does not fall towards {loss:g}: it was {figure_of(seen[0].loss)} at first and "
            f"{figure_of(seen[-1].loss)} at the end of {counted(course.steps, 'step')}.",
            remedy="samples=N or hours=H instead, or more steps",
        )
    times = math.exp(math.log(loss / at_end) / slope) if at_end > loss else 1.0
    if times > _FARTHEST:
        raise InvalidInputError(
            f"a loss of {loss:g} is not in sight: {counted(course.steps, 'step')} came to {figure_of(lowest)}, and by "
            f"their trend it takes more than {_FARTHEST:,} times as many.",
            remedy="samples=N or hours=H instead, or more steps",
        )
    steps = course.steps * times
    return (
        steps,
        f"until a loss of {loss:g}, by the trend about {figure(steps)} steps of {figure(course.batch)}",
    )


def figure_of(loss: float) -> str:
    """Write a loss with four digits."""
    return f"{loss:.4g}"
