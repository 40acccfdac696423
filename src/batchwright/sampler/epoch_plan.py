"""One epoch planned: which samples make which batch, for which rank, in which round; and what that is like, in figures.

Every sample is thrown into one of several windows at random, and each window is sorted, longest first. One window is a
full sort: nearly no padding, but the same batch-mates in every epoch. Many windows are nearly random. Window, length
and sample share one 64-bit key, so that a single sort of plain integers does all of it. The batches cut from that order
are dealt to ranks: one for each in every round, of like cost, in shuffled order.

Promises:
- every sample comes exactly once, for any number of ranks, and a batch costs at most the budget;
- a plan is a function of seed, epoch and what is left of the epoch: it is made anew, never replayed;
- no loop over samples: one sort, then as many vector operations as a window has batches;
- every rank has as many batches as the others: batches are split if they do not go up in rounds, and if there are
  fewer samples than places, ranks repeat one that counts nothing, in the last round;
- within a round costs are as alike as the batches allow, so that ranks hardly wait for each other.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from batchwright.printed_result import PrintedResult

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from batchwright.sampler.cost import Budget, Numbers, Usable


# As many as these leave next to no ties.
_TIE_BITS = 16


@dataclass(frozen=True)
class CutOrder:
    """The samples of an epoch, and where each batch starts; the last ends with the samples."""

    order: npt.NDArray[np.int32] | Numbers
    starts: Numbers
    longest: Numbers
    """Tokens that each batch is padded to."""
    padded: Numbers
    """Tokens of each sample, both lengths together, in this order."""

    def padded_to(self, starts: Numbers, stops: Numbers) -> Numbers:
        """Return what parts of batches are padded to: their longest sample; of two lengths, about that."""
        if not len(starts):
            return np.zeros(0, np.int64)
        edges = np.stack([starts, np.minimum(stops, len(self.padded) - 1)], axis=1).ravel()
        return np.maximum(np.maximum.reduceat(self.padded, edges)[::2], self.padded[stops - 1])

    @property
    def stops(self) -> Numbers:
        """Where each batch ends."""
        return np.append(self.starts[1:], len(self.order))


def cut_in_windows(
    lengths: Numbers, budget: Budget, *, num_windows: int, num_classes: int, rng: np.random.Generator
) -> CutOrder:
    """Throw samples into windows, sort each, and cut them into batches within the budget.

    `lengths` has one or two columns. With two, a window is parted into classes by the second before it is sorted by the
    first, so that neighbours are alike in both.

    >>> from batchwright.sampler.cost import Budget
    >>> lengths = np.array([[5], [1], [4], [2], [3]])
    >>> cut = cut_in_windows(lengths, Budget(9), num_windows=1, num_classes=1, rng=np.random.default_rng(0))
    >>> cut.order.tolist(), cut.starts.tolist(), cut.longest.tolist()
    ([0, 2, 4, 3, 1], [0, 1, 3], [5, 4, 2])
    """
    number = len(lengths)
    if number == 0:
        nothing = np.zeros(0, np.int64)
        return CutOrder(np.zeros(0, np.int32), nothing, nothing, nothing)
    has_two = lengths.shape[1] == 2
    if has_two and np.ptp(lengths[:, 1]) > np.ptp(lengths[:, 0]):
        lengths = lengths[:, ::-1]  # sorted by the one that differs more
    groups = rng.integers(0, num_windows, number, dtype=np.uint32).astype(np.int64)
    if has_two and num_classes > 1:
        groups = groups * num_classes + _classes(lengths[:, 1], num_classes)
    order, padded, ends = _sorted(lengths[:, 0], groups, num_windows * num_classes, rng)
    if not has_two:
        starts = _cut(padded, budget, ends)
        return CutOrder(order, starts, padded[starts], padded)
    second = lengths[order, 1]
    starts = _cut_by_two(padded, second, budget, ends)
    return CutOrder(order, starts, padded[starts] + np.maximum.reduceat(second, starts), padded + second)


def _sorted(
    lengths: Numbers, groups: Numbers, num_groups: int, rng: np.random.Generator
) -> tuple[Any, Numbers, Numbers]:
    """Return the samples by group, longest first, their lengths, and where each group that has any ends.

    Samples of one length are in random order: by their number they would meet again in every epoch.
    """
    number, longest = len(lengths), int(lengths.max())
    index_bits, length_bits = max(number - 1, 1).bit_length(), longest.bit_length()
    spare = 63 - index_bits - length_bits - num_groups.bit_length()
    kind: Any = np.int32 if number < 2**31 else np.int64
    if spare < 0:
        order = np.lexsort((rng.random(number), -lengths, groups)).astype(kind)
        in_order, sorted_lengths = groups[order], lengths[order]
    else:
        tie_bits = min(spare, _TIE_BITS)
        # In place, and ties in half the bytes: with millions of samples every further array costs as much as the sort.
        key = groups
        key <<= length_bits
        key += longest
        key -= lengths
        key <<= tie_bits
        key |= rng.integers(0, 1 << tie_bits, number, dtype=np.uint32)
        key <<= index_bits
        key |= np.arange(number, dtype=kind)
        key.sort()
        order = (key & ((1 << index_bits) - 1)).astype(kind)
        key >>= index_bits + tie_bits
        sorted_lengths = key & ((1 << length_bits) - 1)
        np.subtract(longest, sorted_lengths, out=sorted_lengths)
        key >>= length_bits
        in_order = key
    ends: Numbers = np.append(np.flatnonzero(in_order[1:] != in_order[:-1]) + 1, number)
    return order, sorted_lengths, ends


def _cut(padded: Numbers, budget: Budget, ends: Numbers) -> Numbers:
    """Walk all groups at once, each from batch to batch, and return where batches start."""
    at, stops, starts = np.concatenate(([0], ends[:-1])), ends, []
    # How many fit is looked up: by length where there are fewer lengths than samples, else by sample.
    longest = int(padded.max())
    by_length = longest < len(padded)
    most = np.maximum(budget.most_samples(np.arange(1, longest + 1) if by_length else padded), 1)
    while len(at):
        starts.append(at)
        at = at + (most[padded[at] - 1] if by_length else most[at])
        is_left = at < stops
        at, stops = at[is_left], stops[is_left]
    return np.sort(np.concatenate(starts))


def _cut_by_two(first: Numbers, second: Numbers, budget: Budget, ends: Numbers) -> Numbers:
    """The same for samples of two lengths, sorted by the first: how far a batch goes depends on what it meets.

    The longest second length of a stretch bounds that of a batch within it. So each batch begins with what its whole
    group allows, is tried at stretches that double, and takes the most samples that some stretch allows.
    """
    at, stops, starts = np.concatenate(([0], ends[:-1])), ends, []
    bound = np.maximum.reduceat(second, at)
    while len(at):
        starts.append(at)
        best = np.minimum(np.maximum(budget.most_samples(first[at] + bound), 1), stops - at)
        reach = 2 * best
        open_ones = np.arange(len(at))
        while len(open_ones):
            begin, end = at[open_ones], np.minimum(at[open_ones] + reach[open_ones], stops[open_ones])
            edges = np.stack([begin, np.minimum(end, len(second) - 1)], axis=1).ravel()
            longest = np.maximum(np.maximum.reduceat(second, edges)[::2], second[end - 1])
            most = np.minimum(budget.most_samples(first[begin] + longest), end - begin)
            best[open_ones] = np.maximum(best[open_ones], most)
            # A stretch that is not full, and not the end, may be longer.
            goes_on = (most == end - begin) & (end < stops[open_ones])
            open_ones = open_ones[goes_on]
            reach[open_ones] *= 2
        if budget.multiple_of > 1:
            best -= np.where(best >= budget.multiple_of, best % budget.multiple_of, 0)
        at = at + best
        is_left = at < stops
        at, stops, bound = at[is_left], stops[is_left], bound[is_left]
    return np.sort(np.concatenate(starts))


def _classes(second: Numbers, num_classes: int) -> Numbers:
    """Part samples into classes of about as many each by their second length, alike ones together."""
    edges = np.unique(np.quantile(second, np.arange(1, num_classes) / num_classes, method="lower"))
    return np.searchsorted(edges, second, side="left")


@dataclass(frozen=True)
class Rounds:
    """Where each batch starts and ends in the order of the epoch: rounds x ranks."""

    starts: Numbers
    stops: Numbers
    num_repeats: int = 0
    """The last ranks' batches of the last round that only keep them in step: they repeat a sample at weight 0."""

    @property
    def number(self) -> int:
        """Rounds of the epoch."""
        return len(self.starts)

    def is_repeat(self, index: int, rank: int) -> bool:
        """Whether a batch counts nothing."""
        if not 0 <= index < self.number:
            raise IndexError(f"batch {index} of {self.number}")
        return self.num_repeats > 0 and index == self.number - 1 and rank >= self.starts.shape[1] - self.num_repeats


