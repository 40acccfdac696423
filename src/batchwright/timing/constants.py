"""The constants of the model of time: which share of a card's rates each kind of operator keeps.

They are fitted by benchmarks/step_time.py on published measurements; a profile of a machine (`profile.py`) has its own.

Promises:
- a constant is looked up from the special to the general: kind, format and layout, then kind and format or layout, then
  kind; an operator's own comes first;
- nothing here imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchwright.trace.work import Work

_HALF = ("fp16", "bf16", "fp8", "int8")
# Kinds that share constants where they have none of their own.
_LIKE = {"pointwise": "convolution", "winograd": "convolution"}


@dataclass(frozen=True)
class Constants:
    """What operators keep of a device's rates, and what each of them costs at least."""

    efficiency: Mapping[str, float]
    passes: Mapping[str, float]
    host_seconds: Mapping[str, float]
    """For each kernel that is asked for in forward, backward and optimizer, and for each view."""
    device_seconds: float
    """For each kernel, on the device."""
    flops_and_bytes: float
    host_and_device: float
    upload_bytes: float
    """Bytes per second from the host."""
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """True over predicted seconds, by how hard a step is to predict."""

    def efficiency_of(self, work: Work) -> float:
        """Return the share of the sustained rate of large products that an operator keeps."""
        return _look_up(self.efficiency, work)

    def passes_of(self, work: Work) -> float:
        """Return how often the bytes of an operator cross the memory."""
        return _look_up(self.passes, work)

    def host_seconds_of(self, phase: str) -> float:
        """Return the host's seconds for one kernel."""
        return self.host_seconds.get(phase, self.host_seconds["forward"])

    def to_dict(self) -> dict[str, Any]:
        """Return the constants as they are written, in microseconds and GB/s."""
        return {
            "efficiency": dict(self.efficiency),
            "passes": dict(self.passes),
            "host_us": {phase: seconds * 1e6 for phase, seconds in self.host_seconds.items()},
            "device_us": self.device_seconds * 1e6,
            "flops_and_bytes": self.flops_and_bytes,
            "host_and_device": self.host_and_device,
            "upload_gb_s": self.upload_bytes / 1e9,
            "intervals": {name: list(ends) for name, ends in self.intervals.items()},
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Constants:
        """Read constants as they are written."""
        return Constants(
            dict(data["efficiency"]),
            dict(data["passes"]),
            {phase: us * 1e-6 for phase, us in data["host_us"].items()},
            data["device_us"] * 1e-6,
            float(data["flops_and_bytes"]),
            float(data["host_and_device"]),
            data["upload_gb_s"] * 1e9,
            {name: (float(low), float(high)) for name, (low, high) in data["intervals"].items()},
        )


def keys_of(work: Work) -> tuple[str, ...]:
    """Return where an operator's constants are looked up, the most special first.

    >>> from batchwright.trace.work import Work
    >>> keys_of(Work("aten.convolution", "pointwise", 1, 1, 1, 1, "fp16", "nhwc"))[1:4]
    ('pointwise.half.nhwc', 'pointwise.half', 'pointwise.nhwc')
    """
    return _keys(work.operator, work.kind, work.number_format, work.layout)


@cache
def _keys(operator: str, kind: str, number_format: str, layout: str) -> tuple[str, ...]:
    short = "half" if number_format in _HALF else number_format
    keys = [operator]
    for name in (kind, _LIKE.get(kind)):
        if name is not None:
            keys += [f"{name}.{short}.{layout}", f"{name}.{short}", f"{name}.{layout}", name]
    return tuple(keys)


def _look_up(table: Mapping[str, float], work: Work) -> float:
    for key in keys_of(work):
        value = table.get(key)
        if value is not None:
            return value
    return 1.0


@cache
def fitted_constants() -> Constants:
    """Return the constants that were fitted on published measurements of cards."""
    text = files("batchwright.timing").joinpath("constants.json").read_text(encoding="utf-8")
    return Constants.from_dict(json.loads(text))
