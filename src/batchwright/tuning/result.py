"""`Tuned`: a whole run, and the recommendation it ends in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from batchwright.printed_result import PrintedResult

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import RenderableType


@dataclass(frozen=True, repr=False)
class Tuned(PrintedResult):
    """Everything that was measured, by section, and what follows from it."""

    in_repr = ("finished", "micro_batch", "accumulation", "effective_batch", "file")

    run: dict[str, Any]
    file: Path | None = field(default=None, compare=False)
    """Where the run is written; None where it is not, or could not be."""

    @property
    def finished(self) -> bool:
        """Whether every stage was reached."""
        return bool(self.run["finished"])

    def __getattr__(self, name: str) -> Any:
        # What the recommendation says: micro_batch, accumulation, effective_batch, devices, learning_rate, ...
        advised = self.__dict__["run"]["recommendation"] if "run" in self.__dict__ else {}
        if name.startswith("_") or name not in advised:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return advised[name]

    def to_dict(self) -> dict[str, Any]:
        """Return the run as plain data, the same as `batchwright tune --json` prints and as its file holds."""
        return self.run

    def __rich__(self) -> RenderableType:
        from batchwright.report.tune_text import draw_tuned

        return draw_tuned(self)

    def _repr_html_(self) -> str:
        from batchwright.report.html import table_to_html
        from batchwright.report.tune_text import summarize_tuned, tuned_columns, tuned_remarks

        return table_to_html(summarize_tuned(self), tuned_columns(self), tuned_remarks(self))
