"""Which size to try next: searches that know nothing of devices.

A search is a generator: it yields a size and is sent what happened there. Whoever drives it (one process, children,
many ranks) runs the probe. A search ends when the largest size that fits and the smallest that does not are neighbours.

Promises:
- no size is tried twice, and none above the cap;
- steps that only say yes or no: doubling, then halving of the gap;
- steps whose peak is known: at most four probes on a line a + b n;
- steps whose peak is known even where it is too much, as on a simulated card: the search that traces use;
- a wrong prediction costs probes, never a wrong answer;
- sizes that lie closer together than two runs of one size do are worth no fifth probe;
- a step that runs out of memory far below the limit has a reason of its own, and is searched to the sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import cycle
from typing import TYPE_CHECKING

from batchwright.planning.largest import STRIDE, Curve, find_crossing, halve, meet_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping


class CannotPredictError(Exception):
    """The trace of one size failed; the reason is its cause."""


@dataclass(frozen=True)
class Seen:
    """What a probe showed: whether the size fits, and its peak in bytes if that is known."""

    micro_batch: int
    fits: bool
    peak: int | None = None
    allocated: int | None = None
    """What of the peak is tensors: it grows evenly where what an allocator reserves for them goes up and down."""


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
        """Return the size, moved into the gap if it is outside."""
        return min(max(size, self.low + 1), self.high - 1)

    def middle(self) -> int:
        """Halve the gap; a wide one by its ratio."""
        if self.low and self.high > 4 * self.low:
            return self.inside(math.isqrt(self.low * self.high))
        return self.inside((self.low + self.high) // 2)


def by_doubling(cap: int, *, start: int = 1) -> Generator[int, Seen, None]:
    """Double until a size does not fit, then halve the gap: for steps that only say yes or no.

    Above a cap of 2^20 it takes longer strides than two, so that the whole search stays near 40 probes.
    """
    return by_growing(start, cap, factor=2 if cap <= 2**20 else 8)


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
        # Where nothing has fitted yet, the middle between 0 and the failure is its half.
        middle = (bounds.low + bounds.high) // 2
        size = bounds.inside(middle if bounds.has_failed else int(bounds.low * factor))


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
    [1, 9, 128, 129]
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


def by_exact_peaks(cap: int, limit: int) -> Generator[int, Seen, None]:
    """Search sizes whose peak is told exactly, even of those that do not fit.

    What the tensors take leads: it grows evenly, while what the allocator reserves for them goes up and down. A size
    whose tensors alone are too much cannot fit; the answer lies at the last one before, or a little below.

    >>> search = by_exact_peaks(4096, limit=1000)
    >>> size, tried = next(search), []
    >>> while size:
    ...     tried.append(size)
    ...     peak = 100 + 7 * size
    ...     size = next_size(search, Seen(size, peak <= 1000, peak, allocated=peak))
    >>> tried
    [1, 16, 128, 129]
    """
    bounds = Bounds(cap)
    tensors: dict[int, int] = {}
    reserved: dict[int, int] = {}
    # The middle comes in now and then, so that no curve can make the others creep.
    by_tensors, by_reserved = cycle((find_crossing, meet_lines, halve)), cycle((find_crossing, halve))
    size = 1
    while bounds.high - bounds.low > max(1, bounds.low // _FINEST):
        seen = yield size
        bounds.learn(seen)
        if seen.peak is not None and seen.allocated is not None:
            reserved[size], tensors[size] = seen.peak, seen.allocated
        low, high = bounds.low, bounds.high
        if not bounds.has_failed:
            size = _stride(tensors, low, limit)
        elif low not in tensors or high not in tensors or limit >= reserved[high]:
            size = (low + high) // 2
        elif limit >= tensors[high]:
            size = next(by_reserved)(reserved, low, high, limit)
        else:
            size = next(by_tensors)(tensors, low, high, limit)
        size = bounds.inside(size)


# Beyond so many samples a gap of one is finer than what an allocator rounds to: a thousandth will do.
_FINEST = 1024
# A line through two sizes on the flat start would lead too far.
_LONGEST_STRIDE = 64


def _stride(tensors: Mapping[int, int], low: int, limit: int) -> int:
    """Go on from the largest size that fits: along the line through the last two, or by a stride where it is flat."""
    below = max((size for size in tensors if size < low), default=low)
    if low not in tensors or tensors[low] <= tensors[below]:
        return STRIDE * max(low, 1)
    return min(find_crossing(tensors, below, low, limit), _LONGEST_STRIDE * low)


def _next_by_peaks(bounds: Bounds, limit: int, noise: int) -> int:
    line = _line(bounds.peaks, noise)
    if line is None or bounds.low not in bounds.peaks:
        if bounds.has_failed:
            return bounds.middle()
        # No line yet. The second size is at least 4, because 1 and 2 mostly lie on the flat start. A peak is a fixed
        # part and one per sample, so that many times the samples as the peak goes into the limit fit.
        stride = 4 if len(bounds.peaks) <= 1 else STRIDE
        return bounds.inside(max(stride, limit // max(bounds.peaks.get(bounds.low, limit), 1)) * max(bounds.low, 1))
    left, right = line
    crossing = find_crossing(bounds.peaks, left, right, limit)
    is_new = len(bounds.peaks) == 2 and not bounds.has_failed
    if bounds.peaks[left] > min(bounds.peaks.values()) + noise or is_new or _is_straight(bounds.peaks, left, right):
        return bounds.inside(crossing) if crossing < bounds.high or not bounds.has_failed else bounds.middle()
    # The line starts on the flat part, so it is too gentle and meets the limit too far out. A second size a little
    # up the rising part gives its true slope.
    size = right + max(1 + right // 32, min(right, (min(crossing, bounds.high) - right) // 8))
    return size if size < bounds.high else bounds.middle()


def _is_straight(peaks: dict[int, int], left: int, right: int) -> bool:
    """Whether sizes between the two ends lie on the line through them, to a sample's worth of it."""
    slope = (peaks[right] - peaks[left]) / (right - left)
    between = [size for size in peaks if left < size < right]
    return bool(between) and all(abs(peaks[size] - peaks[left] - slope * (size - left)) <= slope for size in between)


