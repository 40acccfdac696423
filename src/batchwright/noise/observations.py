"""Observations of the noise along a run: a window counted in units, never in steps, and what it says of now.

With g the gradient of one unit (a sample, a token), G is its mean and T the trace of its covariance. The mean gradient
of n units has E|g_n|^2 = |G|^2 + T/n. The noise scale is T/|G|^2: the units at which noise and signal are equal.

Promises:
- T and |G|^2 of a step are unbiased, each by itself; |G|^2 is negative on many steps, and is left so: they are averaged
  apart and divided last, nothing is clamped;
- parts of a step may be of different sizes: micro-batches, those of other ranks, single examples;
- the answer is that of the end of the window, not of its middle (interval.py);
- an observation weighs by its units, so that a change of the batch changes nothing about what is estimated;
- memory stays bounded: observations of the window, and four points of history per window.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from batchwright.noise.interval import Interval, fieller
from batchwright.planning.critical_batch import CriticalBatch
from batchwright.planning.horizon import Stretch


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
    """Independent parts: K."""

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
        """Sum up parts from |g|^2 and n of each; a part without units is left out."""
        parts = [(square, size) for square, size in zip(squares, sizes, strict=True) if size > 0]
        return Squares(sum(s * n for s, n in parts), float(sum(n for _, n in parts)), len(parts))

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
    """Return T/|G|^2 of averages: infinite if there is no signal.

    >>> ratio(2.0, 0.5), ratio(2.0, -0.1), ratio(0.0, 0.0)
    (4.0, inf, inf)
    """
    return trace / signal if signal > 0 else math.inf


# A run is kept in so many stretches at most; when there are more, each takes twice as many steps.
_MOST_STRETCHES = 32
# The default window: as many units as this many of the first steps took.
DEFAULT_STEPS = 200
POINTS_PER_WINDOW = 4


@dataclass(frozen=True)
class Seen:
    """One observation as it is kept, the groups apart."""

    step: int
    units: float
    samples: float
    traces: tuple[float, ...]
    signals: tuple[float, ...]


@dataclass(frozen=True)
class HistoryPoint:
    """The critical batch as it stood at a step."""

    step: int
    units: float
    """Units that training had used, in all steps that were looked at."""
    critical_batch: CriticalBatch
    batch: float = 0.0
    """Units of a step, on average over the same window."""

    def to_dict(self) -> dict[str, Any]:
        """Return the point as plain data."""
        return {"step": self.step, "units": self.units, **self.critical_batch.to_dict()}


class Track:
    """The last observations, and what the estimate was along the way."""

    def __init__(self, *, window: float | None, unit: str, names: Sequence[str], every: int = 1) -> None:
        self.window = window
        self.every = every
        """Steps from one observation to the next."""
        self.population: int | None = None
        """Samples of a set that is drawn from by epochs."""
        self.unit = unit
        self.names = list(names)
        self.total_units = 0.0
        self.num_seen = 0
        self.history: list[HistoryPoint] = []
        self.stretches: list[Stretch] = []
        """The whole run, from its first observation, whatever the window."""
        self._per_stretch = 1
        self._kept: deque[Seen] = deque()
        self._units_kept = 0.0
        self._next_point = 0.0
        # An answer takes some 20 ms to reckon, and several may ask for it after one step.
        self._answers: dict[int | None, CriticalBatch] = {}

    def add(self, groups: Sequence[Observation], *, step: int, samples: float) -> None:
        """Take the observation of a step, one per group."""
        units = groups[0].units
        seen = Seen(step, units, samples, tuple(o.trace for o in groups), tuple(o.signal for o in groups))
        if self.window is None:
            self.window = DEFAULT_STEPS * units
        self._next_point = self._next_point or self.window / POINTS_PER_WINDOW
        self._add_to_stretches(Stretch(step, 1, units, samples, sum(seen.traces), sum(seen.signals)))
        self._answers.clear()
        self._kept.append(seen)
        self._units_kept += units
        self.total_units += units
        self.num_seen += 1
        while len(self._kept) > 1 and self._units_kept - self._kept[0].units >= self.window:
            self._units_kept -= self._kept.popleft().units
        if self.total_units >= self._next_point:
            critical = self.critical_batch()
            assert critical is not None
            self.history.append(HistoryPoint(step, self.total_units, critical, self._units_kept / len(self._kept)))
            self._next_point = self.total_units + self.window / POINTS_PER_WINDOW

    def _add_to_stretches(self, one: Stretch) -> None:
        if self.stretches and self.stretches[-1].observations < self._per_stretch:
            self.stretches[-1] += one
            return
        if len(self.stretches) == _MOST_STRETCHES:
            halves = zip(self.stretches[::2], self.stretches[1::2], strict=True)
            self.stretches = [before + after for before, after in halves]
            self._per_stretch *= 2
        self.stretches.append(one)

    def average_over(self, window: float) -> None:
        """Average over another number of units from now on."""
        self.window = window
        if not self.history:
            self._next_point = window / POINTS_PER_WINDOW

    def restart(self) -> None:
        """Begin a new window: what was seen before is of something else."""
        self._answers.clear()
        self._kept.clear()
        self._units_kept = 0.0

    def critical_batch(self, group: int | None = None) -> CriticalBatch | None:
        """Return the estimate of now, of one group or of all weights; None if nothing was seen.

        It is that of the end of the window, however T and |G|^2 drifted within it.
        """
        if not self._kept:
            return None
        if group not in self._answers:
            self._answers[group] = self._estimate(group)
        return self._answers[group]

    def _estimate(self, group: int | None) -> CriticalBatch:
        pick = (lambda values: sum(values)) if group is None else (lambda values: values[group])
        traces = np.array([pick(seen.traces) for seen in self._kept])
        signals = np.array([pick(seen.signals) for seen in self._kept])
        units = np.array([seen.units for seen in self._kept])
        trace, signal = (float(np.average(values, weights=units)) for values in (traces, signals))
        interval = fieller(traces, signals, units) or Interval(
            ratio(trace, signal), 0.0, math.inf, numerator=trace, denominator=signal
        )
        samples = sum(seen.samples for seen in self._kept)
        high = interval.high
        # Within an epoch weights move towards the samples that are done, so that the others' gradient is larger than
        # the correction for drawing without replacement supposes. Measured: nothing below the size of the set, 20 to
        # 30 % too low above twice of it.
        if self.population is not None and high * samples > self.population / 2 * self._units_kept:
            high = math.inf
        return CriticalBatch(
            value=interval.value,
            low=interval.low,
            high=high,
            unit=self.unit,
            observations=len(self._kept),
            steps_needed=None if interval.further_steps is None else interval.further_steps * self.every,
            trace=interval.numerator,
            signal=interval.denominator,
            samples_per_unit=samples / self._units_kept if samples else None,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return {
            "window": self.window,
            "unit": self.unit,
            "names": list(self.names),
            "total_units": self.total_units,
            "num_seen": self.num_seen,
            "next_point": self._next_point,
            "kept": [vars(seen) for seen in self._kept],
            "history": [{**vars(point), "critical_batch": vars(point.critical_batch)} for point in self.history],
            "stretches": [vars(stretch) for stretch in self.stretches],
            "per_stretch": self._per_stretch,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict()`."""
        self._answers.clear()
        self.window, self.unit, self.names = state["window"], state["unit"], list(state["names"])
        self.total_units, self.num_seen = state["total_units"], state["num_seen"]
        self._next_point = state["next_point"]
        self._kept = deque(
            Seen(**{**seen, "traces": tuple(seen["traces"]), "signals": tuple(seen["signals"])})
            for seen in state["kept"]
        )
        self._units_kept = sum(seen.units for seen in self._kept)
        self.history = [
            HistoryPoint(**{**point, "critical_batch": CriticalBatch(**point["critical_batch"])})
            for point in state["history"]
        ]
        self.stretches = [Stretch(**stretch) for stretch in state.get("stretches", ())]
        self._per_stretch = state.get("per_stretch", 1)
