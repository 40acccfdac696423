"""`Estimate`: what a step needs in memory, its parts, and the moment of the peak; `EveryCard`: which cards take it.

Promises:
- the parts are those alive at the moment of the peak, so they sum to it;
- a kind of peak or a part that does not exist on a device is None, never 0;
- what was assumed is listed, and `source` says whether a trace or a formula spoke.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from batchwright.printed_result import PrintedResult

if TYPE_CHECKING:
    from batchwright.timing.step_time import NoTime, StepTime
    from batchwright.units import PeakBytes


PARTS = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "temporaries",
    "inputs",
    "workspaces",
    "slack",
    "context",
)


@dataclass(frozen=True)
class PeakMoment:
    """When the peak was reached."""

    phase: str
    module: str
    operator: str


@dataclass(frozen=True)
class Owner:
    """Memory alive at the peak that one place made: `count` tensors of one module and operator."""

    num_bytes: int
    count: int
    part: str
    module: str
    operator: str
    phase: str


@dataclass(frozen=True)
class PhasePeak:
    """The largest memory held during one phase of the run, in the order they came."""

    phase: str
    peak_bytes: int


@dataclass(frozen=True)
class Saving:
    """What the peak becomes under one change of the set-up; None where it could not be traced, with the reason."""

    change: str
    peak_bytes: int | None
    note: str = ""


@dataclass(frozen=True, repr=False)
class Estimate(PrintedResult):
    """The peak of a step and where it comes from."""

    in_repr = ("name", "micro_batch", "on", "peak", "limit_bytes", "max_micro_batch", "fits")
    drawn_by = "memory_text.draw_estimate"

    name: str
    micro_batch: int
    on: str
    peak_bytes: PeakBytes
    upper_bytes: PeakBytes
    parts: dict[str, int | None]
    grows_with_batch: dict[str, int | None]
    peak_at: PeakMoment | None
    largest: tuple[Owner, ...]
    phases: tuple[PhasePeak, ...]
    source: str
    notes: tuple[str, ...] = ()
    limit_bytes: int | None = None
    max_micro_batch: int | None = None
    max_limited_by: str | None = None
    """What ended the search for it: memory, data (it has no more samples) or search (as far as one looks)."""
    savings: tuple[Saving, ...] = ()
    fits: bool | None = None
    """Whether the step runs on the simulated card; None where nothing was asked of one."""
    time: StepTime | NoTime | None = None
    """Seconds of a step on the simulated card, or why there are none; None where nothing was asked of a card."""
    context: str | None = None
    """Which context of the card was taken, and by what; None without a card."""

    @property
    def peak(self) -> int:
        """Bytes allocated at the peak, the kind that every estimate has."""
        assert self.peak_bytes.allocated is not None
        return self.peak_bytes.allocated

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate as plain data, the same as `batchwright estimate --json` prints."""
        data = asdict(self)
        data["what_if"] = data.pop("savings")
        data["time"] = None if self.time is None else self.time.to_dict()
        for key in ("largest", "phases", "what_if", "notes"):
            data[key] = list(data[key])
        return {"schema": 1, **data}


@dataclass(frozen=True)
class CardRow:
    """One card: does the micro-batch asked for run there, and what is the largest that does."""

    card: str
    total_bytes: int
    fits: bool
    device_bytes: int
    """What the micro-batch asked for takes of the card, context and all."""
    max_micro_batch: int | None
    """None where not even 1 runs."""
    time: StepTime | NoTime | None = None
    """Of the micro-batch asked for, whether it fits or not."""

    @property
    def samples_per_second(self) -> float | None:
        """At the micro-batch asked for, predicted; None where there is no time."""
        return getattr(self.time, "samples_per_second", None)

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data."""
        return {**asdict(self), "time": None if self.time is None else self.time.to_dict()}


@dataclass(frozen=True, repr=False)
class EveryCard(PrintedResult):
    """The cards of the catalogue, the smallest that takes the step first."""

    in_repr = ("name", "micro_batch", "fits")
    drawn_by = "memory_text.draw_cards"

    name: str
    micro_batch: int
    rows: tuple[CardRow, ...]
    source: str = "predicted"

    @property
    def fits(self) -> bool:
        """Whether any card takes the micro-batch asked for."""
        return any(row.fits for row in self.rows)

    @property
    def fastest_first(self) -> tuple[CardRow, ...]:
        """The cards that take the step, by samples per second."""
        return tuple(sorted((row for row in self.rows if row.fits), key=lambda row: -(row.samples_per_second or 0.0)))

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as plain data, the same as `batchwright estimate --on all --json` prints."""
        return {"schema": 1, **asdict(self), "rows": [row.to_dict() for row in self.rows]}
