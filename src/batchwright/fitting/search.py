"""The search that a prediction leads: try where the predicted curve meets the limit, and correct it by what is seen.

Promises:
- a wrong prediction costs probes, never a wrong answer;
- sizes that lie closer together than two runs of one size do are worth no fifth probe;
- a step that runs out of memory far below the limit has a reason of its own, and is searched to the sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Generator


# Go on with another search where the first one cannot.
#
# A trace can fail at a size though a smaller one was fine: a step may refuse large batches, or look at values there.
# What
# was probed until then stays known, and no size is probed twice.


class CannotPredictError(Exception):
    """The trace of one size failed; the reason is its cause."""


def or_else(
    first: Generator[int, Seen, None], second: Callable[[], Generator[int, Seen, None]]
) -> Generator[int, Seen, None]:
    """Run a search, and the second one where the first gives up with `CannotPredictError`."""
    seen: dict[int, Seen] = {}
    try:
        size = next(first, None)
        while size is not None:
            seen[size] = yield size
            size = first.send(seen[size])
    except StopIteration:
        return
    except CannotPredictError:
        yield from _without_repeats(second(), seen)


def _without_repeats(search: Generator[int, Seen, None], seen: dict[int, Seen]) -> Generator[int, Seen, None]:
    size = next(search, None)
    while size is not None:
        if size not in seen:
            seen[size] = yield size
        try:
            size = search.send(seen[size])
        except StopIteration:
            return


# A predicted peak as a curve that is looked at in few places: a look is a trace, and a trace takes its time.
#
# The curve is a maximum of straight pieces. Where a look between two others falls on the straight line through them,
# the
# piece between is taken as straight, and no further look is needed to say where it meets a limit.

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


# Which size to try next: searches that know nothing of devices.
#
# A search is a generator: it yields a size and is sent what happened there. Whoever drives it (one process, children,
# many ranks) runs the probe. Each ends when the largest size that fits and the smallest that does not are neighbours.
#
# Promises:
# - no size is tried twice, and none above the cap;
# - a wrong prediction costs probes, never a wrong answer;
# - steps that merely say yes or no: doubling, then halving of the gap;
# - steps whose peak is known: on a line a + b n four probes at most.


@dataclass(frozen=True)
class Seen:
    """What a probe told the search: whether the size fits, and its peak in bytes where that is known."""

    micro_batch: int
    fits: bool
    peak: int | None = None


Search = "Generator[int, Seen, None]"

# The flat start of a peak is crossed in such strides.


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


# So many probes find a line's end where runs of one size do not differ.
_ENOUGH_PROBES = 4


def by_prediction(
    cap: int, limit: int, predict: Callable[[int], int], *, allowance: int, resolution: int = 0
) -> Generator[int, Seen, None]:
    """Try where a predicted curve meets the limit; what a real probe takes beyond the curve corrects the next guess.

    `allowance` is a first guess of what a run takes beyond the prediction: stacks of threads, what kernels keep. It is
    corrected in bytes, not in samples: a sample may be a KiB, and two runs of one size differ by hundreds of them.
    `resolution` is how many bytes they may differ by: after four probes a narrower gap at the limit is left as it is.
    A step that runs out of memory far below the limit has a reason of its own, and is searched to the sample.
    """
    bounds = Bounds(cap)
    curve = Curve(predict, cap=cap)
    extra = allowance
    correction = max(limit // 256, 2**18)
    measured: int | None = None
    num_outside = num_probes = 0
    while not bounds.is_closed:
        is_early = bounds.has_failed and (
            measured is None or curve.peak(bounds.high) + measured < limit - 4 * resolution
        )
        blur = 0 if is_early else resolution
        is_bracketed = bounds.low > 0 and bounds.has_failed and num_probes >= _ENOUGH_PROBES
        if is_bracketed and blur and curve.peak(bounds.high) - curve.peak(bounds.low) <= blur:
            return
        guess = curve.largest_within(limit - extra)
        if is_early and measured is not None:
            size = bounds.middle()
        elif bounds.low < guess < bounds.high:
            size, num_outside = guess, 0
        else:
            # What was seen refutes the curve here.
            size = _outside(bounds, curve, guess, blur, num_outside)
            num_outside += 1
        seen = yield size
        num_probes += 1
        bounds.learn(seen)
        if seen.fits and seen.peak is not None:
            extra = measured = seen.peak - curve.peak(size)
            # What a run takes is known now, and two runs differ by the resolution.
            correction = resolution or correction
        elif not seen.fits:
            # It took more than the rest of the limit: so much at least, and a correction that grows with each miss.
            extra = max(extra, limit - curve.peak(size)) + correction
            correction *= 8


def _outside(bounds: Bounds, curve: Curve, guess: int, resolution: int, num_outside: int) -> int:
    """Choose a size where the prediction lies outside of the gap: beside one of its ends, then in its middle."""
    if bounds.low == 0:
        return bounds.inside(bounds.high // 4 if bounds.has_failed else 1)
    # Not the very next size: one that two runs could not tell from it would prove nothing.
    above_low = max(bounds.low + 1, curve.largest_within(curve.peak(bounds.low) + resolution))
    if not bounds.has_failed:
        # The first size too many may still fit by a hair; the second then rarely does.
        return bounds.inside(above_low if num_outside < 2 else bounds.low + 2 ** (num_outside - 1))
    if num_outside > 0:
        return bounds.middle()
    if guess >= bounds.high and resolution:
        return bounds.inside(curve.largest_within(curve.peak(bounds.high) - resolution))
    # A failure that has overdone the correction leaves a wide gap.
    gap = curve.peak(bounds.high) - curve.peak(bounds.low)
    return bounds.middle() if gap > 8 * resolution > 0 else bounds.inside(above_low)
