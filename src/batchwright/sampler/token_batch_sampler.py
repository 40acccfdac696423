"""`TokenBatchSampler`: batches under a token budget, for a DataLoader; and how far its epoch has come.

An epoch is a row of segments: so many rounds on so many ranks. A change of ranks ends one segment; what its rounds have
left over is planned anew for the others. So a state is as short as there were changes, and resuming takes one plan for
each, however many rounds are done.

A sampler sees what is drawn from it, and a DataLoader may draw ahead. What the loop received is counted by somebody who
sees the loop: `track(loader)`, or an Accumulator.

Promises:
- no batch costs more than the budget, padded; every sample comes exactly once per epoch;
- the same seed and epoch give the same batches; all ranks have as many;
- a state counts batches that were received, never those that were drawn, and can be resumed from on another number of
  ranks; if nobody counts, there is none; one that asks for absurd work is refused.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from batchwright.errors import InvalidInputError
from batchwright.sampler.cost import BatchCost, Budget, Numbers, gather_lengths, select_usable
from batchwright.sampler.epoch_plan import (
    EpochPlan,
    FirstEpoch,
    Mixing,
    SamplerStats,
    cut_epoch,
    plan_epoch,
    rounds_of_every_epoch,
    summarize_epoch,
)
from batchwright.sampler.mixing import choose_mixing
from batchwright.units import counted, shortened, whole_number

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    from batchwright.fitting.fit_result import Fit


MOST_RANKS = 2**20
"""More than any cluster has; a plan holds one place for each rank and round."""


def check_num_ranks(value: object, name: str) -> int:
    """Return a number of ranks, or say why it cannot be one.

    >>> check_num_ranks(8, "world_size")
    8
    """
    ranks = whole_number(value, name)
    if ranks > MOST_RANKS:
        raise InvalidInputError(f"{name} is at most {MOST_RANKS:,}; received {shortened(value)}.")
    return ranks


def read_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return rank and number of ranks: as given, else the process group's, else one."""
    if (rank is None) != (world_size is None):
        raise InvalidInputError("rank and world_size go together.", remedy="both, or neither for the process group's")
    if rank is None or world_size is None:
        try:
            import torch.distributed as dist
        except ImportError:
            return 0, 1
        is_group = dist.is_available() and dist.is_initialized()
        return (dist.get_rank(), dist.get_world_size()) if is_group else (0, 1)
    rank, world_size = whole_number(rank, "rank", least=0), check_num_ranks(world_size, "world_size")
    if rank >= world_size:
        raise InvalidInputError(f"rank {rank} of {counted(world_size, 'rank')}: they are counted from 0.")
    return rank, world_size


# Each takes a plan of its own.
_MOST_SEGMENTS = 1_000


@dataclass
class Segment:
    """Rounds that are done on so many ranks."""

    ranks: int
    rounds: int = 0


