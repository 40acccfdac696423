"""`BestBatch`: the batch that reaches the loss soonest, the range that is as good, and what both rest on."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from batchwright.noise.efficiency import checked_batch, time_to_loss
from batchwright.printed_result import PrintedResult

if TYPE_CHECKING:
    from rich.console import RenderableType

    from batchwright.noise.critical_batch import CriticalBatch


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a whole optimizer step, `fixed + per_sample * batch`, and what that rests on."""

    fixed: float
    per_sample: float
    points: tuple[tuple[int, float], ...] = ()
    """The whole steps that were timed: batch and seconds."""
    largest_error: float | None = None
    timed: tuple[int, int | None] | None = None
    """From which batch to which one it was timed, None for any; None alone where nothing was."""

    def at(self, batch: float) -> float:
        """Seconds of one step."""
        return self.fixed + self.per_sample * batch

    def covers(self, batch: float) -> bool:
        """Whether a batch lies within those that were timed."""
        first, last = self.timed or (math.inf, None)
        return first <= batch and (last is None or batch <= last)


@dataclass(frozen=True, repr=False)
class BestBatch(PrintedResult):
    """The effective batch that reaches the loss soonest, the range that is as good, and why."""

    in_repr = ("value", "low", "high", "range_within_5_percent")

    value: int
    low: int
    """The best batch if the critical batch is at its lower end."""
    high: int | None
    """The same at its upper end; None where that is not resolved."""
    range_within_5_percent: tuple[int, int]
    critical: CriticalBatch
    noise_scale: float
    """The critical batch that `value` rests on: the estimate, or its lower end where that is infinite."""
    step_seconds: StepSeconds
    words: tuple[str, ...]
    in_micro_batches: int | None = None
    """The best multiple of micro-batch x devices."""
    run_seconds: float | None = None
    """Until the loss is reached, at `value`; None without `min_steps`."""
    run_cost: float | None = None
    deadline_batch: int | None = None
    """The smallest batch that meets the deadline; None without one, or where none does."""
    elastic_devices: int | None = None
    """How many devices to hire, where their number is free, each with one micro-batch."""

    def time_ratio(self, batch: float) -> float:
        """Time to the loss at another batch, relative to that at the best.

        >>> from batchwright.noise.best_batch import best_batch
        >>> round(best_batch(400, {16: 0.12, 64: 0.24, 256: 0.72}).time_ratio(16), 2)
        1.9
        """
        line = self.step_seconds.fixed, self.step_seconds.per_sample
        size = checked_batch(batch, "batch")
        return time_to_loss(size, self.noise_scale, *line) / time_to_loss(self.value, self.noise_scale, *line)

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as plain data; what is not resolved, or was not asked, is None."""
        is_measured = self.step_seconds.timed is not None and self.critical.observations > 0
        return {
            "schema": 1,
            "source": "measured" if is_measured else "formula",
            **asdict(self),
            "critical": self.critical.to_dict(),
            "range_within_5_percent": list(self.range_within_5_percent),
            "words": list(self.words),
        }

    def __rich__(self) -> RenderableType:
        from batchwright.report.best_batch_text import draw_best_batch

        return draw_best_batch(self)

    def _repr_html_(self) -> str:
        from batchwright.report.best_batch_text import best_batch_columns, best_batch_remarks, summarize_best_batch
        from batchwright.report.html import table_to_html

        return table_to_html(summarize_best_batch(self), best_batch_columns(self), best_batch_remarks(self))
