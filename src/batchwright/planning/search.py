"""The largest size within a budget: every search for it, by few looks or few probes; none knows of devices.

The peak is a maximum of affine pieces in the micro-batch (forward, backward, optimizer step), flat at first and
then rising, so it is convex: a chord lies above it, and a line drawn on beyond two of its points lies below. Where a
size can be looked at (a trace, a formula), `Curve` and `largest_within` do so. Where it has to be run, a search is a
generator: it yields a size and is sent what happened there. Whoever drives it (one process, children, many ranks) runs
the probe. A search ends when the largest size that fits and the smallest that does not are neighbours.

Promises of looks:
- the exact answer was looked at and is within the limit; so was the next size, which is not, unless it is past the cap;
- a peak that is not convex costs looks, never a wrong answer, as long as it does not fall;
- a rough answer spends no look on a piece that is known to be straight; what one limit learnt serves the next;
- no size is looked at twice.

Promises of probes:
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
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from itertools import cycle

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
    by_tensors = cycle((find_crossing, meet_lines, halve))
    # What is reserved is no line near the limit, where the allocator gives back what it has cached: steps downwards,
    # each twice the one before, reach the first that fits, and from then on only the middle is left.
    step, low_before = 0, -1
    size = 1
    while bounds.high - bounds.low > max(1, bounds.low // _FINEST):
        seen = yield size
        bounds.learn(seen)
        if seen.peak is not None and seen.allocated is not None:
            reserved[size], tensors[size] = seen.peak, seen.allocated
        low, high = bounds.low, bounds.high
        if not bounds.has_failed:
            # A line through two sizes on the flat start would lead too far.
            is_known = low in tensors
            size = min(meet_lines(tensors, low, cap + 1, limit), _LONGEST_STRIDE * low) if is_known else STRIDE * low
        elif low not in tensors or high not in tensors or limit >= reserved[high]:
            size = (low + high) // 2
        elif limit >= tensors[high]:
            low_before = low if low_before < 0 else low_before
            step = 2 * step or max(1, high // _FIRST_STEP)
            size = high - step if low == low_before and high - step > low else halve(tensors, low, high, limit)
        else:
            guess = next(by_tensors)
            # From the flat start a chord meets a limit just above it beside the smaller size, far from the rise.
            size = (halve if guess is find_crossing and _is_flat(tensors, low) else guess)(tensors, low, high, limit)
        size = bounds.inside(size)


def _is_flat(peaks: Mapping[int, int], size: int) -> bool:
    """Whether the peak has not risen up to a size."""
    return size > 1 and peaks[size] <= min(peaks.values())


# Beyond so many samples a gap of one is finer than what an allocator rounds to: a thousandth will do.
_FINEST = 1024
# Of the samples whose tensors fit, so small a share is taken off first where the allocator has no room for them.
_FIRST_STEP = 128
_LONGEST_STRIDE = 64


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
