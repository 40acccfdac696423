"""As much shuffling as a waste target allows: the most windows whose batches stay within it.

What a window wastes depends on how many samples it holds, hardly on how many windows there are. So it is measured on a
part of the samples, a few windows of each size, and halving the step a few times finds the size. Besides padding, room
that batches leave free counts: small windows end in batches that are not full, and a batch of one has no padding.

With few samples a small target leaves one window, and that the same batches in every epoch. So where no target is
given, there are windows enough that about one pair of batch-mates in nine meets again (0.65 over the windows, whatever
the number of samples: benchmarks/sampler_mixing.py), if that takes at most a quarter more batches; and two always, but
where batches are so few, or so alike in length, that they repeat hardly more pairs than by chance.
"""

from __future__ import annotations

from numbers import Real
from typing import TYPE_CHECKING

import numpy as np

from batchwright.errors import InvalidInputError
from batchwright.sampler.epoch_plan import CutOrder, Mixing, cut_epoch, pair_repeat, plan_epoch

if TYPE_CHECKING:
    from batchwright.sampler.cost import Budget, Numbers

_SMALLEST_WINDOW = 32
_LEAST_SAMPLES, _MOST_SAMPLES = 40_000, 100_000
# A part of the samples tells the waste of all of them to within a few percent.
_SAFETY = 0.95
_CLASSES = (1, 2, 4, 8, 16, 32)
_DEFAULT_WASTE = 0.015
# What shuffling may cost where nobody says: batches, over those of a full sort.
_ENOUGH_WINDOWS, _FEWEST_WINDOWS, _MOST_BATCHES = 6, 2, 1.25
_FEW_REPEATS = 1 / 9
# Of the repeats that batches of these sizes have when their samples are drawn at random: few batches repeat many pairs.
_NEARLY_CHANCE = 1.5


def choose_mixing(lengths: Numbers, budget: Budget, *, waste: float | None, seed: int) -> Mixing:
    """Return the most windows whose padding is at most `waste`, and whose batches are hardly more than need be.

    With `waste=None` the target is 1.5 %, and more where that would leave next to no shuffling.
    """
    if waste is None:
        mixing = choose_mixing(lengths, budget, waste=_DEFAULT_WASTE, seed=seed)
        return mixing if mixing.num_windows >= _ENOUGH_WINDOWS else _mix_more(lengths, budget, mixing, seed)
    if isinstance(waste, bool) or not isinstance(waste, Real) or not 0 <= float(waste) < 1:
        raise InvalidInputError(f"waste is a share of the padded tokens, from 0 to below 1; received {waste!r}.")
    number, waste = len(lengths), float(waste)
    if number <= _SMALLEST_WINDOW or not np.ptp(lengths, axis=0).any():
        return Mixing(1)  # samples of one length are in random order anyhow
    classes, largest = 1, min(number, _MOST_SAMPLES)
    full = _measure_windows(lengths, budget, largest, 1, seed)
    if lengths.shape[1] == 2:
        largest = min(largest, _LEAST_SAMPLES)
        # Alike in both lengths: more classes pad the second less, and leave fewer of each for the first.
        tried = {count: _measure_windows(lengths, budget, largest, count, seed) for count in _CLASSES}
        classes = min(tried, key=lambda count: tried[count][1])
        full = tried[classes]
    # Sizes of windows by factors of 2^(1/4), from the smallest that is tried to all samples in one.
    steps = max(int(np.ceil(4 * np.log2(number / _SMALLEST_WINDOW))), 1)
    sizes = np.unique(np.append((number / 2 ** (np.arange(steps) / 4)).astype(np.int64), number))
    low, high = 0, len(sizes) - 1
    while low < high:
        middle = (low + high) // 2
        padding, room = _measure_windows(lengths, budget, int(sizes[middle]), classes, seed)
        # As much again for batches that are not full.
        if padding <= _SAFETY * waste and room * (1 - min(2 * waste, 0.5)) <= full[1]:
            high = middle
        else:
            low = middle + 1
    return Mixing(max(number // int(sizes[low]), 1), classes)


def _mix_more(lengths: Numbers, budget: Budget, mixing: Mixing, seed: int) -> Mixing:
    """Return more windows than a small waste allows: enough, or as many as cost little; at least two."""
    if len(lengths) <= _SMALLEST_WINDOW or not np.ptp(lengths, axis=0).any():
        return mixing

    def cut_into(windows: int, epoch: int = 0) -> CutOrder:
        rng = np.random.default_rng((seed, windows, epoch))
        return cut_epoch(lengths, budget, Mixing(windows, mixing.num_classes), rng=rng)

    def num_batches(windows: int) -> int:
        return len(cut_into(windows).starts)

    rng = np.random.default_rng(seed)
    one, other = (
        plan_epoch(lengths, cut_into(mixing.num_windows, epoch), budget, ranks=1, rng=rng) for epoch in (0, 1)
    )
    by_chance = float((one.sizes * (one.sizes - 1)).sum()) / (len(lengths) * (len(lengths) - 1))
    if pair_repeat(one, other, len(lengths)) <= max(_FEW_REPEATS, _NEARLY_CHANCE * by_chance):
        return mixing  # many samples of one length mix by themselves
    least = num_batches(1)
    for windows in range(_ENOUGH_WINDOWS, max(mixing.num_windows, _FEWEST_WINDOWS), -1):
        if num_batches(windows) <= _MOST_BATCHES * least:
            return Mixing(windows, mixing.num_classes)
    return Mixing(max(mixing.num_windows, min(_FEWEST_WINDOWS, least)), mixing.num_classes)


def _measure_windows(lengths: Numbers, budget: Budget, window: int, classes: int, seed: int) -> tuple[float, float]:
    """Return the share of padding, and the room of all batches over the tokens in them."""
    rng = np.random.default_rng((seed, window))
    windows = max(1, -(-_LEAST_SAMPLES // window))
    if windows * window >= len(lengths):
        some, windows = lengths, max(len(lengths) // window, 1)
    else:
        some = lengths[rng.integers(0, len(lengths), windows * window)]
    cut = cut_epoch(some, budget, Mixing(windows, classes), rng=rng)
    plan = plan_epoch(some, cut, budget, ranks=1, rng=rng)
    return plan.waste, plan.rounds.number / float(plan.tokens.sum())
