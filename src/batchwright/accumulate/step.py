"""`Step`: what one optimizer step did.

Promises:
- nothing is read from a device until somebody asks, and asking needs no other rank;
- the loss is the mean over the units of the window and of all ranks, not divided by anything else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass
class WeightedMean:
    """The mean of a loss over the micro-batches of a window, taken when somebody asks for the number.

    >>> import torch
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
    import torch

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
    """Samples of the window on all ranks; None where nothing told them."""
    micro_batches: int
    """Micro-batches that were used, on all ranks."""
    skipped: str | None = None
    """Why the optimizer did not step; None where it did."""
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
        """The norm of the gradient before it was clipped; None where it was not measured."""
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
        from batchwright.report.html import text_to_html

        return text_to_html(str(self))
