"""One window: while it is filled (`OpenWindow`), and what its optimizer step did (`Step`).

Promises:
- each loss is scaled by its share of what was planned; what was used instead is corrected once, at the end;
- a plan that came from reading ahead is exact, so that nothing is left to correct;
- a `Step` reads nothing from a device until somebody wants the number, and then needs no other rank;
- its loss is the mean over the units of the window and of all ranks, not divided by anything else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from batchwright.accumulate.loss_terms import LossTerm, Reduction, Totals
from batchwright.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass
class WeightedMean:
    """The mean of a loss over the micro-batches of a window, taken when somebody asks for the number.

    >>> mean = WeightedMean()
    >>> mean.add(torch.tensor(1.0), 1.0)
    >>> mean.add(torch.tensor(4.0), 2.0)
    >>> float(mean), float(mean.weighted_sum())
    (3.0, 9.0)
    """

    values: list[torch.Tensor] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def add(self, value: torch.Tensor, weight: float) -> None:
        """Note the loss of one micro-batch; arithmetic on it would show in the time of a step."""
        self.values.append(value)
        self.weights.append(weight)

    def weighted_sum(self) -> torch.Tensor:
        """Return the sum on its device."""
        values = _stacked(self.values)
        return (values * values.new_tensor(self.weights)).sum()

    def __float__(self) -> float:
        pairs = zip(_stacked(self.values).tolist(), self.weights, strict=True)
        return float(sum(value * weight for value, weight in pairs) / sum(self.weights))


def _stacked(values: list[torch.Tensor]) -> torch.Tensor:
    stacked = torch.stack([value.reshape(()) for value in values])
    # In 16 bits a weight would be rounded.
    return stacked if stacked.dtype == torch.float64 else stacked.float()


@dataclass(frozen=True)
class Step:
    """One finished window: how much went into it, and what came of it."""

    number: int
    """Windows finished so far, this one included."""
    units: float
    """The weights of the window on all ranks: tokens, or whatever was counted."""
    samples: int | None
    """Samples of the window on all ranks; None if they were not counted."""
    micro_batches: int
    """Micro-batches that were used, on all ranks."""
    skipped: str | None = None
    """Why the optimizer did not step; None if it did."""
    splits: int = 0
    """How often a micro-batch of this rank ran out of memory and was cut in two."""
    losses: tuple[WeightedMean | float, ...] = field(default=(), repr=False)
    norm: torch.Tensor | float | None = field(default=None, repr=False)

    @property
    def loss(self) -> float:
        """The loss of the window, each term by its own mean; not a number where nothing was used."""
        return float(sum(float(loss) for loss in self.losses)) if self.losses else float("nan")

    @property
    def gradient_norm(self) -> float | None:
        """The norm of the gradient before it was clipped; None if it was not measured."""
        return None if self.norm is None else float(self.norm)

    def to_dict(self) -> dict[str, Any]:
        """Return the step as plain data."""
        return {
            "number": self.number,
            "loss": self.loss if self.losses else None,
            "samples": self.samples,
            "units": self.units,
            "micro_batches": self.micro_batches,
            "gradient_norm": self.gradient_norm,
            "skipped": self.skipped,
            "splits": self.splits,
        }

    def __str__(self) -> str:
        parts = [f"step {self.number:,}", f"loss {self.loss:.4f}"]
        if self.samples is not None:
            parts.append(f"{self.samples:,} samples")
        if self.units != self.samples:
            parts.append(f"{self.units:,.0f} units")
        parts.append(f"{self.micro_batches} micro-batches")
        if self.norm is not None:
            parts.append(f"gradient norm {self.gradient_norm:.3g}")
        if self.splits:
            parts.append(f"{self.splits} splits")
        if self.skipped:
            parts.append(f"skipped: {self.skipped}")
        return ", ".join(parts)

    def _repr_html_(self) -> str:
        from batchwright.report.display import text_to_html

        return text_to_html(str(self))


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
        """Return what each term of a micro-batch is multiplied by; 0 if it has no share."""
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
        """Return what the gradient must be multiplied by, now that it is known what all ranks used.

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
