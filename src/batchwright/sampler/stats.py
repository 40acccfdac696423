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

from dataclasses import asdict, dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from batchwright.errors import InvalidInputError
from batchwright.printed_result import PrintedResult
from batchwright.sampler.epoch_plan import Mixing, cut_epoch, plan_epoch

if TYPE_CHECKING:
    import numpy.typing as npt
    from rich.console import RenderableType

    from batchwright.sampler.cost import Budget, Usable
    from batchwright.sampler.epoch_plan import CutOrder, EpochPlan

    Numbers = npt.NDArray[np.int64]


# What an epoch of batches will be like, before training starts.

# Pairs are counted among the samples of some batches: enough for three digits.
_MOST_SAMPLES_COUNTED = 1_000_000


@dataclass(frozen=True, repr=False)
class SamplerStats(PrintedResult):
    """An epoch in figures; shares are from 0 to 1."""

    in_repr = ("samples", "batches", "ranks", "waste", "fill", "pair_repeat")

    samples: int
    batches: int
    """On all ranks."""
    steps: int
    """Batches of one rank."""
    ranks: int
    tokens: int
    """That are no padding."""
    waste: float
    """Padding over all tokens of the batches."""
    fill: float
    """What batches cost, over the budget, on average."""
    rank_idle: float
    """Time that ranks wait for the costliest batch of a round, if time goes as cost."""
    pair_repeat: float
    """The chance that two samples of one batch meet again in the next epoch."""
    largest_cost: float
    budget: float
    num_windows: int
    repeats: int
    """Batches that only keep a rank in step: they repeat a sample at weight 0."""
    dropped: int
    """Samples over the budget on their own, left out."""
    single: int
    """Samples over the budget on their own, each a batch by itself."""
    off_multiple: int
    """Batches whose samples are no multiple of what was asked: ends of windows, and pieces for ranks."""

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        return {"schema": 1, "source": "formula", **asdict(self)}

    def __rich__(self) -> RenderableType:
        from batchwright.report.text.sampler_text import draw_stats

        return draw_stats(self)

    def _repr_html_(self) -> str:
        from batchwright.report.display import table_to_html
        from batchwright.report.text.sampler_text import stats_columns, stats_remarks, summarize_stats

        return table_to_html(summarize_stats(self), stats_columns(self), stats_remarks(self))


def stats_of(plan: EpochPlan, following: EpochPlan, usable: Usable, num_windows: int) -> SamplerStats:
    """Return what an epoch is like, beside the one after it."""
    num_batches = int((plan.sizes > 0).sum())
    return SamplerStats(
        samples=len(plan.samples),
        batches=num_batches,
        steps=plan.rounds.number,
        ranks=plan.rounds.starts.shape[1],
        tokens=int(plan.tokens.sum()),
        waste=share_of_padding(plan),
        fill=float(plan.costs.sum()) / num_batches / float(plan.budget.limit) if num_batches else 0.0,
        rank_idle=share_idle(plan),
        pair_repeat=pair_repeat(plan, following, len(plan.lengths)),
        largest_cost=float(plan.costs.max(initial=0.0)),
        budget=float(plan.budget.limit),
        num_windows=num_windows,
        repeats=plan.rounds.num_repeats,
        dropped=usable.num_dropped,
        single=usable.num_single,
        off_multiple=int((plan.sizes % plan.budget.multiple_of > 0).sum()),
    )


def share_of_padding(plan: EpochPlan) -> float:
    """Return the padding over all tokens of the batches."""
    padded = float((plan.sizes * plan.longest).sum())
    return 1 - float(plan.tokens.sum()) / padded if padded else 0.0


def share_idle(plan: EpochPlan) -> float:
    """Return the share of the time that ranks wait within a round."""
    # What is there for any batch, such as the bytes of weights, takes no time.
    costs = np.where(plan.sizes > 0, plan.costs - plan.budget.cost.fixed, 0.0)
    spent = float(costs.max(axis=1).sum()) * costs.shape[1] if plan.rounds.number else 0.0
    return 1 - float(costs.sum()) / spent if spent else 0.0