@dataclass
class EpochProgress:
    """Where an epoch stands."""

    epoch: int = 0
    segments: list[Segment] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        """Rounds done on the present ranks."""
        return self.segments[-1].rounds if self.segments else 0

    def begin(self, epoch: int, ranks: int) -> None:
        """Begin an epoch."""
        self.epoch, self.segments = epoch, [Segment(ranks)]

    def resume_on(self, ranks: int) -> None:
        """Continue on this number of ranks."""
        if not self.segments:
            self.segments = [Segment(ranks)]
        elif self.segments[-1].ranks != ranks:
            if self.segments[-1].rounds == 0:
                self.segments.pop()
            self.segments.append(Segment(ranks))

    def plan(
        self,
        lengths: Numbers,
        usable: Numbers | None,
        budget: Budget,
        mixing: Mixing,
        seed: int,
        first: FirstEpoch,
    ) -> EpochPlan:
        """Plan what is left of the epoch; `usable` are the samples that take part, all where None."""
        left, least = usable, 0
        plan = None
        for number, segment in enumerate(self.segments):
            if plan is not None:
                before = self.segments[number - 1].rounds
                check_rounds(before, plan)
                left, least = plan.left_after(before), 0
            elif self.epoch > 0:
                least = rounds_of_every_epoch(first.batches(), mixing, segment.ranks)
            rng = np.random.default_rng((seed, self.epoch, number))
            most = least * segment.ranks or None
            cut = cut_epoch(lengths, budget, mixing, rng=rng, left=left, most_batches=most)
            if plan is None and self.epoch == 0:
                first.number = len(cut.starts)
                least = rounds_of_every_epoch(first.number, mixing, segment.ranks)
            plan = plan_epoch(lengths, cut, budget, ranks=segment.ranks, rng=rng, least_rounds=least)
        assert plan is not None, "an epoch has begun"
        return plan

    def state_dict(self) -> dict[str, Any]:
        """Return the progress as plain data."""
        return {"epoch": self.epoch, "segments": [[segment.ranks, segment.rounds] for segment in self.segments]}

    def load_state_dict(self, state: dict[str, Any], *, num_samples: int) -> None:
        """Resume from a `state_dict()` of as many samples; one that asks for absurd work is refused."""
        epoch = whole_number(state["epoch"], "epoch", least=0)
        given = state["segments"]
        if not isinstance(given, list | tuple) or not all(
            isinstance(pair, list | tuple) and len(pair) == 2 for pair in given[: _MOST_SEGMENTS + 1]
        ):
            raise InvalidInputError(
                f"the segments of a state are pairs of ranks and rounds; received {shortened(given)}."
            )
        if len(given) > _MOST_SEGMENTS:
            raise InvalidInputError(
                f"a state has at most {_MOST_SEGMENTS:,} segments, one per change of ranks; received {len(given):,}."
            )
        segments = [
            Segment(check_num_ranks(ranks, "ranks"), whole_number(rounds, "rounds", least=0)) for ranks, rounds in given
        ]
        # Each round but the last of a segment takes a sample of its own for every rank.
        least = sum(max(segment.rounds - 1, 0) * segment.ranks + (segment.rounds > 0) for segment in segments)
        if least > num_samples:
            raise InvalidInputError(
                f"this state counts rounds over {least:,} samples or more; there are {num_samples:,}."
            )
        if any(segment.rounds == 0 for segment in segments[:-1]):
            raise InvalidInputError("a segment of a state that is followed by another has at least one round.")
        self.epoch, self.segments = epoch, segments


def check_rounds(rounds: int, plan: EpochPlan) -> None:
    """Refuse more rounds than a plan has."""
    if rounds > plan.rounds.number:
        raise InvalidInputError(
            f"this state counts {rounds:,} rounds on {plan.rounds.starts.shape[1]:,} ranks; the samples that were left "
            f"make {plan.rounds.number:,}."
        )


class Received:
    """Whether somebody who sees the loop counts the batches that it receives of a pass."""

    def __init__(self) -> None:
        self.will_be_counted = False
        """Whether somebody counts the next pass."""
        self.is_drawn = False
        """Whether all batches of this pass were drawn, by a loader that may be ahead of the loop."""
        self.are_two_passes_open = False
        """Whether an older pass went on after a newer one had begun, so that nobody knows where the loop stands."""
        self.is_uncounted = False
        """Whether a pass has begun that nobody counts."""

    def begin(self) -> None:
        """Begin a pass."""
        self.is_drawn = False
        self.is_uncounted, self.will_be_counted = not self.will_be_counted, False

    def check(self) -> None:
        """Refuse to report what nobody counts."""
        if self.are_two_passes_open:
            raise InvalidInputError(
                "two passes over the sampler are open at once, and it cannot know which is the training's.",
                remedy="a sampler of its own for each",
            )
        if self.is_uncounted:
            raise InvalidInputError(
                "nobody counts the batches that the loop received; a DataLoader's workers draw batches ahead of it.",
                remedy="for batch in sampler.track(loader): ..., or accumulator.micro_batches(loader), which counts",
            )


class Tracked:
    """A loader whose batches are counted as the loop receives them; an Accumulator over it counts instead."""

    def __init__(self, batch_sampler: Any, loader: Iterable[Any]) -> None:
        refuse_second_sharding(loader)
        self.batch_sampler = batch_sampler
        self.loader = loader

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        self.batch_sampler.expect_counts()
        for batch in self.loader:
            self.batch_sampler.count_received(1)
            yield batch


