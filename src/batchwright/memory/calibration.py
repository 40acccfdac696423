"""One real run on a GPU, written down, so that predictions for that card can be set right by it.

`record_run` runs full steps on a card and writes what they took. `estimate(..., calibrate=FILE)` traces the same step
at the same size on the simulated card, and takes what the two differ by as fixed: what the context and the libraries of
that machine take, whatever the size. Never run by us on a card: there was none.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from batchwright.device.device import open_device
from batchwright.device.step import StepSettings
from batchwright.errors import InvalidInputError, NothingFitsError, StepFailedError
from batchwright.units import PeakBytes, format_bytes, shortened, whole_number
from batchwright.user_files import check_place, read_text, replace_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from batchwright.catalogue.cards import Context
    from batchwright.workload import Workload


_SCHEMA = 1


@dataclass(frozen=True)
class RecordedRun:
    """What full steps at one size took on a card."""

    name: str
    product: str
    total_bytes: int | None
    micro_batch: int
    peak_bytes: PeakBytes
    shape: dict[str, Any] = field(default_factory=dict)
    accumulation: int = 1
    clip_norm: float | None = None
    torch_version: str = ""
    cuda_version: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the run as plain data, as it is written."""
        return {"schema": _SCHEMA, "source": "measured", **asdict(self)}

    def __str__(self) -> str:
        shape = "".join(f", {name} {value}" for name, value in self.shape.items())
        kinds = ((kind, getattr(self.peak_bytes, kind)) for kind in ("allocated", "reserved", "device"))
        peaks = ", ".join(f"{format_bytes(size)} {kind}" for kind, size in kinds if size is not None)
        return f"{self.name} on {self.product}: micro-batch {self.micro_batch:,}{shape}: peak {peaks}"


def record_run(
    workload: Workload,
    *,
    micro_batch: int,
    on: str = "cuda",
    file: str | Path | None = None,
    shape: Mapping[str, Any] | None = None,
    accumulation: int = 1,
    clip_norm: float | None = None,
) -> RecordedRun:
    """Run full steps on a real card and write down what they took, to calibrate predictions by.

    Best in a process of its own that has the card to itself: what others hold of it would be taken for the context.
    """
    if file is not None:
        check_place(file, what="the recorded run", option="file=")
    device = open_device(on)
    if device.kind != "accelerator":
        raise InvalidInputError(f"a run is recorded on a card of this machine; {on} is none.", remedy='on="cuda"')
    outcome = device.probe(workload, micro_batch, StepSettings(shape or {}, accumulation, clip_norm))
    if outcome.verdict == "out_of_memory":
        raise NothingFitsError(f"micro-batch {micro_batch:,} ran out of memory on {on}, so there is nothing to record.")
    if outcome.verdict == "failed" or outcome.peak_bytes is None:
        raise StepFailedError(f"{outcome.traceback or ''}\nthe step failed on {on}: {outcome.error}")
    run = RecordedRun(
        workload.name,
        torch.cuda.get_device_name(torch.device(on)) if on.startswith("cuda") else on,
        device.total_bytes,
        micro_batch,
        outcome.peak_bytes,
        dict(shape or {}),
        accumulation,
        clip_norm,
        torch.__version__,
        torch.version.cuda or "",
    )
    if file is not None:
        text = json.dumps(run.to_dict(), indent=2) + "\n"
        replace_file(file, text.encode(), what="the recorded run", option="file=")
    return run


def read_run(file: str | Path) -> RecordedRun:
    """Read what `record_run` wrote."""
    try:
        fields = json.loads(read_text(file))
        schema = fields.pop("schema")
        if schema != _SCHEMA:
            raise InvalidInputError(f"'{file}' has schema {shortened(schema)}; this version reads {_SCHEMA}.")
        fields.pop("source", None)
        run = RecordedRun(**{**fields, "peak_bytes": PeakBytes(**fields["peak_bytes"])})
    except InvalidInputError:
        raise
    except OSError as error:
        raise InvalidInputError(f"'{file}' cannot be read: {error.strerror}.") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidInputError(
            f"'{file}' is no recorded run: {error}.", remedy="bw.record_run(workload, micro_batch=..., file=...)"
        ) from None
    whole_number(run.micro_batch, "micro-batch")
    whole_number(run.accumulation, "accumulation")
    if not isinstance(run.shape, dict):
        raise InvalidInputError(f"'{file}' has a shape that is no table of names: {shortened(run.shape)}.")
    _check_peaks(run.peak_bytes, file)
    return run


def _check_peaks(peaks: PeakBytes, file: str | Path) -> None:
    if peaks.allocated is None or peaks.reserved is None:
        raise InvalidInputError(f"'{file}' does not say what was allocated and reserved.")
    known = [peak for peak in (peaks.allocated, peaks.reserved, peaks.device) if peak is not None]
    if not all(type(peak) is int and peak > 0 for peak in known) or known != sorted(known):
        raise InvalidInputError(
            f"'{file}' has peaks that no run has: allocated {shortened(peaks.allocated)}, reserved "
            f"{shortened(peaks.reserved)}, device {shortened(peaks.device)}; each in bytes, none below the one before."
        )


@dataclass(frozen=True)
class Correction:
    """What a real run took beyond its prediction, whatever the size."""

    allocated: int
    reserved: int
    context: int | None

    @staticmethod
    def between(run: RecordedRun, predicted: PeakBytes) -> Correction:
        """Compare a run with its own prediction.

        >>> run = RecordedRun("step", "card", None, 8, PeakBytes(110, 150, 200))
        >>> Correction.between(run, PeakBytes(100, 130, 190))
        Correction(allocated=10, reserved=20, context=50)
        """
        measured = run.peak_bytes
        assert measured.allocated is not None
        assert measured.reserved is not None
        assert predicted.allocated is not None
        assert predicted.reserved is not None
        context = None if measured.device is None else measured.device - measured.reserved
        return Correction(measured.allocated - predicted.allocated, measured.reserved - predicted.reserved, context)

    def applied(self, peaks: PeakBytes, context: Context) -> tuple[PeakBytes, Context]:
        """Set a prediction for another size right."""
        assert peaks.allocated is not None
        assert peaks.reserved is not None
        held = context.typical_bytes if self.context is None else self.context
        allocated = max(peaks.allocated + self.allocated, 0)
        reserved = max(peaks.reserved + self.reserved, allocated)
        # What was measured has no span any more.
        exact = (
            context if self.context is None else replace(context, typical_bytes=held, low_bytes=held, high_bytes=held)
        )
        return PeakBytes(allocated, reserved, reserved + held), exact
