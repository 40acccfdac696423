"""How far an epoch has come, in a few numbers, also where the number of ranks changed on the way.

An epoch is a row of segments: so many rounds on so many ranks. A change of ranks ends one segment; what its rounds have
left over is planned anew for the others. So a state is as short as there were changes, and going on takes one plan for
each, however many rounds are done.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from batchwright.errors import InvalidInputError
from batchwright.sampler.epoch_plan import EpochPlan, Mixing, cut_epoch, plan_epoch, rounds_of_every_epoch
from batchwright.sampler.place import number_of_ranks
from batchwright.units import shortened, whole_number

if TYPE_CHECKING:
    import numpy.typing as npt

    from batchwright.sampler.cost import Budget
    from batchwright.sampler.epoch_plan import FirstEpoch

    Numbers = npt.NDArray[np.int64]


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

    def go_on_with(self, ranks: int) -> None:
        """Go on with another number of ranks."""
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
        found = None
        for number, segment in enumerate(self.segments):
            if found is not None:
                before = self.segments[number - 1].rounds
                _check_rounds(before, found)
                left, least = found.left_after(before), 0
            elif self.epoch > 0:
                least = rounds_of_every_epoch(first.batches(), mixing, segment.ranks)
            rng = np.random.default_rng((seed, self.epoch, number))
            most = least * segment.ranks or None
            cut = cut_epoch(lengths, budget, mixing, rng=rng, left=left, most_batches=most)
            if found is None and self.epoch == 0:
                first.number = len(cut.starts)
                least = rounds_of_every_epoch(first.number, mixing, segment.ranks)
            found = plan_epoch(lengths, cut, budget, ranks=segment.ranks, rng=rng, least_rounds=least)
        assert found is not None, "an epoch has begun"
        return found

    def check_fits(self, found: EpochPlan) -> None:
        """Refuse more rounds than the plan of the present ranks has."""
        _check_rounds(self.rounds, found)

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
            Segment(number_of_ranks(ranks, "ranks"), whole_number(rounds, "rounds", least=0)) for ranks, rounds in given
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


def _check_rounds(rounds: int, plan: EpochPlan) -> None:
    if rounds > plan.rounds.number:
        raise InvalidInputError(
            f"this state counts {rounds:,} rounds on {plan.rounds.starts.shape[1]:,} ranks; the samples that were left "
            f"make {plan.rounds.number:,}."
        )
