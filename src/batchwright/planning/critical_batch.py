"""The critical batch with its interval, and the curves that say what a batch B costs beside it.

A loss takes S(B) = Smin (1 + Bc/B) steps and E(B) = Emin (1 + B/Bc) samples, so that (S/Smin - 1)(E/Emin - 1) = 1
(McCandlish et al. 2018, arXiv:1812.06162). The curves assume a learning rate that is tuned for each B; otherwise a
changed batch does worse than they say.

Promises:
- an upper end that is not resolved is infinite, and the text says "at least";
- a value that rests on too few observations for an interval says so: from 0 to infinity;
- every curve is monotone in Bc, so the two ends of its interval map to the two ends of the answer;
- every curve has a value at Bc = 0 (no noise) and at infinite Bc (no signal was seen): its limit there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, pvariance, stdev
from typing import Any

from batchwright.errors import InvalidInputError
from batchwright.printed_result import PrintedLine
from batchwright.units import finite, positive_number, shortened

# What estimates from the first quarter of a run were off by where a grid of tuned runs told the critical batch to the
# loss at its end: the middle of that over the estimate, and the standard deviation of its logarithm, on tasks apart
# from those that the recommendation is judged on (benchmarks/recommendation.py).
_OFF_BY = {"noise scale": (1.4, 1.0), "branches": (1.0, 0.35)}
# The curves of steps turned as these do, or in between.
_BENDS = (1.0, 2.0)
# What such a curve is off by from one batch to its double, in the logarithm of the steps, in six of seven settings.
CURVE_OFF_BY = 0.08
# Of a normal distribution, the ends of 95 % in standard deviations.
_ENDS = 1.96
# Beyond it nothing is known.
_MOST_SPREAD = 3.0
# Without an upper end, at least this.
_OPEN_SPREAD = 1.0
# An estimate that claims to be exact has no more weight than this.
_LEAST_SPREAD = 0.05


@dataclass(frozen=True)
class CriticalBatch(PrintedLine):
    """The noise scale T/|G|^2, with a 95 % interval: the batch at which noise and signal of a step are equal.

    >>> print(CriticalBatch(212.4, 168.2, 290.6, unit="samples", observations=120))
    212 [168, 291] samples
    >>> print(CriticalBatch(900.0, 168.2, math.inf, unit="samples", observations=120, steps_needed=340))
    at least 168 samples (upper end not resolved; about 340 more steps)
    """

    value: float
    """As it is now, at the last of the observations; infinite if no signal was seen."""
    low: float
    high: float
    """Infinite if it is not resolved."""
    unit: str
    observations: int
    """Optimizer steps that it rests on."""
    steps_needed: int | None = None
    """Further steps until the upper end is likely to be resolved; None if nothing can say."""
    trace: float = math.nan
    """T, the trace of the covariance of one unit's gradient, as of now."""
    signal: float = math.nan
    """|G|^2, as of now; may be negative."""
    samples_per_unit: float | None = None
    """Samples in a unit, on average; None if they were not counted."""
    evidence: str = "noise scale"
    """What it is an estimate by: "noise scale", "branches", or "given"."""

    @property
    def resolved(self) -> bool:
        """Whether there is an upper end."""
        return math.isfinite(self.high)

    @property
    def known_value(self) -> float:
        """The number to reckon with: the estimate, or its lower end if that is infinite."""
        return self.value if math.isfinite(self.value) else self.low

    @property
    def spread(self) -> float:
        """The standard deviation of its logarithm, by its interval or the end of it that is known.

        >>> round(CriticalBatch(300.0, 150.0, 600.0, "samples", 50).spread, 3)
        0.354
        """
        if not 0 < self.low < self.known_value:
            return 0.0 if self.low else _MOST_SPREAD
        if not self.resolved:
            return min(max(math.log(self.known_value / self.low) / _ENDS, _OPEN_SPREAD), _MOST_SPREAD)
        return min(math.log(self.high / self.low) / 2 / _ENDS, _MOST_SPREAD)

    @property
    def bends(self) -> tuple[float, ...]:
        """How sharply the steps may turn around it; that of the curve in the books if it was given."""
        return (1.0,) if self.evidence == "given" else _BENDS

    def widened(self, deviations: float = _ENDS) -> CriticalBatch:
        """Return the critical batch that this is an estimate of, with what such estimates are off by.

        >>> print(CriticalBatch(300.0, 250.0, 400.0, "samples", 50).widened())
        420 [58.7, 3,045] samples
        >>> print(CriticalBatch(300.0, 300.0, 300.0, "samples", 0, evidence="given").widened())
        300 [300, 300] samples
        """
        factor, spread = _OFF_BY.get(self.evidence, (1.0, 0.0))
        return replace(self.grown(factor, spread * deviations / _ENDS), evidence="given")

    def grown(self, factor: float, spread: float) -> CriticalBatch:
        """Return the critical batch if it is so many times as large, up to an error of its logarithm.

        >>> print(CriticalBatch(300.0, 250.0, 400.0, "samples", 50).grown(2.0, 0.1))
        600 [459, 850] samples
        """
        middle = self.known_value
        if middle <= 0:
            return self

        def reach(end: float) -> float:
            return math.exp(math.hypot(math.log(end / middle), _ENDS * spread))

        return replace(
            self,
            value=factor * self.value,
            low=factor * middle / reach(self.low) if self.low > 0 else 0.0,
            high=factor * middle * reach(self.high) if self.resolved and self.high > 0 else self.high,
        )

    def likely(self) -> CriticalBatch:
        """Return what to reckon with: the same widened, and around its lower end if the value is infinite.

        >>> CriticalBatch(math.inf, 100.0, math.inf, "samples", 50).likely().value
        140.0
        """
        return replace(self, value=self.known_value).widened()

    def in_samples(self) -> CriticalBatch | None:
        """Return the same in samples; None if nothing counted the samples of a unit.

        >>> tokens = CriticalBatch(6400.0, 3200.0, 9600.0, unit="tokens", observations=50, samples_per_unit=1 / 64)
        >>> print(tokens.in_samples())
        100 [50, 150] samples
        """
        if self.unit == "samples":
            return self
        share = self.samples_per_unit
        if not share:
            return None
        return replace(
            self,
            value=self.value * share,
            low=self.low * share,
            high=self.high * share,
            unit="samples",
            trace=self.trace * share,
            samples_per_unit=1.0,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data; what is infinite or unknown is None."""
        return {
            "value": finite(self.value),
            "low": finite(self.low),
            "high": finite(self.high),
            "resolved": self.resolved,
            "unit": self.unit,
            "observations": self.observations,
            "steps_needed": self.steps_needed,
            "trace": finite(self.trace),
            "signal": finite(self.signal),
            "samples_per_unit": self.samples_per_unit,
            "evidence": self.evidence,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CriticalBatch:
        """Return the critical batch that `to_dict` wrote down.

        >>> print(CriticalBatch.from_dict(CriticalBatch(300.0, 200.0, 500.0, "samples", 50).to_dict()))
        300 [200, 500] samples
        """
        otherwise = {"value": math.inf, "low": 0.0, "high": math.inf, "trace": math.nan, "signal": math.nan}
        numbers = {name: otherwise[name] if data[name] is None else float(data[name]) for name in otherwise}
        return cls(
            **numbers,
            unit=str(data["unit"]),
            observations=int(data["observations"]),
            steps_needed=data["steps_needed"],
            samples_per_unit=data.get("samples_per_unit"),
            evidence=str(data.get("evidence", "noise scale")),
        )

    def __str__(self) -> str:
        if self.resolved:
            return f"{figure(self.value)} [{figure(self.low)}, {figure(self.high)}] {self.unit}"
        needed = "" if not self.steps_needed else f"; about {self.steps_needed:,} more steps"
        return f"at least {figure(self.low)} {self.unit} (upper end not resolved{needed})"


def pooled(estimates: Sequence[CriticalBatch]) -> CriticalBatch:
    """Return the critical batch that estimates of several kinds say together, each by its precision.

    >>> noise = CriticalBatch(200.0, 150.0, 270.0, "samples", 100)
    >>> branches = CriticalBatch(400.0, 300.0, 540.0, "samples", 5, evidence="branches")
    >>> print(pooled([noise, branches]))
    383 [190, 769] samples
    >>> pooled([noise, branches]).evidence
    'noise scale and branches'
    """
    evidence = " and ".join(estimate.evidence for estimate in estimates)
    return replace(averaged([estimate.widened() for estimate in estimates]), evidence=evidence)


def averaged(estimates: Sequence[CriticalBatch]) -> CriticalBatch:
    """Return the middle of estimates, each by its own interval; what all of one kind are off by does not average out.

    >>> places = [CriticalBatch(value, value / 2, value * 2, "samples", 5) for value in (200.0, 400.0)]
    >>> print(averaged(places), averaged(places[:1]))
    283 [173, 462] samples 200 [100, 400] samples
    """
    if len(estimates) == 1:
        return estimates[0]
    weights = [1 / max(estimate.spread, _LEAST_SPREAD) ** 2 for estimate in estimates]
    middle = sum(w * math.log(estimate.known_value) for w, estimate in zip(weights, estimates, strict=True))
    middle, reach = middle / sum(weights), _ENDS / math.sqrt(sum(weights))
    low, high = math.exp(middle - reach), math.exp(middle + reach)
    return replace(estimates[-1], value=math.exp(middle), low=low, high=high)


# A critical batch is looked for up to so many times the largest batch that was tried, by steps of so much.
_FARTHEST_BATCH, _FINENESS = 20, 1.02


def fit_critical(steps: Mapping[int, Sequence[float]]) -> CriticalBatch | None:
    """Return the critical batch that steps to a loss show, by batch and then by seed; None of fewer than two batches.

    >>> print(fit_critical({32: [400.0, 440.0, 360.0], 128: [140.0, 150.0, 125.0], 512: [90.0, 95.0, 90.0]}))
    141 [127, 157] samples

    The sharper bend is taken: tuned branches and grids of whole runs agree by it. If the steps go on halving, it has no
    upper end. Seeds that took no step at a batch are left out; None if no other is there.

    >>> print(fit_critical({32: [400.0, 0.0], 128: [150.0, 0.0], 512: [90.0, 2.0]}))
    147 [147, 147] samples
    """
    sizes = sorted(steps)
    if len(sizes) < 2:
        return None
    most = _FARTHEST_BATCH * sizes[-1]

    def misfit(critical: float, logs: Sequence[float]) -> float:
        curve = [math.log(steps_over_minimum(size, critical, _BENDS[-1])) for size in sizes]
        return float(pvariance([log - expected for log, expected in zip(logs, curve, strict=True)]))

    places: list[float] = [math.pow(_FINENESS, place) for place in range(int(math.log(most) / math.log(_FINENESS)) + 1)]

    def fit(logs: Sequence[float]) -> float:
        return min(places, key=lambda critical: misfit(critical, logs))

    # A seed that stood at the loss from the beginning tells nothing.
    seeds = [seed for seed in zip(*(steps[size] for size in sizes), strict=True) if min(seed) > 0]
    if not seeds:
        return None
    value = fit([math.log(fmean(column)) for column in zip(*seeds, strict=True)])
    by_seed = [math.log(fit([math.log(one) for one in seed])) for seed in seeds]
    error = stdev(by_seed) / math.sqrt(len(seeds)) if len(seeds) > 1 else 0.0
    reach, is_open = math.exp(_ENDS * error), value * _FINENESS > most
    return CriticalBatch(
        value=math.inf if is_open else value,
        low=sizes[-1] if is_open else value / reach,
        high=math.inf if is_open else value * reach,
        unit="samples",
        observations=len(seeds),
        evidence="branches",
    )


def figure(value: float) -> str:
    """Write a batch size as people read one: three digits, whole from 100 on.

    >>> figure(0.52), figure(17.3), figure(1234.5), figure(math.inf)
    ('0.52', '17.3', '1,234', 'infinite')
    """
    if math.isinf(value):
        return "infinite"
    return f"{value:,.0f}" if abs(value) >= 100 or value == 0 else f"{value:.3g}"


@dataclass(frozen=True)
class Range:
    """A number with the ends that the interval of the critical batch gives it.

    >>> print(Range(1.5, 1.42, 1.61))
    1.5 [1.42, 1.61]
    >>> Range(0.2, 0.15, 0.25).percent, Range(0.5, 0.5, 0.5).percent
    ('20 % [15, 25]', '50 %')
    """

    value: float
    low: float
    high: float

    @property
    def percent(self) -> str:
        """The same as text, in percent."""
        share = f"{self.value:.0%}".replace("%", " %")
        return share if self.low == self.high else f"{share} [{100 * self.low:.0f}, {100 * self.high:.0f}]"

    def map(self, function: Callable[[float], float]) -> Range:
        """Return a monotone function of it.

        >>> Range(2.0, 1.0, 4.0).map(lambda x: 1 / x)
        Range(value=0.5, low=0.25, high=1.0)
        """
        ends = function(self.low), function(self.high)
        return Range(function(self.value), min(ends), max(ends))

    def to_dict(self) -> dict[str, float | None]:
        """Return it as plain data; what is infinite is None."""
        return {name: finite(end) for name, end in asdict(self).items()}

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{self.value:.4g}"
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


def over_interval(critical: CriticalBatch, curve: Callable[[float], float]) -> Range:
    """Carry the interval of the critical batch through a curve that is monotone in it.

    >>> over_interval(CriticalBatch(300.0, 100.0, math.inf, "samples", 50), lambda bc: wasted(100, bc))
    Range(value=0.25, low=0.0, high=0.5)
    """
    return Range(critical.value, critical.low, critical.high).map(curve)


def steps_over_minimum(batch: float, critical: float, bend: float = 1.0) -> float:
    """S/Smin = (1 + (Bc/B)^p)^(1/p), for a bend p of 1 just 1 + Bc/B: how many times the steps of an endless batch.

    >>> steps_over_minimum(100, 300), round(steps_over_minimum(100, 300, bend=2.0), 3)
    (4.0, 3.162)
    """
    if bend == 1.0:
        return 1.0 + critical / batch
    larger, smaller = max(critical / batch, 1.0), min(critical / batch, 1.0)  # no power of a large number
    return larger * math.pow(1.0 + math.pow(smaller / larger, bend), 1 / bend)


def wasted(batch: float, critical: float, bend: float = 1.0) -> float:
    """1 - Emin/E, for a bend of 1 B/(B + Bc): the share of the samples that a tiny batch would not have needed.

    >>> wasted(100, 300), wasted(100, 100), wasted(400, 100)
    (0.25, 0.5, 0.8)
    """
    if bend == 1.0:
        return batch / (batch + critical)
    return 1.0 - 1.0 / steps_over_minimum(critical, batch, bend) if critical else 1.0


def steps_after(change: float, batch: float, critical: float, bend: float = 1.0) -> float:
    """S of so many times the batch over S of the batch: after a doubling from 1/2, if it pays in full, to 1.

    >>> steps_after(2, 100, 300), steps_after(2, 100, 100), steps_after(0.5, 400, 100)
    (0.625, 0.75, 1.2)
    """
    if math.isinf(critical):
        return 1 / change
    return steps_over_minimum(change * batch, critical, bend) / steps_over_minimum(batch, critical, bend)


def gamma(values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    """What is left of the price of a large batch if the batch follows the noise scale: (mean sqrt b)^2 / mean b.

    `values` are noise scales along a run, `weights` the progress made at each in steps of Smin: n steps at a batch B
    count n/(1 + b/B); none means equal shares. With the best schedule (S/Smin - 1)(E/Emin - 1) falls from 1 to gamma:
    at the same steps, the samples above the minimum shrink to that share. Near 1 a fixed batch is as good.

    >>> round(gamma([100.0, 100.0]), 3), round(gamma([1.0, 100.0]), 3)
    (1.0, 0.599)
    """
    shares = [1.0] * len(values) if weights is None else list(weights)
    usable = len(shares) == len(values) and all(0 <= x < math.inf for x in (*values, *shares))
    mean = sum(w * b for w, b in zip(shares, values, strict=True)) if usable else 0.0
    if not 0 < mean < math.inf:
        raise InvalidInputError(
            "gamma needs noise scales and as many weights, finite, none negative and not all zero; "
            f"received {shortened(list(values))} and {shortened(weights)}."
        )
    root = sum(w * math.sqrt(b) for w, b in zip(shares, values, strict=True))
    return root * root / (mean * sum(shares))


def checked_batch(value: object, name: str) -> float:
    """Return `value` as the size of a batch, in whatever unit; not always whole, since tokens are counted on average.

    >>> checked_batch(0, "effective batch")
    Traceback (most recent call last):
    ...
    batchwright.errors.InvalidInputError: effective batch must be a positive number of at most 10^15; received 0.
    """
    accepted = f"{name} must be a positive number of at most 10^15"
    return positive_number(value, accepted, least=math.ulp(0.0), most=1e15)