def refuse_second_sharding(loader: object) -> None:
    """Refuse a loader that accelerate has sharded: its batches are one rank's already, and most would be lost."""
    wrapper = getattr(loader, "batch_sampler", None)
    if hasattr(wrapper, "batch_sampler") and getattr(wrapper, "num_processes", 1) > 1:
        raise InvalidInputError(
            "accelerate shards this sampler's batches once more, though they are one rank's already.",
            remedy="bw.integrations.accelerate.prepare_loader(accelerator, loader) in place of "
            "accelerator.prepare(loader)",
        )


class StepWindows:
    """The sizes of an epoch's windows, read anew whenever somebody iterates."""

    def __init__(self, sizes: Callable[[], list[int]]) -> None:
        self._sizes = sizes

    def __iter__(self) -> Iterator[int]:
        return iter(self._sizes())

    def __len__(self) -> int:
        return len(self._sizes())


def window_sizes(tokens: npt.NDArray[np.int64], limit: float, *, done: int = 0) -> list[int]:
    """Cut rounds into as few steps of at most `limit` tokens as there can be, as even as they go.

    The first `done` rounds are left out. A round that is over the limit by itself is a step of its own.

    >>> window_sizes(np.array([10, 12, 9, 11, 10, 8]), 32)
    [3, 3]
    >>> window_sizes(np.array([10, 12, 9, 11, 10, 8]), 32, done=4)
    [2]
    """
    # As the limit is a float, so are these: mixed, every search would convert all of them.
    reached = np.cumsum(tokens).astype(np.float64)
    number = len(_ends(reached, limit))
    # The least bound that takes no more steps makes the largest of them as small as can be.
    low, high = float(reached[-1]) / max(number, 1) if number else 0.0, float(limit)
    while high - low > 1e-3 * limit:
        middle = (low + high) / 2
        low, high = (low, middle) if len(_ends(reached, middle)) == number else (middle, high)
    ends = np.array(_ends(reached, high), np.int64)
    starts = np.concatenate(([0], ends[:-1]))
    left = ends > done
    sizes: list[int] = (ends[left] - np.maximum(starts[left], done)).tolist()
    return sizes


def _ends(reached: npt.NDArray[np.float64], limit: float) -> list[int]:
    """Fill step after step up to the limit, and return where each ends."""
    ends: list[int] = []
    at, before = 0, 0.0
    while at < len(reached):
        at = max(int(np.searchsorted(reached, before + limit, side="right")), at + 1)
        before = float(reached[at - 1])
        ends.append(at)
    return ends


