"""What an epoch of batches will be like, before training starts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from batchwright.printed_result import PrintedResult
from batchwright.sampler.mixing import pair_repeat

if TYPE_CHECKING:
    from batchwright.sampler.cost import Usable
    from batchwright.sampler.epoch_plan import EpochPlan


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