def deal(cut: CutOrder, budget: Budget, *, ranks: int, rng: np.random.Generator, least_rounds: int = 0) -> Rounds:
    """Deal the batches of an epoch to ranks, in `least_rounds` or more where there are samples enough for them.

    >>> from batchwright.sampler.cost import Budget
    >>> from batchwright.sampler.epoch_plan import CutOrder
    >>> lengths = np.array([4, 4, 3, 3, 3, 2, 2, 1])
    >>> cut = CutOrder(np.arange(8), np.array([0, 2, 5]), np.array([4, 3, 2]), lengths)
    >>> found = deal(cut, Budget(9), ranks=2, rng=np.random.default_rng(0))
    >>> sorted(zip(found.starts.ravel().tolist(), found.stops.ravel().tolist()))
    [(0, 2), (2, 5), (5, 7), (7, 8)]
    """
    number = len(cut.starts)
    if number == 0:
        return Rounds(np.zeros((0, ranks), np.int64), np.zeros((0, ranks), np.int64))
    rounds = max(-(-number // ranks), min(least_rounds, len(cut.order) // ranks))
    begins, ends, padded = _split(cut, rounds * ranks, ranks, rng)
    # Of like cost together, then shuffled: who gets what within a round, and the rounds among each other.
    by_cost = np.argsort(-budget.cost.of(ends - begins, padded), kind="stable")
    begins, ends = begins[by_cost], ends[by_cost]
    repeats = rounds * ranks - len(begins)
    begins = np.append(begins, np.repeat(begins[:1], repeats)).reshape(rounds, ranks)
    ends = np.append(ends, np.repeat(begins[0, :1] + 1, repeats)).reshape(rounds, ranks)
    places = np.tile(np.arange(ranks), (rounds, 1))
    shuffled = rounds - (repeats > 0)
    places[:shuffled] = rng.permuted(places[:shuffled], axis=1)
    order = np.append(rng.permutation(shuffled), np.arange(shuffled, rounds))[:, None]
    return Rounds(begins[order, places[order[:, 0]]], ends[order, places[order[:, 0]]], repeats)


def _split(cut: CutOrder, places: int, ranks: int, rng: np.random.Generator) -> tuple[Numbers, Numbers, Numbers]:
    """Split batches until there are as many as places; all into single samples where even that is too few.

    Returns where each begins and ends, and what it is padded to. Any batch may be split that has samples enough, so
    that no kind of sample always ends up in pieces; where too few have, the largest are.
    """
    starts, stops = cut.starts, cut.stops
    sizes, more = stops - starts, places - len(starts)
    if more == 0:
        return starts, stops, cut.longest
    if places >= len(cut.order):
        begins = np.arange(len(cut.order))
        return begins, begins + 1, cut.padded
    # Those that are split fill rounds of their own, two pieces each where that comes out.
    wanted = min(len(starts), len(starts) % ranks + more // ranks * ranks)
    enough = np.flatnonzero(sizes * wanted >= wanted + more)
    if len(enough) >= wanted:
        chosen = rng.choice(enough, wanted, replace=False)
    else:
        chosen = np.argsort(-sizes, kind="stable")
        chosen = chosen[: int(np.searchsorted(np.cumsum(sizes[chosen] - 1), more)) + 1]
    kept = np.delete(np.arange(len(starts)), chosen)
    parts = _parts(sizes[chosen], more)
    pieces = [_pieces(cut, int(starts[i]), int(stops[i]), number) for i, number in zip(chosen, parts, strict=True)]
    begins = np.concatenate([starts[kept], *(piece[:-1] for piece in pieces)])
    ends = np.concatenate([stops[kept], *(piece[1:] for piece in pieces)])
    return begins, ends, np.concatenate([cut.longest[kept], cut.padded_to(begins[len(kept) :], ends[len(kept) :])])


def _parts(sizes: Numbers, more: int) -> list[int]:
    """How many pieces to make of each batch, `more` than there are batches, the largest pieces first."""
    parts = np.ones(len(sizes), np.int64) + more // len(sizes)
    np.minimum(parts, sizes, out=parts)
    for _ in range(len(sizes) + more - int(parts.sum())):
        parts[np.argmax(np.where(sizes > parts, sizes / parts, 0.0))] += 1
    numbers: list[int] = parts.tolist()
    return numbers


def _pieces(cut: CutOrder, start: int, stop: int, parts: int) -> Numbers:
    """Where to cut a batch into pieces of about as many tokens, at least one sample each."""
    reached = np.cumsum(cut.padded[start:stop])
    inner = np.searchsorted(reached, reached[-1] * np.arange(1, parts) / parts) + 1
    least = np.arange(1, parts)
    inner = np.minimum(np.maximum.accumulate(np.maximum(inner - least, 0)) + least, stop - start - least[::-1])
    return start + np.concatenate(([0], inner, [stop - start]))


@dataclass(frozen=True)
class Mixing:
    """How far samples are thrown about before they are sorted."""

    num_windows: int
    num_classes: int = 1
    """By the second length, where there are two."""


@dataclass(frozen=True)
class EpochPlan:
    """The batches of an epoch, or of what was left of one."""

    lengths: Numbers
    samples: npt.NDArray[np.int32] | Numbers
    """In the order of the batches."""
    rounds: Rounds
    budget: Budget

    def batch(self, index: int, rank: int) -> list[int]:
        """Return the samples of one rank in one round."""
        batch: list[int] = self.samples[self.rounds.starts[index, rank] : self.rounds.stops[index, rank]].tolist()
        return batch

    @property
    def waste(self) -> float:
        """The padding over all tokens of the batches."""
        padded = float((self.sizes * self.longest).sum())
        return 1 - float(self.tokens.sum()) / padded if padded else 0.0

    def left_after(self, num_rounds: int) -> Numbers:
        """Return the samples that the first rounds leave over."""
        taken = np.zeros(len(self.samples) + 1, np.int64)
        np.add.at(taken, self.rounds.starts[:num_rounds], 1)
        np.add.at(taken, self.rounds.stops[:num_rounds], -1)
        return np.sort(self.samples[np.cumsum(taken[:-1]) == 0]).astype(np.int64)

    @cached_property
    def _real(self) -> npt.NDArray[np.bool_]:
        real = np.ones(self.rounds.starts.shape, bool)
        if self.rounds.num_repeats:
            real[-1, -self.rounds.num_repeats :] = False
        return real

    @cached_property
    def sizes(self) -> Numbers:
        """Samples of each batch: rounds x ranks, 0 where it only keeps step."""
        return (self.rounds.stops - self.rounds.starts) * self._real

    @cached_property
    def longest(self) -> Numbers:
        """Tokens that each batch is padded to."""
        return self._reduced(np.maximum)

    @cached_property
    def tokens(self) -> Numbers:
        """Tokens of each batch that are no padding."""
        return self._reduced(np.add)

    @cached_property
    def costs(self) -> npt.NDArray[np.float64]:
        """What each batch costs."""
        return np.where(self.sizes > 0, self.budget.cost.of(self.sizes, self.longest), 0.0)

    def _reduced(self, how: np.ufunc) -> Numbers:
        """Reduce the lengths of each batch, the columns apart, and add up the columns."""
        shape = self.rounds.starts.shape
        if not len(self.samples):
            return np.zeros(shape, np.int64)
        flat = self.rounds.starts.ravel()
        # Batches tile the order but for repeats, which come last: reduce by starts in order, then put back.
        in_order = np.argsort(flat, kind="stable")
        unique, back = np.unique(flat[in_order], return_inverse=True)
        total = sum(how.reduceat(self.lengths[self.samples, column], unique) for column in range(self.lengths.shape[1]))
        reduced = np.empty(len(flat), np.int64)
        reduced[in_order] = np.asarray(total)[back]
        return reduced.reshape(shape) * self._real


@dataclass
class FirstEpoch:
    """How many batches epoch 0 has, by which every epoch has as many rounds: noted when it is planned, else counted."""

    count: Callable[[], int]
    number: int | None = None

    def batches(self) -> int:
        """Return them."""
        if self.number is None:
            self.number = self.count()
        return self.number


def rounds_of_every_epoch(first_batches: int, mixing: Mixing, ranks: int) -> int:
    """Return the rounds of every epoch: those of the first, and some to spare, so that the others do not need more.

    A Trainer and Lightning take the length of one epoch for all. Windows differ in their samples from epoch to epoch,
    and so in their batches, by about one in two or three.
    """
    return -(-(first_batches + math.ceil(2 * math.sqrt(mixing.num_windows - 1))) // ranks)


def cut_epoch(
    lengths: Numbers,
    budget: Budget,
    mixing: Mixing,
    *,
    rng: np.random.Generator,
    left: Numbers | None = None,
    most_batches: int | None = None,
) -> CutOrder:
    """Cut an epoch, or what is `left` of one, into batches; where they are too many, with less shuffling."""
    some = lengths if left is None else lengths[left]
    windows = mixing.num_windows
    while True:
        cut = cut_in_windows(some, budget, num_windows=windows, num_classes=mixing.num_classes, rng=rng)
        if windows == 1 or most_batches is None or len(cut.starts) <= most_batches:
            return cut if left is None else replace(cut, order=left[cut.order])
        windows //= 2


def plan_epoch(
    lengths: Numbers, cut: CutOrder, budget: Budget, *, ranks: int, rng: np.random.Generator, least_rounds: int = 0
) -> EpochPlan:
    """Deal the batches of an epoch to so many ranks.

    >>> from batchwright.sampler.cost import Budget
    >>> lengths, rng = np.array([[5], [1], [4], [2], [3]]), np.random.default_rng(0)
    >>> plan = plan_epoch(lengths, cut_epoch(lengths, Budget(9), Mixing(1), rng=rng), Budget(9), ranks=2, rng=rng)
    >>> sorted(sample for index in range(plan.rounds.number) for rank in (0, 1) for sample in plan.batch(index, rank))
    [0, 1, 2, 3, 4]
    """
    return EpochPlan(lengths, cut.order, deal(cut, budget, ranks=ranks, rng=rng, least_rounds=least_rounds), budget)


@dataclass(frozen=True, repr=False)
class SamplerStats(PrintedResult):
    """An epoch in figures; shares are from 0 to 1."""

    in_repr = ("samples", "batches", "ranks", "waste", "fill", "pair_repeat")
    drawn_by = "plan_text.draw_stats"

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


def summarize_epoch(plan: EpochPlan, following: EpochPlan, usable: Usable, num_windows: int) -> SamplerStats:
    """Return what an epoch is like, beside the one after it."""
    num_batches = int((plan.sizes > 0).sum())
    return SamplerStats(
        samples=len(plan.samples),
        batches=num_batches,
        steps=plan.rounds.number,
        ranks=plan.rounds.starts.shape[1],
        tokens=int(plan.tokens.sum()),
        waste=plan.waste,
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


def share_idle(plan: EpochPlan) -> float:
    """Return the share of the time that ranks wait within a round."""
    # What is there for any batch, such as the bytes of weights, takes no time.
    costs = np.where(plan.sizes > 0, plan.costs - plan.budget.cost.fixed, 0.0)
    spent = float(costs.max(axis=1).sum()) * costs.shape[1] if plan.rounds.number else 0.0
    return 1 - float(costs.sum()) / spent if spent else 0.0


# Pairs are counted among the samples of some batches: enough for three digits.
_MOST_SAMPLES_COUNTED = 1_000_000


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
    numbers = np.full(number, -1, np.int64)
    numbers[plan.samples] = np.repeat(np.arange(len(starts)), (stops - starts)[in_order])
    return numbers
