"""`Check`: what this machine is, which parts work, and predicted against measured memory on each device.

Promises:
- it names no host, user or path of the reader's beyond the cache folder, written from `~`: it can be posted as it is;
- a part works, failed, or cannot be tried here, and then says what is missing;
- what a device does not report, or nobody predicted, is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from batchwright.printed_result import PrintedResult

if TYPE_CHECKING:
    from batchwright.units import PeakBytes

WORKS, FAILED, NOT_HERE = "works", "failed", "not here"


@dataclass(frozen=True)
class CheckedDevice:
    """One device of this machine; `card` is its name in the catalogue, None if it is not there."""

    name: str
    product: str
    total_bytes: int | None
    free_bytes: int | None
    card: str | None


@dataclass(frozen=True)
class CheckedPart:
    """One part of batchwright: what became of it, and the last lines of its error if it failed."""

    name: str
    verdict: str
    seconds: float
    detail: str
    error: str = ""


@dataclass(frozen=True)
class MeasuredProbe:
    """One training step on one device, predicted and then run."""

    device: str
    micro_batch: int
    predicted_on: str | None
    predicted_bytes: PeakBytes | None
    measured_bytes: PeakBytes | None
    seconds: float | None
    detail: str = ""

    @property
    def pairs(self) -> tuple[tuple[str, int | None, int | None], ...]:
        """Each kind of peak that was measured: its name, what was predicted, and what was measured.

        A host has one peak: tensors are predicted, and the private memory of the process, or tensors, measured.
        """
        predicted, measured = self.predicted_bytes, self.measured_bytes
        if measured is None:
            return ()
        if self.device == "cpu":
            total = measured.allocated if measured.device is None else measured.device
            return (("memory", predicted.allocated if predicted else None, total),)
        kinds = [kind for kind in ("allocated", "reserved", "device") if getattr(measured, kind) is not None]
        return tuple((kind, getattr(predicted, kind, None), getattr(measured, kind)) for kind in kinds)

    @property
    def error(self) -> float | None:
        """How far the prediction is off, as a share of what was measured, of the first peak that both have."""
        known = ((predicted, ran) for _, predicted, ran in self.pairs if predicted is not None and ran)
        return next((predicted / ran - 1 for predicted, ran in known), None)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {**asdict(self), "error": self.error}


@dataclass(frozen=True, repr=False)
class Check(PrintedResult):
    """What `batchwright check` found on this machine."""

    in_repr = ("version", "works")
    drawn_by = "check_text.draw_check"

    version: str
    machine: Mapping[str, str]
    versions: Mapping[str, str | None]
    """Of the packages that matter here; None for one that is not installed."""
    devices: tuple[CheckedDevice, ...]
    parts: tuple[CheckedPart, ...]
    workload: str
    probes: tuple[MeasuredProbe, ...]
    cache_folder: str
    seconds: float

    @property
    def works(self) -> bool:
        """Whether nothing that could be tried here failed."""
        return all(part.verdict != FAILED for part in self.parts)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, the same as `batchwright check --json` prints."""
        return {
            "schema": 1,
            "source": "measured",
            "version": self.version,
            "works": self.works,
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "devices": [asdict(device) for device in self.devices],
            "parts": [asdict(part) for part in self.parts],
            "workload": self.workload,
            "probes": [probe.to_dict() for probe in self.probes],
            "cache_folder": self.cache_folder,
            "seconds": self.seconds,
        }
