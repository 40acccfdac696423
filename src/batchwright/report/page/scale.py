"""From values to places on a drawing, and the values worth a tick."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """A straight or logarithmic axis from `low` at `start` to `high` at `end`, in pixels.

    >>> Scale(0, 10, 0, 100)(5), Scale(1, 16, 0, 100, is_log=True)(4)
    (50.0, 50.0)
    """

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """Return the place of a value; one beyond the axis is put at its end."""
        value = min(max(value, self.low), self.high)
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 2)


def even_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round values a straight axis is cut at, at most about so many.

    >>> even_ticks(0, 93)
    [0.0, 20.0, 40.0, 60.0, 80.0]
    """
    step = _round_up((high - low) / max(most, 1), (1, 2, 5, 10), 10)
    return _multiples(step, low, high)


def whole_ticks(low: float, high: float, most: int = 8) -> list[float]:
    """Return whole numbers for an axis of sizes.

    >>> whole_ticks(0, 12, 6)
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0]
    """
    return _multiples(max(_round_up((high - low) / max(most, 1), (1, 2, 5, 10), 10), 1.0), low, high)


def byte_ticks(high: float, most: int = 5) -> list[float]:
    """Return amounts of memory that are round in binary.

    >>> [tick / 2**20 for tick in byte_ticks(600 * 2**20)]
    [0.0, 128.0, 256.0, 384.0, 512.0]
    """
    return _multiples(2.0 ** math.ceil(math.log2(high / max(most, 1))), 0, high)


def doubling_ticks(low: float, high: float, most: int = 8) -> list[float]:
    """Return powers of two for an axis of batches.

    >>> doubling_ticks(5, 1000, 4)
    [8.0, 32.0, 128.0, 512.0]
    """
    powers = range(math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9) + 1)
    return [2.0**power for power in powers[:: max(math.ceil(len(powers) / most), 1)]]


def log_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round values for a logarithmic axis.

    >>> log_ticks(1, 8)
    [1.0, 1.5, 2.0, 3.0, 5.0, 7.0]
    >>> log_ticks(3, 80_000, 5)
    [10.0, 100.0, 1000.0, 10000.0]
    """
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 1.2, 1.5, 2, 3, 4, 5, 7), (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        ticks = [digit * 10.0**decade for decade in decades for digit in digits]
        ticks = [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
        if len(ticks) <= most:
            return ticks
    return ticks[:: math.ceil(len(ticks) / most)]


def size_scale(sizes: list[float], start: float, end: float, *, spread: float = 8) -> Scale:
    """Return the axis for sizes: in doublings where they differ much, else straight from 0."""
    least, most = min(sizes), max(sizes)
    if most >= spread * least > 0:
        return Scale(least / 1.25, most * 1.25, start, end, is_log=True)
    return Scale(0, max(most, 1) * 1.12, start, end)


def size_ticks(scale: Scale, most: int) -> list[float]:
    """Return the ticks for an axis of sizes."""
    return doubling_ticks(scale.low, scale.high, most) if scale.is_log else whole_ticks(scale.low, scale.high, most)


def _round_up(step: float, digits: tuple[int, ...], base: int) -> float:
    power = float(base) ** math.floor(math.log(step, base))
    return next((digit * power for digit in digits if digit * power >= step * (1 - 1e-9)), base * power)


def _multiples(step: float, low: float, high: float) -> list[float]:
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]
