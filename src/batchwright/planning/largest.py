"""The largest size within a budget: the one search for it, with as few looks as possible.

The peak is a maximum of affine pieces in the micro-batch (forward, backward, optimizer step), flat at first and
then rising, so it is convex: a chord lies above it, and a line drawn on beyond two of its points lies below. A look
mostly means a trace, and a trace takes its time.

Promises:
- the exact answer was looked at and is within the limit; so was the next size, which is not, unless it is past the cap;
- a peak that is not convex costs looks, never a wrong answer, as long as it does not fall;
- a rough answer spends no look on a piece that is known to be straight; what one limit learnt serves the next;
- no size is looked at twice.
"""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


# A look costs the same at any size, so the flat start is crossed in such strides.
STRIDE = 16
# A look this near the line, as a share of the limit, lies on it; what is left is less than kernels differ by.
_ON_THE_LINE = 1 / 8192


def find_crossing(peaks: Mapping[int, int], left: int, right: int, limit: int) -> int:
    """Return the last size within the limit on the line through two sizes; the peak must rise between them.

    >>> find_crossing({4: 128, 16: 212}, 4, 16, limit=1000)
    128
    """
    return left + (limit - peaks[left]) * (right - left) // (peaks[right] - peaks[left])


def meet_lines(peaks: Mapping[int, int], low: int, high: int, limit: int) -> int:
    """Draw on the lines through two sizes that fit and through two that do not; the answer is not beyond either.

    >>> meet_lines({4: 400, 16: 400, 64: 960, 128: 1920}, 16, 64, limit=500)
    33
    """
    below, beyond = max((n for n in peaks if n < low), default=low), min((n for n in peaks if n > high), default=high)
    from_the_left, from_the_right = STRIDE * low, high
    if peaks[low] > peaks[below]:
        from_the_left = find_crossing(peaks, below, low, limit)
    if beyond > high and peaks[beyond] > peaks[high]:
        from_the_right = find_crossing(peaks, high, beyond, limit)
    bound = min(from_the_left, from_the_right)
    return bound if bound < high - 1 or high not in peaks else halve(peaks, low, high, limit)


def halve(peaks: Mapping[int, int], low: int, high: int, limit: int) -> int:
    """Return the middle, whatever the peaks are: what the others fall back to."""
    return (low + high) // 2


def largest_within(peak: Callable[[int], int], limit: int, *, cap: int) -> int | None:
    """Return the largest size up to `cap` whose peak is within the limit; None if not even 1 is.

    >>> looks = []
    >>> def peak(n):
    ...     looks.append(n)
    ...     return max(800, 500 + 30 * n)
    >>> largest_within(peak, 2000, cap=4096), looks
    (50, [1, 16, 101, 50, 51])
    """
    return Curve(peak, cap=cap).largest_within(limit) or None


def largest_that_fits(fits: Callable[[int], bool], *, above: int, cap: int) -> int:
    """Return the largest size up to `cap` that fits, if `above` does, by yes or no alone: for one just above it.

    >>> largest_that_fits(lambda size: size <= 13, above=10, cap=100)
    13
    """
    low, high = above, above + 1
    while high <= cap and fits(high):
        low, high = high, min(2 * high - low + 1, cap + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class Curve:
    """Peaks by size, each looked at once.

    >>> looks = []
    >>> def peak(n):
    ...     looks.append(n)
    ...     return max(800, 500 + 30 * n)
    >>> curve = Curve(peak, cap=4096)
    >>> curve.roughly_within(2000), curve.roughly_within(1900), curve.roughly_within(700), looks
    (50, 46, 0, [1, 16, 101, 50])
    """

    def __init__(self, look: Callable[[int], int], *, cap: int) -> None:
        self._look = look
        self._cap = cap
        self._peaks: dict[int, int] = {}
        self._straight: set[tuple[int, int]] = set()

    def peak(self, size: int) -> int:
        """Return the bytes at a size."""
        if size not in self._peaks:
            self._peaks[size] = self._look(size)
        return self._peaks[size]

    def largest_within(self, limit: int) -> int:
        """Return the largest size up to the cap that is within the limit; 0 if none is."""
        return self._narrow(limit, is_rough=False)

    def roughly_within(self, limit: int) -> int:
        """Return the largest size up to the cap within the limit, give or take one; 0 if none is."""
        return self._narrow(limit, is_rough=True)

    def _narrow(self, limit: int, *, is_rough: bool) -> int:
        if self.peak(1) > limit:
            return 0
        # The middle comes in now and then, so that no curve can make the others creep.
        narrowing = cycle((find_crossing, find_crossing, meet_lines, meet_lines, halve))
        while True:
            low = max(size for size, peak in self._peaks.items() if peak <= limit and size <= self._cap)
            high = min((size for size, peak in self._peaks.items() if peak > limit and size > low), default=None)
            beyond = self._cap + 1 if high is None else high
            if beyond - low <= 1:
                return low
            if is_rough and (low, high) in self._straight:
                return find_crossing(self._peaks, low, beyond, limit)
            guess = meet_lines if high is None else next(narrowing)
            self._look_at(min(max(guess(self._peaks, low, beyond, limit), low + 1), beyond - 1), limit)

    def _look_at(self, size: int, limit: int) -> None:
        """Look at a size, and see whether it lies on the line through its neighbours."""
        below = sorted(known for known in self._peaks if known < size)
        above = min((known for known in self._peaks if known > size), default=None)
        left, right = (below[-1], above) if above is not None else (below[-2] if len(below) > 1 else None, below[-1])
        peak = self.peak(size)
        if left is None:
            return
        rise = (self._peaks[right] - self._peaks[left]) * (size - left) // (right - left)
        if abs(peak - self._peaks[left] - rise) <= limit * _ON_THE_LINE:
            first, second, third = sorted((left, right, size))
            self._straight |= {(first, second), (second, third)}