def _line(peaks: dict[int, int], noise: int) -> tuple[int, int] | None:
    """Return the two largest sizes that are far enough apart for rounding not to matter, if the peak rises there."""
    largest = max(peaks, default=0)
    below = max((n for n in peaks if n < largest - largest // 64), default=0)
    return (below, largest) if below and peaks[largest] > peaks[below] + noise else None


# So many probes find a line's end if runs of one size do not differ.
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
        guess = curve.roughly_within(limit - extra)
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
    above_low = max(bounds.low + 1, curve.roughly_within(curve.peak(bounds.low) + resolution))
    if not bounds.has_failed:
        # The first size too many may still fit by a hair; the second then rarely does.
        return bounds.inside(above_low if num_outside < 2 else bounds.low + 2 ** (num_outside - 1))
    if num_outside > 0:
        return bounds.middle()
    if guess >= bounds.high and resolution:
        return bounds.inside(curve.roughly_within(curve.peak(bounds.high) - resolution))
    # A failure that has overdone the correction leaves a wide gap.
    gap = curve.peak(bounds.high) - curve.peak(bounds.low)
    return bounds.middle() if gap > 8 * resolution > 0 else bounds.inside(above_low)


def fall_back(
    first: Generator[int, Seen, None], second: Callable[[], Generator[int, Seen, None]]
) -> Generator[int, Seen, None]:
    """Run a search, and the second one if the first gives up with `CannotPredictError`.

    A trace can fail at a size though a smaller one was fine: a step may refuse large batches, or look at values
    there. What was probed until then stays known.
    """
    seen: dict[int, Seen] = {}
    try:
        size = next(first, None)
        while size is not None:
            seen[size] = yield size
            size = next_size(first, seen[size])
    except CannotPredictError:
        yield from skip_known(second(), seen.get)


def skip_known(search: Generator[int, Seen, None], recall: Callable[[int], Seen | None]) -> Generator[int, Seen, None]:
    """Run a search, and answer it from what is known in place of a probe."""
    size = next(search, None)
    while size is not None:
        size = next_size(search, recall(size) or (yield size))


def next_size(search: Generator[int, Seen, None], seen: Seen) -> int | None:
    """Tell a search what a probe showed, and return the size it wants next; None at its end."""
    try:
        return search.send(seen)
    except StopIteration:
        return None
