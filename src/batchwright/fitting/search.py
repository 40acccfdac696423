"""Which size to try next: searches that know nothing of devices.

A search is a generator: it yields a size and is sent what happened there. Whoever drives it (one process, children,
many ranks) runs the probe. Each ends when the largest size that fits and the smallest that does not are neighbours.

Promises:
- no size is tried twice, and none above the cap;
- a wrong prediction costs probes, never a wrong answer;
- steps that merely say yes or no: doubling, then halving of the gap;
- steps whose peak is known: on a line a + b n four probes at most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator


@dataclass(frozen=True)
class Seen:
    """What a probe told the search: whether the size fits, and its peak in bytes where that is known."""

    micro_batch: int
    fits: bool
    peak: int | None = None


Search = "Generator[int, Seen, None]"

# The flat start of a peak is crossed in such strides.
_STRIDE = 16


@dataclass
class Bounds:
    """The gap that is left: `low` fits (0 at first), `high` does not, or is past the cap."""

    cap: int
    low: int = 0
    high: int = field(init=False)
    peaks: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.high = self.cap + 1

    @property
    def has_failed(self) -> bool:
        """Whether some size did not fit."""
        return self.high <= self.cap

    @property
    def is_closed(self) -> bool:
        """Whether nothing is left between the two."""
        return self.high - self.low <= 1

    def learn(self, seen: Seen) -> None:
        """Narrow the gap by one probe."""
        if not seen.fits:
            self.high = min(self.high, seen.micro_batch)
            return
        self.low = max(self.low, seen.micro_batch)
        if seen.peak is not None:
            self.peaks[seen.micro_batch] = seen.peak

    def inside(self, size: int) -> int:
        """Return the size, moved into the gap where it is not."""
        return min(max(size, self.low + 1), self.high - 1)

    def middle(self) -> int:
        """Halve the gap; a wide one by its ratio."""
        if self.low and self.high > 4 * self.low:
            return self.inside(math.isqrt(self.low * self.high))
        return self.inside((self.low + self.high) // 2)


def by_doubling(cap: int, *, start: int = 1) -> Generator[int, Seen, None]:
    """Double until a size does not fit, then halve the gap: for steps that merely say yes or no.

    Above a cap of 2^20 it takes longer strides than two, so that the whole search stays near 40 probes.
    """
    bounds = Bounds(cap)
    stride = 2 if cap <= 2**20 else 8
    size = bounds.inside(start)
    while not bounds.is_closed:
        bounds.learn((yield size))
        if not bounds.has_failed:
            size = bounds.inside(stride * bounds.low)
        elif bounds.low == 0:
            size = bounds.inside(bounds.high // 2)
        else:
            size = bounds.inside((bounds.low + bounds.high) // 2)


def by_growing(start: int, cap: int, *, factor: float = 1.5) -> Generator[int, Seen, None]:
    """Grow an estimate by half while it fits, up to the cap itself; then halve the gap.

    >>> search = by_growing(19, 64)
    >>> tried = [next(search)]
    >>> for _ in range(4):
    ...     tried.append(search.send(Seen(tried[-1], fits=tried[-1] <= 63)))
    >>> tried
    [19, 28, 42, 63, 64]
    """
    bounds = Bounds(cap)
    size = bounds.inside(start)
    while not bounds.is_closed:
        bounds.learn((yield size))
        if not bounds.has_failed:
            size = bounds.inside(int(bounds.low * factor))
        else:
            # Nothing has fitted yet: the middle between 0 and the failure, which is its half.
            size = bounds.inside((bounds.low + bounds.high) // 2)


def by_powers_of_two(cap: int, *, start: int = 1) -> Generator[int, Seen, None]:
    """Try the powers of two one after the other, from the one at or below `start`, until one does not fit.

    >>> search = by_powers_of_two(100)
    >>> next(search), [search.send(Seen(2**i, fits=True)) for i in range(3)]
    (1, [2, 4, 8])
    """
    size = 2 ** int(math.log2(min(start, cap)))
    seen = yield size
    step_up = seen.fits
    while 1 <= (size := size * 2 if step_up else size // 2) <= cap:
        seen = yield size
        if seen.fits != step_up:
            return


def by_peaks(cap: int, limit: int, *, noise: int = 0) -> Generator[int, Seen, None]:
    """Grow until the peak moves, draw the line on through the two largest sizes, and try where it meets the limit.

    `noise` is how much the peak of one and the same size may differ from run to run.

    >>> search = by_peaks(4096, limit=1000)
    >>> size, tried = next(search), []
    >>> while size:
    ...     tried.append(size)
    ...     peak = 100 + 7 * size
    ...     try:
    ...         size = search.send(Seen(size, fits=peak <= 1000, peak=peak))
    ...     except StopIteration:
    ...         size = 0
    >>> tried
    [1, 4, 128, 129]
    """
    bounds = Bounds(cap)
    size = 1
    num_creeping = 0
    while not bounds.is_closed:
        low, high = bounds.low, bounds.high
        bounds.learn((yield size))
        num_creeping = num_creeping + 1 if bounds.low == low + 1 or bounds.high == high - 1 else 0
        size = _next_by_peaks(bounds, limit, noise)
        # A peak that is no line can make the prediction stop just beside each size that was tried.
        if num_creeping > 2:
            size = bounds.middle() if bounds.has_failed else bounds.inside(bounds.low + 2**num_creeping)


def _next_by_peaks(bounds: Bounds, limit: int, noise: int) -> int:
    line = _line(bounds.peaks, noise)
    if line is None or bounds.low not in bounds.peaks:
        # No line yet. The second size is 4, because 1 and 2 mostly lie on the flat start.
        stride = 4 if len(bounds.peaks) <= 1 else _STRIDE
        return bounds.middle() if bounds.has_failed else bounds.inside(stride * max(bounds.low, 1))
    left, right = line
    rise = bounds.peaks[right] - bounds.peaks[left]
    crossing = right + (limit - bounds.peaks[right]) * (right - left) // rise
    if bounds.peaks[left] > min(bounds.peaks.values()) + noise or (len(bounds.peaks) == 2 and not bounds.has_failed):
        return bounds.inside(crossing) if crossing < bounds.high or not bounds.has_failed else bounds.middle()
    # The line starts on the flat part, so it is too gentle and meets the limit too far out. A second size a little
    # up the rising part gives its true slope.
    size = right + max(1 + right // 32, min(right, (min(crossing, bounds.high) - right) // 8))
    return size if size < bounds.high else bounds.middle()


def _line(peaks: dict[int, int], noise: int) -> tuple[int, int] | None:
    """Return the two largest sizes that are far enough apart for rounding not to matter, if the peak rises there."""
    largest = max(peaks, default=0)
    below = max((n for n in peaks if n < largest - largest // 64), default=0)
    return (below, largest) if below and peaks[largest] > peaks[below] + noise else None
