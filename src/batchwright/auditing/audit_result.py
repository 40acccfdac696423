"""`Audit`: does the accumulated gradient equal that of the big batch, and if not, why.

Promises:
- `exact` is a statement about numbers that were measured: a relative error of at most 1e-5 in fp32, 1e-10 in fp64;
- every split that was tried is listed, with its ratio and its error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from batchwright.printed_result import PrintedResult
from batchwright.units import finite

TOLERANCES = {"fp32": 1e-5, "fp64": 1e-10}
BIG_BATCH = "the big batch"
MEAN_OF_PARTS = "its micro-batches, averaged by units with random numbers replayed"


@dataclass(frozen=True)
class Cause:
    """A defect by name, what it does, and what to do about it."""

    name: str
    explanation: str
    remedy: str

    @property
    def text(self) -> str:
        """All of it in one line."""
        return f"{self.name}: {self.explanation}; {self.remedy}"


@dataclass(frozen=True)
class Compared:
    """What an accumulated gradient is compared with."""

    name: str = BIG_BATCH
    error: float | None = None
    """Beside the big batch; None if it is the big batch, or if that could not be measured."""
    is_right: bool = True
    note: str = ""


@dataclass(frozen=True)
class ModuleError:
    """How far the gradient of one module is off."""

    name: str
    ratio: float | None
    relative_error: float | None


def split_name(sizes: Sequence[int]) -> str:
    """Return a split as people write it.

    >>> split_name((2, 2, 2)), split_name((3, 3, 2))
    ('2x3', '3+3+2')
    """
    return f"{sizes[0]}x{len(sizes)}" if len(set(sizes)) == 1 else "+".join(map(str, sizes))


@dataclass(frozen=True)
class SplitAudit:
    """One split of the very same samples, compared with one batch of them."""

    sizes: tuple[int, ...]
    ratio: float | None
    """Norm of the accumulated gradient over that of the big batch; None if the latter is 0."""
    relative_error: float | None
    exact: bool
    cause: str | None = None
    note: str = ""

    @property
    def name(self) -> str:
        """The split as people write it."""
        return split_name(self.sizes)


@dataclass(frozen=True, repr=False)
class Audit(PrintedResult):
    """The verdict on one training step: all splits, the worst of them in figures, and the likely cause."""

    in_repr = ("name", "exact", "ratio", "relative_error", "cause")
    drawn_by = "training_text.draw_audit"

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
    """False if the loop was seen to leave ranks with gradients of their own."""
    defects: tuple[Cause, ...] = ()
    """What is wrong with the loop whatever its gradient: clipped too early, stepped twice, never zeroed in part."""
    condition: Cause | None = None
    """What must be true outside of the loop for it to be right; None if nothing must."""
    second_window: tuple[float | None, float | None] | None = None
    """Ratio and relative error of a second window on the same samples, beside the first; None if none ran."""
    is_random: bool = False
    """Whether the loss is random even without dropout: then no cause is named."""
    is_stateful: bool = False
    """Whether the loss differs from call to call with the same random numbers: then none is named either."""
    compared_with: str = BIG_BATCH
    """What the accumulated gradient was compared with."""
    reference_error: float | None = None
    """Of what was compared with, beside the big batch, dropout off; None if they are the same thing, or unknown."""
    is_reference_right: bool = True
    is_comparable: bool = True
    """False if the program did not train on the same samples twice, so that no gradients were compared."""
    source: str = "measured"

    @property
    def exact(self) -> bool:
        """Whether every split gave the gradient it was compared with, on all ranks, in a loop without a defect."""
        return self.is_synchronised and self.has_exact_gradient and self.is_reference_right and not self.defects

    @property
    def has_exact_gradient(self) -> bool:
        """Whether every split gave the gradient it was compared with, whatever else the loop does."""
        return all(split.exact for split in self.splits)

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
            "gradient_exact": self.has_exact_gradient,
            "comparable": self.is_comparable,
            "compared_with": self.compared_with,
            "reference_error": finite(self.reference_error),
            "random": self.is_random,
            "ratio": finite(self.ratio),
            "relative_error": finite(self.relative_error),
            "worst_module": self.worst_module,
            "cause": self.cause,
            "remedy": self.remedy,
            "explanation": self.explanation,
            "defects": [asdict(defect) for defect in self.defects],
            "condition": asdict(self.condition) if self.condition else None,
            "second_window": None
            if self.second_window is None
            else {"ratio": finite(self.second_window[0]), "relative_error": finite(self.second_window[1])},
            "splits": [
                {
                    "split": split.name,
                    **asdict(split),
                    "ratio": finite(split.ratio),
                    "relative_error": finite(split.relative_error),
                    "sizes": list(split.sizes),
                }
                for split in self.splits
            ],
            "modules": [
                {"name": m.name, "ratio": finite(m.ratio), "relative_error": finite(m.relative_error)}
                for m in self.modules
            ],
            "notes": list(self.notes),
        }
