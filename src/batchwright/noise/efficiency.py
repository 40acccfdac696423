"""What a batch B costs beside the critical batch Bc, as pure curves: steps, samples, and what a doubling changes.

A loss takes S(B) = Smin (1 + Bc/B) steps and E(B) = Emin (1 + B/Bc) samples, so that (S/Smin - 1)(E/Emin - 1) = 1
(McCandlish et al. 2018, arXiv:1812.06162). The curves take the learning rate as tuned for each B; where it is not, a
changed batch does worse than they say.

Promises:
- every curve is monotone in Bc, so the two ends of its interval map to the two ends of the answer;
- every curve has a value at Bc = 0 (no noise) and at infinite Bc (no signal was seen): its limit there.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from batchwright.errors import InvalidInputError
from batchwright.units import shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchwright.noise.critical_batch import CriticalBatch


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
        told = f"{self.value:.0%}".replace("%", " %")
        return told if self.low == self.high else f"{told} [{100 * self.low:.0f}, {100 * self.high:.0f}]"

    def map(self, function: Callable[[float], float]) -> Range:
        """Return a monotone function of it.

        >>> Range(2.0, 1.0, 4.0).map(lambda x: 1 / x)
        Range(value=0.5, low=0.25, high=1.0)
        """
        ends = function(self.low), function(self.high)
        return Range(function(self.value), min(ends), max(ends))

    def to_dict(self) -> dict[str, float | None]:
        """Return it as plain data; what is infinite is None."""
        return {name: end if math.isfinite(end) else None for name, end in asdict(self).items()}

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{self.value:.4g}"
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


def over_interval(critical: CriticalBatch, curve: Callable[[float], float]) -> Range:
    """Carry the interval of the critical batch through a curve that is monotone in it.

    >>> from batchwright.noise.critical_batch import CriticalBatch
    >>> over_interval(CriticalBatch(300.0, 100.0, math.inf, "samples", 50), lambda bc: wasted(100, bc))
    Range(value=0.25, low=0.0, high=0.5)
    """
    return Range(critical.value, critical.low, critical.high).map(curve)


def steps_over_minimum(batch: float, critical: float) -> float:
    """S/Smin = 1 + Bc/B: how many times the steps of an infinitely large batch.

    >>> steps_over_minimum(100, 300)
    4.0
    """
    return 1.0 + critical / batch


def wasted(batch: float, critical: float) -> float:
    """1 - Emin/E = B/(B + Bc): the share of the samples that a tiny batch would not have needed.

    >>> wasted(100, 300), wasted(100, 100), wasted(400, 100)
    (0.25, 0.5, 0.8)
    """
    return batch / (batch + critical)


def doubling_saves(batch: float, critical: float) -> float:
    """1 - S(2B)/S(B) = Bc/(B + Bc)/2: the share of the steps that a doubling saves, at most half.

    >>> doubling_saves(100, 300), doubling_saves(100, 100)
    (0.375, 0.25)
    """
    return (1.0 - wasted(batch, critical)) / 2.0


def doubling_costs(batch: float, critical: float) -> float:
    """E(2B)/E(B) - 1: the share of samples that a doubling needs on top. It equals what is wasted now.

    >>> doubling_costs(100, 300)
    0.25
    """
    return wasted(batch, critical)


def doubling_speeds_up(batch: float, critical: float) -> float:
    """S(B)/S(2B): how many times sooner a doubled batch is there, if its step takes no longer; from 1 to 2.

    >>> doubling_speeds_up(100, 300), round(doubling_speeds_up(100, 100), 3)
    (1.6, 1.333)
    """
    return 1.0 / (1.0 - doubling_saves(batch, critical))


def halving_saves(batch: float, critical: float) -> float:
    """1 - E(B/2)/E(B): the share of the samples that halving saves, at most half.

    >>> halving_saves(400, 100)
    0.4
    """
    return wasted(batch, critical) / 2.0


def halving_costs(batch: float, critical: float) -> float:
    """S(B/2)/S(B) - 1: the share of steps that halving needs on top.

    >>> round(halving_costs(400, 100), 3)
    0.2
    """
    return 1.0 - wasted(batch, critical)


def time_to_loss(batch: float, critical: float, fixed: float, per_sample: float) -> float:
    """(1 + Bc/B)(s + r B): the seconds until the loss is reached, per step of Smin, if a step takes s + r B.

    >>> time_to_loss(100, 300, fixed=0.1, per_sample=0.001)
    0.8
    """
    return steps_over_minimum(batch, critical) * (fixed + per_sample * batch)


def soonest_batch(critical: float, fixed: float, per_sample: float, *, least: int, most: int, unit: int = 1) -> int:
    """The multiple of `unit` with the least time: a neighbour of sqrt((s/r) Bc), as the time has a single valley.

    >>> soonest_batch(400, fixed=0.08, per_sample=0.0025, least=1, most=1000)
    113
    """
    ideal = math.sqrt(fixed / per_sample * critical) if per_sample else float(most)
    below = int(min(max(ideal, least), most)) // unit * unit
    around = [batch for batch in (below, below + unit) if max(unit, least) <= batch <= most]
    return min(around, key=lambda batch: time_to_loss(batch, critical, fixed, per_sample))


def batches_within(
    limit: float, critical: float, fixed: float, per_sample: float, *, least: int, most: int
) -> tuple[int, int] | None:
    """The whole batches whose time is at most `limit`: between the roots of r B^2 - (limit - s - r Bc) B + s Bc.

    >>> batches_within(2.415, 400, fixed=0.08, per_sample=0.0025, least=1, most=1000)
    (26, 508)
    """
    middle = limit - fixed - per_sample * critical
    if middle <= 0:
        return None
    # Without real roots the square is negative; the two ends then come out in the wrong order, with nothing between.
    twice = middle + math.sqrt(max(0.0, middle**2 - 4 * per_sample * fixed * critical))
    low, high = 2 * fixed * critical / twice, twice / (2 * per_sample) if per_sample else math.inf
    # A root that is a whole number counts, however it was rounded.
    first = max(least, math.ceil(low * (1 - 1e-12)))
    last = most if high >= most else math.floor(high * (1 + 1e-12))
    return (first, last) if first <= last else None


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
    try:
        size = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]  # the call is the check
    except (TypeError, ValueError, OverflowError):
        size = math.nan
    if not 0 < size <= 1e15:
        raise InvalidInputError(f"{name} must be a positive number of at most 10^15; received {shortened(value)}.")
    return size
