"""`Audit`: does the accumulated gradient equal that of the big batch, and if not, why.

Promises:
- `exact` is a statement about numbers that were measured: a relative error of at most 1e-5 in fp32, 1e-10 in fp64;
- every split that was tried is listed, with its ratio and its error.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from batchwright.printed_result import PrintedResult

if TYPE_CHECKING:
    from rich.console import RenderableType

TOLERANCES = {"fp32": 1e-5, "fp64": 1e-10}


@dataclass(frozen=True)
class ModuleError:
    """How far the gradient of one module is off."""

    name: str
    ratio: float | None
    relative_error: float | None


@dataclass(frozen=True)
class SplitAudit:
    """One split of the very same samples, compared with one batch of them."""

    sizes: tuple[int, ...]
    ratio: float | None
    """Norm of the accumulated gradient over that of the big batch; None where the latter is 0."""
    relative_error: float | None
    exact: bool
    cause: str | None = None
    note: str = ""

    @property
    def name(self) -> str:
        """The split as people write it.

        >>> SplitAudit((2, 2, 2), 1.0, 0.0, True).name, SplitAudit((3, 3, 2), 1.0, 0.0, True).name
        ('2x3', '3+3+2')
        """
        if len(set(self.sizes)) == 1:
            return f"{self.sizes[0]}x{len(self.sizes)}"
        return "+".join(map(str, self.sizes))


@dataclass(frozen=True, repr=False)
class Audit(PrintedResult):
    """The verdict on one training step: all splits, the worst of them in figures, and the likely cause."""

    in_repr = ("name", "exact", "ratio", "relative_error", "cause")

    name: str
    what: str
    """What was judged: the user's own window, plain accumulation, a trainer."""
    dtype: str
    splits: tuple[SplitAudit, ...]
    worst: SplitAudit
    """The split that ratio, error, modules and cause speak of."""
    modules: tuple[ModuleError, ...]
    cause: str | None = None
    remedy: str | None = None
    explanation: str = ""
    notes: tuple[str, ...] = ()
    is_synchronised: bool = True
    """False where the loop was seen to leave ranks with gradients of their own."""
    source: str = "measured"

    @property
    def exact(self) -> bool:
        """Whether every split gave the gradient of the big batch, on all ranks."""
        return self.is_synchronised and all(split.exact for split in self.splits)

    @property
    def ratio(self) -> float | None:
        """The norm ratio of the worst split."""
        return self.worst.ratio

    @property
    def relative_error(self) -> float | None:
        """The relative error of the worst split."""
        return self.worst.relative_error

    @property
    def worst_module(self) -> str | None:
        """The module whose gradient is off most, in the worst split."""
        worst = max(self.modules, key=lambda module: module.relative_error or 0.0, default=None)
        return worst.name if worst is not None else None

    def to_dict(self) -> dict[str, Any]:
        """Return the audit as plain data, the same as `batchwright audit --json` prints."""
        return {
            "schema": 1,
            "source": self.source,
            "name": self.name,
            "what": self.what,
            "dtype": self.dtype,
            "exact": self.exact,
            "ratio": self.ratio,
            "relative_error": self.relative_error,
            "worst_module": self.worst_module,
            "cause": self.cause,
            "remedy": self.remedy,
            "explanation": self.explanation,
            "splits": [{"split": split.name, **asdict(split), "sizes": list(split.sizes)} for split in self.splits],
            "modules": [asdict(module) for module in self.modules],
            "notes": list(self.notes),
        }

    def __rich__(self) -> RenderableType:
        from batchwright.report.audit_text import draw_audit

        return draw_audit(self)

    def _repr_html_(self) -> str:
        from batchwright.report.audit_text import audit_columns, audit_remarks, summarize_audit
        from batchwright.report.html import table_to_html

        return table_to_html(summarize_audit(self), audit_columns(self), audit_remarks(self))
