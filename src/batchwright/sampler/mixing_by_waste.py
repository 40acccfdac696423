"""As much shuffling as a waste target allows: the most windows whose batches stay within it.

What a window wastes depends on how many samples it holds, hardly on how many windows there are. So it is measured on a
part of the samples, a few windows of each size, and halving the step a few times finds the size. Besides padding, room
that batches leave free counts: small windows end in batches that are not full, and a batch of one has no padding.
"""

from __future__ import annotations

from numbers import Real
from typing import TYPE_CHECKING

import numpy as np

from batchwright.errors import InvalidInputError
from batchwright.sampler.epoch_plan import Mixing, cut_epoch, plan_epoch

if TYPE_CHECKING:
    import numpy.typing as npt

    from batchwright.sampler.cost import Budget

    Numbers = npt.NDArray[np.int64]

_SMALLEST_WINDOW = 32
_LEAST_SAMPLES, _MOST_SAMPLES = 40_000, 100_000
# A part of the samples tells the waste of all of them to within a few percent.
_SAFETY = 0.95
_CLASSES = (1, 2, 4, 8, 16, 32)


def choose_mixing(lengths: Numbers, budget: Budget, *, waste: float, seed: int) -> Mixing:
    """Return the most windows whose padding is at most `waste`, and whose batches are hardly more than need be."""
    if isinstance(waste, bool) or not isinstance(waste, Real) or not 0 <= float(waste) < 1:
        raise InvalidInputError(f"waste is a share of the padded tokens, from 0 to below 1; received {waste!r}.")
    number, waste = len(lengths), float(waste)
    if number <= _SMALLEST_WINDOW:
        return Mixing(1)
    classes, largest = 1, min(number, _MOST_SAMPLES)
    full = _looked_at(lengths, budget, largest, 1, seed)
    if lengths.shape[1] == 2:
        largest = min(largest, _LEAST_SAMPLES)
        # Alike in both lengths: more classes pad the second less, and leave fewer of each for the first.
        tried = {count: _looked_at(lengths, budget, largest, count, seed) for count in _CLASSES}
        classes = min(tried, key=lambda count: tried[count][1])
        full = tried[classes]
    # Sizes of windows by factors of 2^(1/4), from the smallest that is tried to all samples in one.
    steps = max(int(np.ceil(4 * np.log2(number / _SMALLEST_WINDOW))), 1)
    sizes = np.unique(np.append((number / 2 ** (np.arange(steps) / 4)).astype(np.int64), number))
    low, high = 0, len(sizes) - 1
    while low < high:
        middle = (low + high) // 2
        padding, room = _looked_at(lengths, budget, int(sizes[middle]), classes, seed)
        # As much again for batches that are not full.
        if padding <= _SAFETY * waste and room * (1 - min(2 * waste, 0.5)) <= full[1]:
            high = middle
        else:
            low = middle + 1
    return Mixing(max(number // int(sizes[low]), 1), classes)


def _looked_at(lengths: Numbers, budget: Budget, window: int, classes: int, seed: int) -> tuple[float, float]:
    """Return the share of padding, and the room of all batches over the tokens in them."""
    rng = np.random.default_rng((seed, window))
    windows = max(1, -(-_LEAST_SAMPLES // window))
    if windows * window >= len(lengths):
        some, windows = lengths, max(len(lengths) // window, 1)
    else:
        some = lengths[rng.integers(0, len(lengths), windows * window)]
    cut = cut_epoch(some, budget, Mixing(windows, classes), rng=rng)
    plan = plan_epoch(some, cut, budget, ranks=1, rng=rng)
    tokens, padded = float(plan.tokens.sum()), float((plan.sizes * plan.longest).sum())
    return 1 - tokens / padded, plan.rounds.number / tokens
