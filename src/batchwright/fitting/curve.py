"""A predicted peak as a curve that is looked at in few places: a look is a trace, and a trace takes its time.

The curve is a maximum of straight pieces. Where a look between two others falls on the straight line through them, the
piece between is taken as straight, and no further look is needed to say where it meets a limit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_STRIDE = 16
# A look this near the line, as a share of the limit, lies on it; what is left is less than kernels differ by.
_ON_THE_LINE = 1 / 8192


class Curve:
    """Predicted bytes by size.

    >>> looks = []
    >>> def predict(n):
    ...     looks.append(n)
    ...     return max(800, 500 + 30 * n)
    >>> curve = Curve(predict, cap=4096)
    >>> curve.largest_within(2000), curve.largest_within(1900), curve.largest_within(700), looks
    (50, 46, 0, [1, 16, 102, 50])
    """

    def __init__(self, predict: Callable[[int], int], *, cap: int) -> None:
        self._predict = predict
        self._cap = cap
        self._known: dict[int, int] = {}
        self._straight: set[tuple[int, int]] = set()

    def peak(self, size: int) -> int:
        """Predicted bytes at a size."""
        if size not in self._known:
            self._known[size] = self._predict(size)
        return self._known[size]

    def largest_within(self, limit: int) -> int:
        """Return the largest size up to the cap that is within the limit, give or take one; 0 where none is."""
        if self.peak(1) > limit:
            return 0
        while True:
            low = max(size for size, peak in self._known.items() if peak <= limit)
            high = min((size for size, peak in self._known.items() if peak > limit and size > low), default=None)
            if low >= self._cap or (high is not None and high - low <= 1):
                return min(low, self._cap)
            if high is None:
                self.peak(self._farther(low, limit))
                continue
            crossing = self._between(low, high, limit)
            if (low, high) in self._straight:
                return crossing
            middle = min(max(crossing, low + 1), high - 1)
            line = self._known[low] + (self._known[high] - self._known[low]) * (middle - low) // (high - low)
            if abs(self.peak(middle) - line) <= limit * _ON_THE_LINE:
                self._straight |= {(low, middle), (middle, high)}

    def _between(self, low: int, high: int, limit: int) -> int:
        rise = self._known[high] - self._known[low]
        return low + (limit - self._known[low]) * (high - low) // rise

    def _farther(self, low: int, limit: int) -> int:
        below = max((size for size in self._known if size < low), default=low)
        size = _STRIDE * low
        if self._known[low] > self._known[below]:
            # By convexity the curve lies above this line, so the size after its crossing is past the limit.
            slope = (self._known[low] - self._known[below]) / (low - below)
            size = min(size * _STRIDE, low + int((limit - self._known[low]) / slope) + 1)
        return min(max(size, low + 1), self._cap)
