"""How far an epoch has come, in a few numbers, also if the number of ranks changes on the way.

An epoch is a row of segments: so many rounds on so many ranks. A change of ranks ends one segment; what its rounds have
left over is planned anew for the others. So a state is as short as there were changes, and resuming takes one plan for
each, however many rounds are done.

A sampler sees what is drawn from it, and a DataLoader may draw ahead. What the loop received is counted by somebody who
sees the loop: `track(loader)`, or an Accumulator.

Promises:
- a state counts batches that were received, never those that were drawn; if nobody counts, there is none;
- a state that asks for absurd work is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from batchwright.errors import InvalidInputError
from batchwright.sampler.epoch_plan import EpochPlan, FirstEpoch, Mixing, cut_epoch, plan_epoch, rounds_of_every_epoch
from batchwright.units import counted, shortened, whole_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt

    from batchwright.sampler.cost import Budget

    Numbers = npt.NDArray[np.int64]


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
