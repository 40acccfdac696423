"""A window that is being filled: what it was planned to hold, and what has gone into it.

Promises:
- each loss is scaled by its share of what was planned; what was used instead is corrected once, at the end;
- a plan that came from reading ahead is exact, so that nothing is left to correct.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batchwright.accumulate.loss_terms import LossTerm, Reduction, Totals
from batchwright.accumulate.step import WeightedMean
from batchwright.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass
class OpenWindow:
    """The window of one rank, between two optimizer steps."""

    planned: Totals
    """Totals over all ranks, as known or assumed when it began."""
    num_left: int
    """Micro-batches of this rank that are still to come."""
    ranks: int = 1
    used: Totals = field(default_factory=Totals)
    losses: dict[Reduction, WeightedMean] = field(default_factory=dict)
    splits: int = 0
    num_with_gradient: int = 0

    def shares(self, terms: list[LossTerm], counts: Totals) -> list[float]:
        """Return what each term of a micro-batch is multiplied by; 0 where it has no share."""
        pairs = [(counts.of(term.over), self.planned.of(term.over)) for term in terms]
        # Gradients are averaged over ranks, and the mean is over the units of all of them.
        return [amount * self.ranks / total if amount and total else 0.0 for amount, total in pairs]

    def add(self, terms: list[LossTerm], counts: Totals) -> None:
        """Count what a micro-batch brought."""
        self.used = self.used + counts
        for term in terms:
            amount = counts.of(term.over)
            if amount:
                self.losses.setdefault(term.over, WeightedMean()).add(term.value.detach(), amount)

    def correction(self, used: Totals, reductions: Iterable[Reduction]) -> float:
        """Return what the gradient must be multiplied by, now that all ranks have told what they used.

        >>> window = OpenWindow(planned=Totals(units=4.0), num_left=0)
        >>> window.correction(Totals(units=3.0), ["units"])
        1.3333333333333333
        """
        factors = {self.planned.of(kind) / used.of(kind) for kind in reductions}
        if max(factors) - min(factors) > 1e-9 * max(factors):
            raise InvalidInputError(
                "the terms of this loss are means over different things, and what was used differs from what was "
                "planned: no single factor makes all of them right. The gradients of the window were dropped.",
                remedy="for micro in accumulator.micro_batches(loader, weight=...), and no skip()",
            )
        return factors.pop()
