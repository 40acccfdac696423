"""The largest size whose peak stays within a budget, with as few looks as possible.

The peak is a maximum of affine pieces in the micro-batch (forward, backward, optimizer step), flat at first and
then rising, so it is convex: a chord lies above it, and a line drawn on beyond two of its points lies below.

Promises:
- the answer was looked at and is within the limit; the next size was looked at and is not, unless it is past the cap;
- a peak that is not convex costs looks, never a wrong answer, as long as it does not fall.
"""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


# A look costs the same at any size, so the flat start is crossed in strides.
_STRIDE = 16


def largest_within(peak: Callable[[int], int], limit: int, *, cap: int) -> int | None:
    """Return the largest size up to `cap` whose peak is within the limit; None where not even 1 is.

    >>> looks = []
    >>> def peak(n):
    ...     looks.append(n)
    ...     return max(800, 500 + 30 * n)
    >>> largest_within(peak, 2000, cap=4096), looks
    (50, [1, 16, 101, 50, 51])
    """
    seen = {1: peak(1)}
    if seen[1] > limit:
        return None
    low, high = 1, cap + 1
    # The middle comes in now and then, so that no curve can make the others creep.
    narrowing = cycle((_chord, _chord, _bound, _bound, _middle))
    while high - low > 1:
        guess = next(narrowing) if high in seen else _bound
        size = min(max(guess(seen, low, high, limit), low + 1), high - 1)
        seen[size] = peak(size)
        low, high = (size, high) if seen[size] <= limit else (low, size)
    return low


def _chord(seen: dict[int, int], low: int, high: int, limit: int) -> int:
    """Cross the limit on the chord between a size that fits and one that does not; by convexity it fits."""
    return low + (limit - seen[low]) * (high - low) // (seen[high] - seen[low])


def _middle(seen: dict[int, int], low: int, high: int, limit: int) -> int:
    """Halve."""
    return (low + high) // 2


def _bound(seen: dict[int, int], low: int, high: int, limit: int) -> int:
    """Draw on the lines through two sizes that fit and through two that do not; the answer is not beyond either."""
    below, beyond = max((n for n in seen if n < low), default=low), min((n for n in seen if n > high), default=high)
    from_the_left, from_the_right = _STRIDE * low, high
    if seen[low] > seen[below]:
        from_the_left = low + (limit - seen[low]) * (low - below) // (seen[low] - seen[below])
    if beyond > high and seen[beyond] > seen[high]:
        from_the_right = high + (limit - seen[high]) * (beyond - high) // (seen[beyond] - seen[high])
    bound = min(from_the_left, from_the_right)
    return bound if bound < high - 1 or high not in seen else _middle(seen, low, high, limit)
