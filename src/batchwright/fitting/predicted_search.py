"""The search that a prediction leads: try where the predicted curve meets the limit, and correct it by what is seen.

Promises:
- a wrong prediction costs probes, never a wrong answer;
- sizes that lie closer together than two runs of one size do are worth no fifth probe;
- a step that runs out of memory far below the limit has a reason of its own, and is searched to the sample.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchwright.fitting.curve import Curve
from batchwright.fitting.search import Bounds

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from batchwright.fitting.search import Seen

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
