"""As much shuffling as a waste target allows: the most windows whose batches stay within it.

The waste of a window depends on how many samples it holds, hardly on how many windows there are. So it is measured on a
part of the samples, a few windows of each size, and halving the step a few times finds the size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from batchwright.errors import InvalidInputError
from batchwright.sampler.epoch_plan import Mixing, plan_epoch

if TYPE_CHECKING:
    import numpy.typing as npt

    from batchwright.sampler.cost import Budget

    Numbers = npt.NDArray[np.int64]

_SMALLEST_WINDOW = 32
_LEAST_SAMPLES = 40_000
# A part of the samples tells the waste of all of them to within a few percent.
_SAFETY = 0.95
_CLASSES = (1, 2, 4, 8, 16, 32)


def choose_mixing(lengths: Numbers, budget: Budget, *, waste: float, seed: int) -> Mixing:
    """Return the most windows whose waste is at most `waste`; one window where none is."""
    if not isinstance(waste, int | float) or not 0 <= waste < 1:
        raise InvalidInputError(f"waste is a share of the padded tokens, from 0 to below 1; received {waste!r}.")
    number = len(lengths)
    if number <= _SMALLEST_WINDOW:
        return Mixing(1)
    classes = 1
    if lengths.shape[1] == 2:
        # Alike in both lengths: more classes pad the second less, and leave fewer of each for the first.
        middle = min(number, 8192)
        classes = min(_CLASSES, key=lambda count: _waste(lengths, budget, middle, count, seed))
    # Sizes of windows by factors of 2^(1/4), from the smallest that is tried to all samples in one.
    steps = max(int(np.ceil(4 * np.log2(number / _SMALLEST_WINDOW))), 1)
    sizes = np.unique(np.append((number / 2 ** (np.arange(steps) / 4)).astype(np.int64), number))
    low, high = 0, len(sizes) - 1
    while low < high:
        middle = (low + high) // 2
        if _waste(lengths, budget, int(sizes[middle]), classes, seed) <= _SAFETY * waste:
            high = middle
        else:
            low = middle + 1
    return Mixing(max(number // int(sizes[low]), 1), classes)


def _waste(lengths: Numbers, budget: Budget, window: int, classes: int, seed: int) -> float:
    rng = np.random.default_rng((seed, window))
    wanted = max(4 * window, _LEAST_SAMPLES)
    some = (
        lengths if wanted >= len(lengths) else lengths[rng.choice(len(lengths), wanted, replace=False, shuffle=False)]
    )
    plan = plan_epoch(some, budget, Mixing(max(len(some) // window, 1), classes), ranks=1, rng=rng)
    return 1 - float(plan.tokens.sum()) / float((plan.sizes * plan.longest).sum())
