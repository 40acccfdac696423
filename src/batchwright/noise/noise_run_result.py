"""`NoiseRun`: a short training run, and what its gradients say of the batch in use."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchwright.printed_result import PrintedResult

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import RenderableType

    from batchwright.noise.best_batch_result import BestBatch
    from batchwright.noise.critical_batch import CriticalBatch
    from batchwright.noise.verdict import Verdict


@dataclass(frozen=True)
class TrendPoint:
    """The critical batch and the loss at a step of the run."""

    step: int
    samples: int
    loss: float
    critical_batch: CriticalBatch

    def to_dict(self) -> dict[str, Any]:
        """Return the point as plain data."""
        loss = self.loss if math.isfinite(self.loss) else None
        return {"step": self.step, "samples": self.samples, "loss": loss, **self.critical_batch.to_dict()}


@dataclass(frozen=True, repr=False)
class NoiseRun(PrintedResult):
    """A short training run, and what its gradients say of the batch in use."""

    in_repr = ("name", "critical_batch", "effective_batch", "steps")

    name: str
    critical_batch: CriticalBatch
    effective_batch: int
    micro_batch: int
    accumulation: int
    ranks: int
    on: str
    steps: int
    history: tuple[TrendPoint, ...]
    verdict: Verdict
    by_group: Mapping[str, CriticalBatch]
    seconds_per_step: float
    """The median."""
    gamma: float | None
    """What a batch that follows the critical batch could buy; 1 for nothing. None where the trend is not resolved."""
    best: BestBatch | None = None
    """The batch that reaches the loss soonest, where step times were handed in."""
    skipped: Mapping[str, int] | None = None
    notes: tuple[str, ...] = ()
    source: str = "measured"

    @property
    def recommendation(self) -> str:
        """What to do, in one line."""
        if self.best is None:
            return self.verdict.recommendation
        first, last = self.best.range_within_5_percent
        return (
            f"an effective batch of {self.best.value:,} reaches the loss soonest; {first:,} to {last:,} are within 5 %"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the run as plain data, the same as `batchwright noise --json` prints."""
        return {
            "schema": 1,
            "source": self.source,
            "name": self.name,
            "critical_batch": self.critical_batch.to_dict(),
            "effective_batch": self.effective_batch,
            "effective_batch_unit": "samples",
            "micro_batch": self.micro_batch,
            "accumulation": self.accumulation,
            "devices": self.ranks,
            "on": self.on,
            "steps": self.steps,
            "observations": self.critical_batch.observations,
            "steps_needed": self.critical_batch.steps_needed,
            "history": [point.to_dict() for point in self.history],
            "by_group": {name: each.to_dict() for name, each in self.by_group.items()},
            "seconds_per_step": self.seconds_per_step,
            "gamma": self.gamma,
            "verdict": self.verdict.to_dict(),
            "recommendation": self.recommendation,
            "best_batch": None if self.best is None else self.best.to_dict(),
            "skipped": dict(self.skipped or {}),
            "notes": list(self.notes),
        }

    def __rich__(self) -> RenderableType:
        from batchwright.report.noise_text import draw_noise

        return draw_noise(self)

    def _repr_html_(self) -> str:
        from batchwright.report.html import table_to_html
        from batchwright.report.noise_text import noise_columns, noise_remarks, summarize_noise

        return table_to_html(summarize_noise(self), noise_columns(self), noise_remarks(self))
