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
from batchwright.units import shortened, whole_number

if TYPE_CHECKING:
    import numpy.typing as npt

    from batchwright.sampler.cost import Budget
    from batchwright.sampler.epoch_plan import FirstEpoch

    Numbers = npt.NDArray[np.int64]


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
                left, least = found.left_after(self.segments[number - 1].rounds), 0
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

    def state_dict(self) -> dict[str, Any]:
        """Return the progress as plain data."""
        return {"epoch": self.epoch, "segments": [[segment.ranks, segment.rounds] for segment in self.segments]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` stood."""
        epoch = whole_number(state["epoch"], "epoch", least=0)
        try:
            segments = [(ranks, rounds) for ranks, rounds in state["segments"]]
        except (TypeError, ValueError):
            raise InvalidInputError(
                f"the segments of a state are pairs of ranks and rounds; received {shortened(state['segments'])}."
            ) from None
        self.segments = [
            Segment(whole_number(ranks, "ranks"), whole_number(rounds, "rounds", least=0)) for ranks, rounds in segments
        ]
        self.epoch = epoch