class TokenBatchSampler:
    """Batches of samples of like length, each within a budget of padded tokens.

    >>> sampler = TokenBatchSampler([5, 1, 4, 2, 3], max_tokens=9, rank=0, world_size=1)
    >>> sorted(map(sorted, sampler))
    [[0], [1, 3], [2, 4]]
    >>> round(sampler.stats().waste, 3)
    0.118

    - `lengths`: a list, an array, a tensor, a column, or a function of a sample, called once for each of `dataset`; two
      per sample where there are two (source and target).
    - `max_tokens`: the budget of a batch, padding included; in what `cost` counts, if that is given.
    - `cost`: a `bw.BatchCost`, what a batch costs by its lengths. None: tokens.
    - `seed`: of the order; every epoch has another one.
    - `rank`, `world_size`: None reads them from the process group or the launcher.
    - `max_samples`, `multiple_of`: most samples of a batch, and what their number is a multiple of.
    - `waste`: how much padding is allowed for the sake of shuffling, by default 1.5 %, and more where few samples would
      otherwise be in the same batches every epoch.
    - `oversize`: what becomes of a sample over the budget on its own: "error", "drop" or "single".
    - `max_tokens_per_step`: groups batches into optimizer steps: `Accumulator(..., accumulation=sampler.windows)`.
    - `remember`: a file (.npy) for lengths that a function read; `progress` receives how far it is, else stderr does.
    """

    def __init__(
        self,
        lengths: Any,
        max_tokens: float = 16_384,
        *,
        cost: BatchCost | None = None,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        max_samples: int | None = None,
        multiple_of: int = 1,
        waste: float | None = None,
        oversize: str = "error",
        max_tokens_per_step: float | None = None,
        dataset: Any = None,
        remember: str | Path | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self.lengths = gather_lengths(lengths, dataset, progress, remember)
        self.budget = Budget(max_tokens, BatchCost() if cost is None else cost, max_samples, multiple_of)
        self.rank, self.world_size = read_rank(rank, world_size)
        self.seed = whole_number(seed, "seed", least=0)
        self._usable = select_usable(self.lengths, self.budget, oversize)
        some = self.lengths if self._usable.samples is None else self.lengths[self._usable.samples]
        self._mixing = choose_mixing(some, self.budget, waste=waste, seed=self.seed)
        self._per_step = None if max_tokens_per_step is None else self._checked_step(max_tokens_per_step)
        self._progress = EpochProgress()
        self._progress.begin(0, self.world_size)
        self._plan: EpochPlan | None = None
        self._received = Received()
        self._first = self._num_passes = 0
        self._first_epoch = FirstEpoch(self._count_first)
        self.is_resumed = False
        """Whether the next pass resumes from a loaded state."""
        self._print: str | None = None
        self.certified: str | None = None
        """What ran to prove the budget; None where nothing did."""
        self.windows = StepWindows(self._window_sizes)
        """How many batches of a rank make each optimizer step of the epoch to come, or at hand."""

    @classmethod
    def from_fit(cls, fit: Fit, lengths: Any, workload: Any, **options: Any) -> TokenBatchSampler:
        """Take the budget from a `fit` over three lengths or more, and run the costliest batch to prove it.

        `workload` is what was fitted: a Workload, or its target. `options` are those of the sampler itself.
        """
        from batchwright.sampler.from_fit import build_certified_sampler

        return build_certified_sampler(cls, fit, lengths, workload, **options)

    def __repr__(self) -> str:
        return (
            f"TokenBatchSampler({counted(len(self.lengths), 'sample')}, batches of at most {self.budget.limit:g}, "
            f"rank {self.rank} of {self.world_size}, epoch {self.epoch})"
        )

    @property
    def epoch(self) -> int:
        """The epoch that is planned."""
        return self._progress.epoch

    def set_epoch(self, epoch: int) -> None:
        """Turn to an epoch; to the present one changes nothing until it is over, so that a resumed one goes on."""
        epoch = whole_number(epoch, "epoch", least=0)
        if epoch != self._progress.epoch or self._is_over:
            self._begin(epoch)

    def __len__(self) -> int:
        """Batches of this rank in an epoch; of one that was resumed, those that are left."""
        if self._is_over and len(self._progress.segments) > 1:
            return self._plan_of(self.epoch + 1).rounds.number
        if self._is_over:
            return self.planned.rounds.number  # every epoch has as many
        return self.planned.rounds.number - self._first

    def __iter__(self) -> Iterator[list[int]]:
        self._roll_over()
        plan = self.planned
        # A pass that was broken off is begun anew, and so is the count.
        self._progress.segments[-1].rounds = self._first
        received = self._received
        received.begin()
        self._num_passes += 1
        this = self._num_passes
        for index in range(self._first, plan.rounds.number):
            if this == self._num_passes:
                received.is_drawn = index + 1 == plan.rounds.number
            else:
                received.are_two_passes_open = True
            yield plan.batch(index, self.rank)

    def track(self, loader: Iterable[Any]) -> Tracked:
        """Return the batches of a DataLoader over this sampler, those counted that are received."""
        return Tracked(self, loader)

    def counts(self, index: int) -> bool:
        """Whether the `index`-th batch of this iteration counts; one that only keeps step repeats a sample."""
        return not self.planned.rounds.is_repeat(self._first + index, self.rank)

    def stats(self) -> SamplerStats:
        """Return what this epoch is like, all ranks together; of one that changed its ranks, what was left of it."""
        return summarize_epoch(self.planned, self._plan_of(self.epoch + 1), self._usable, self._mixing.num_windows)

    def state_dict(self) -> dict[str, Any]:
        """Return where the loop stands: the batches it received, as `track(loader)` or an Accumulator counts them."""
        self._received.check()
        return {"seed": self.seed, "fingerprint": self._fingerprint(), **self._progress.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict()`, also on another number of ranks."""
        if not isinstance(state, Mapping):
            raise InvalidInputError(f"this is no state of a TokenBatchSampler: {shortened(state)}.")
        missing = sorted({"seed", "fingerprint", "epoch", "segments"} - set(state))
        if missing:
            raise InvalidInputError(f"this is no state of a TokenBatchSampler: it has no {', '.join(missing)}.")
        if state["fingerprint"] != self._fingerprint():
            raise InvalidInputError(
                f"this state is of other samples or another budget than these {counted(len(self.lengths), 'sample')}.",
                remedy="the same lengths in the same order, the same budget, multiple_of, waste and oversize",
            )
        if state["seed"] != self.seed:
            raise InvalidInputError(
                f"this state is of seed {shortened(state['seed'])}; the sampler has seed {self.seed}.",
                remedy=f"TokenBatchSampler(..., seed={shortened(state['seed'])})",
            )
        progress = EpochProgress()
        progress.load_state_dict(state, num_samples=len(self.lengths) - self._usable.num_dropped)
        progress.resume_on(self.world_size)
        plan = self._planned(progress)
        check_rounds(progress.rounds, plan)
        self._num_passes += 1
        self._progress = progress
        self._first, self._plan = progress.rounds, plan
        self._received = Received()
        self.is_resumed = True

    def expect_counts(self, loader: Any = None) -> None:
        """Leave it to somebody who sees the loop, and its loader, to count what it receives of the next iteration."""
        refuse_second_sharding(loader)
        self._received.will_be_counted = True

    def count_received(self, number: int) -> None:
        """Count batches as received; an Accumulator does it at the end of each window."""
        self._progress.segments[-1].rounds += number

    def _begin(self, epoch: int) -> None:
        self._progress.begin(epoch, self.world_size)
        self._first, self._plan = 0, None
        will_be_counted = self._received.will_be_counted
        self._received = Received()
        self._received.will_be_counted = will_be_counted
        self._num_passes += 1

    @property
    def _is_over(self) -> bool:
        """Whether all of the epoch was received; if nobody counts, whether all was drawn."""
        is_drawn = self._received.is_drawn and self._received.is_uncounted
        has_any = len(self.lengths) > self._usable.num_dropped
        return has_any and (is_drawn or self._progress.rounds >= self.planned.rounds.number)

    def _roll_over(self) -> None:
        """Turn to the next epoch where this one is over; without set_epoch every epoch would be alike."""
        if self._is_over:
            self._begin(self.epoch + 1)

    def _plan_of(self, epoch: int) -> EpochPlan:
        other = EpochProgress()
        other.begin(epoch, self.world_size)
        return self._planned(other)

    def _planned(self, progress: EpochProgress) -> EpochPlan:
        some = (self.lengths, self._usable.samples, self.budget, self._mixing)
        return progress.plan(*some, self.seed, self._first_epoch)

    def _count_first(self) -> int:
        rng, left = np.random.default_rng((self.seed, 0, 0)), self._usable.samples
        return len(cut_epoch(self.lengths, self.budget, self._mixing, rng=rng, left=left).starts)

    @property
    def planned(self) -> EpochPlan:
        """The plan of the epoch."""
        if self._plan is None:
            self._plan = self._planned(self._progress)
        return self._plan

    def _window_sizes(self) -> list[int]:
        if self._per_step is None:
            raise InvalidInputError(
                "the sampler has no budget for an optimizer step.",
                remedy="TokenBatchSampler(..., max_tokens_per_step=...)",
            )
        self._roll_over()
        plan = self.planned
        return window_sizes(plan.tokens.sum(axis=1), self._per_step, done=self._first)

    def _checked_step(self, tokens: Any) -> float:
        is_number = isinstance(tokens, Real) and not isinstance(tokens, bool)
        # Where a batch is bounded by another cost, a step of one round may be above; it then stands alone.
        least = float(self.budget.limit) * self.world_size if self.budget.cost == BatchCost() else 0.0
        if not is_number or not float(tokens) > 0 or float(tokens) < least:
            raise InvalidInputError(
                f"max_tokens_per_step must be at least one batch on each rank ({least:g}); "
                f"received {shortened(tokens)}."
            )
        return float(tokens)

    def _fingerprint(self) -> str:
        if self._print is None:
            numbers = {name: value and float(value) for name, value in self.budget.to_dict().items()}
            settings = f"{numbers} {self._mixing} {self._usable.num_dropped}"
            self._print = f"{len(self.lengths)}-{zlib.crc32(settings.encode(), zlib.crc32(self.lengths.tobytes())):08x}"
        return self._print