def pair_repeat(one: EpochPlan, other: EpochPlan, number: int) -> float:
    """Return the chance that two samples of one batch of the first plan share one of the second."""
    first, second = _batch_of(one, number), _batch_of(other, number)
    sizes = np.bincount(first[first >= 0])
    if sizes.sum() > _MOST_SAMPLES_COUNTED:
        chosen = np.zeros(len(sizes), bool)
        picked = np.random.default_rng(0).permutation(len(sizes))
        chosen[picked[: np.searchsorted(np.cumsum(sizes[picked]), _MOST_SAMPLES_COUNTED)]] = True
        first = np.where((first >= 0) & chosen[first], first, -1)
        sizes = sizes * chosen
    pairs = int((sizes * (sizes - 1)).sum())
    if not pairs:
        return 0.0
    both = (first >= 0) & (second >= 0)
    _, together = np.unique(first[both] * (int(second.max()) + 1) + second[both], return_counts=True)
    return float((together * (together - 1)).sum() / pairs)


def _batch_of(plan: EpochPlan, number: int) -> npt.NDArray[np.int64]:
    """Return the number of each sample's batch; -1 for samples that are in none."""
    starts, stops = plan.rounds.starts.ravel(), plan.rounds.stops.ravel()
    is_real = (plan.sizes > 0).ravel()
    starts, stops = starts[is_real], stops[is_real]
    in_order = np.argsort(starts)
    found = np.full(number, -1, np.int64)
    found[plan.samples] = np.repeat(np.arange(len(starts)), (stops - starts)[in_order])
    return found


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
        found = choose_mixing(lengths, budget, waste=_DEFAULT_WASTE, seed=seed)
        return found if found.num_windows >= _ENOUGH_WINDOWS else _mixed_enough(lengths, budget, found, seed)
    if isinstance(waste, bool) or not isinstance(waste, Real) or not 0 <= float(waste) < 1:
        raise InvalidInputError(f"waste is a share of the padded tokens, from 0 to below 1; received {waste!r}.")
    number, waste = len(lengths), float(waste)
    if number <= _SMALLEST_WINDOW or not np.ptp(lengths, axis=0).any():
        return Mixing(1)  # samples of one length are in random order anyhow
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


def _mixed_enough(lengths: Numbers, budget: Budget, found: Mixing, seed: int) -> Mixing:
    """Return more windows than a small waste allows: enough, or as many as cost little; at least two."""
    if len(lengths) <= _SMALLEST_WINDOW or not np.ptp(lengths, axis=0).any():
        return found

    def cut_into(windows: int, epoch: int = 0) -> CutOrder:
        rng = np.random.default_rng((seed, windows, epoch))
        return cut_epoch(lengths, budget, Mixing(windows, found.num_classes), rng=rng)

    def num_batches(windows: int) -> int:
        return len(cut_into(windows).starts)

    rng = np.random.default_rng(seed)
    one, other = (plan_epoch(lengths, cut_into(found.num_windows, epoch), budget, ranks=1, rng=rng) for epoch in (0, 1))
    by_chance = float((one.sizes * (one.sizes - 1)).sum()) / (len(lengths) * (len(lengths) - 1))
    if pair_repeat(one, other, len(lengths)) <= max(_FEW_REPEATS, _NEARLY_CHANCE * by_chance):
        return found  # many samples of one length mix by themselves
    least = num_batches(1)
    for windows in range(_ENOUGH_WINDOWS, max(found.num_windows, _FEWEST_WINDOWS), -1):
        if num_batches(windows) <= _MOST_BATCHES * least:
            return Mixing(windows, found.num_classes)
    return Mixing(max(found.num_windows, min(_FEWEST_WINDOWS, least)), found.num_classes)


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
