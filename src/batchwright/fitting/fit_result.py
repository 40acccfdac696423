"""`Fit`: the largest micro-batch that ran, and the evidence for it.

Promises:
- the micro-batch is one that ran full steps; the next size failed, or it says why that was not tried;
- every probe is listed, in the order they ran;
- with several shapes, each has a `Fit` of its own and the outer one speaks for the smallest.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from batchwright.printed_result import PrintedResult

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchwright.device.outcome import Outcome
    from batchwright.planning.plan import Plan
    from batchwright.units import PeakBytes


# Sizes whose throughput is this near the best measured count as equally fast: it is about the noise of two steps.
NEAR_BEST = 0.95


@dataclass(frozen=True)
class NextSize:
    """What is known of the size above the answer: its outcome, or why it was not tried."""

    micro_batch: int
    outcome: str | None
    why: str


@dataclass(frozen=True)
class MemoryLine:
    """Bytes a step takes near the answer: `fixed_bytes + bytes_per_sample * n`; from a trace, or from two probes."""

    fixed_bytes: int
    bytes_per_sample: int
    source: str


@dataclass(frozen=True)
class Restored:
    """What was restored, and what could not be."""

    covered: tuple[str, ...] = ()
    not_covered: tuple[str, ...] = ()
    untouched: str = ""
    """Why nothing had to be restored; empty if something had to."""


@dataclass(frozen=True, repr=False)
class Fit(PrintedResult):
    """The largest micro-batch that fits on a device, certified by having run."""

    in_repr = ("name", "on", "micro_batch", "limit", "certified")
    drawn_by = "fit_text.draw_fit"

    name: str
    on: str
    micro_batch: int | None
    limit: int
    limit_bytes: int | None
    trials: tuple[Outcome, ...]
    next_size: NextSize | None
    reason: str
    shape: dict[str, Any] = field(default_factory=dict)
    shapes: tuple[Fit, ...] = ()
    evaluation: Fit | None = None
    line: MemoryLine | None = None
    restored: Restored = field(default_factory=Restored)
    ranks: int = 1
    where: str = "in this process"
    plan: Plan | None = None
    notes: tuple[str, ...] = ()
    source: str = "measured"

    @property
    def certified(self) -> bool:
        """Whether full steps ran at the answer, here."""
        return self.micro_batch is not None and self._trial is not None and self.source == "measured"

    @property
    def peak_bytes(self) -> PeakBytes | None:
        """The peak measured at the answer; None if nothing fits, or the device does not measure it."""
        return self._trial.peak_bytes if self._trial is not None else None

    @property
    def peak(self) -> int | None:
        """The bytes that count against the limit: reserved on an accelerator, private memory on a host."""
        return None if self._trial is None else limited_peak(self._trial)

    @property
    def headroom_bytes(self) -> int | None:
        """What is left below the limit at the answer."""
        return None if self.limit_bytes is None or self.peak is None else self.limit_bytes - self.peak

    @property
    def fastest_micro_batch(self) -> int | None:
        """The smallest size tried whose throughput is within 5 % of the best measured: largest is not fastest."""
        speeds = {t.micro_batch: t.samples_per_second for t in self.trials if t.fits and t.samples_per_second}
        best = max(speeds.values(), default=0.0)
        return min((n for n, speed in speeds.items() if speed >= NEAR_BEST * best), default=None)

    @property
    def _trial(self) -> Outcome | None:
        return next((t for t in reversed(self.trials) if t.fits and t.micro_batch == self.micro_batch), None)

    def to_dict(self) -> dict[str, Any]:
        """Return the fit as plain data, the same as `batchwright fit --json` prints."""
        peak = self.peak_bytes
        return {
            "schema": 1,
            "source": self.source,
            "name": self.name,
            "on": self.on,
            "certified": self.certified,
            "micro_batch": self.micro_batch,
            "fastest_micro_batch": self.fastest_micro_batch,
            "peak_bytes": asdict(peak) if peak else {"allocated": None, "reserved": None, "device": None},
            "limit": self.limit,
            "limit_bytes": self.limit_bytes,
            "headroom_bytes": self.headroom_bytes,
            "trials": [trial.to_dict() for trial in self.trials],
            "next_size": asdict(self.next_size) if self.next_size else None,
            "reason": self.reason,
            "line": asdict(self.line) if self.line else None,
            "restored": {"covered": list(self.restored.covered), "not_covered": list(self.restored.not_covered)},
            "shape": dict(self.shape),
            "shapes": [fit.to_dict() for fit in self.shapes],
            "evaluation": self.evaluation.to_dict() if self.evaluation else None,
            "ranks": self.ranks,
            "where": self.where,
            "plan": self.plan.to_dict() if self.plan else None,
            "notes": list(self.notes),
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Fit:
        """Read back what `to_dict` wrote on another rank; a plan is made later, and has no way back."""
        from batchwright.device.outcome import Outcome

        named = {entry.name: data[entry.name] for entry in fields(Fit) if entry.name in data}
        read = {
            "trials": tuple(Outcome.from_dict(trial) for trial in data["trials"]),
            "next_size": NextSize(**data["next_size"]) if data["next_size"] else None,
            "line": MemoryLine(**data["line"]) if data["line"] else None,
            "restored": Restored(tuple(data["restored"]["covered"]), tuple(data["restored"]["not_covered"])),
            "shapes": tuple(map(Fit.from_dict, data["shapes"])),
            "evaluation": Fit.from_dict(data["evaluation"]) if data["evaluation"] else None,
            "notes": tuple(data["notes"]),
            "plan": None,
        }
        return Fit(**{**named, **read})


def name_shape(shape: Mapping[str, Any]) -> str:
    """Write a shape as it is typed.

    >>> name_shape({"max_crops": 12, "seq_len": 512})
    'max_crops=12 seq_len=512'
    """
    return " ".join(f"{name}={value}" for name, value in shape.items())


def limited_peak(trial: Outcome) -> int | None:
    """Return the peak that counts against a limit: what an allocator took, else what the process took."""
    peak = trial.peak_bytes
    if peak is None:
        return None
    return next((amount for amount in (peak.reserved, peak.device, peak.allocated) if amount is not None), None)
