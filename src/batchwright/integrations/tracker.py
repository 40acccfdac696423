"""`Tracker`: one place that metrics go to, and what happens where it does not take them.

Promises:
- what reaches a target is finite numbers;
- nothing here ends a training: a target that fails, or a value that is no number, is warned of once and left out, and
  counted in `failures`.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from batchwright.integrations.batch_metrics import EFFECTIVE_BATCH_ENTRY, effective_batch_text
from batchwright.units import shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from batchwright.planning.plan import Plan


class TrackerWarning(UserWarning):
    """Something was not written to a tracker; training went on."""


class Tracker(ABC):
    """One place that metrics go to; made by `tracker_for`."""

    name = "the tracker"

    def __init__(self, target: Any) -> None:
        self.target = target
        self.failures = 0
        """Calls that the target did not take, and values that were no numbers."""
        self._warned: set[str] = set()

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Write numbers under their names at a step; what is infinite or NaN is left out."""
        numbers = {key: self._number(key, value) for key, value in metrics.items()}
        finite = {key: number for key, number in numbers.items() if math.isfinite(number)}
        if finite:
            self._try(f"log at step {step}", lambda: self._log(finite, step))

    def write(self, name: str, text: str) -> None:
        """Write a text that describes the run."""
        self._try(f"{name} = {text}", lambda: self._write(name, text))

    def log_effective_batch(self, micro_batch: int | Plan, accumulation: int = 1, devices: int = 1) -> None:
        """Write `Config/effective_batch_size`, as a product; see `effective_batch_text`."""
        self.write(EFFECTIVE_BATCH_ENTRY, effective_batch_text(micro_batch, accumulation, devices))

    @abstractmethod
    def _log(self, metrics: dict[str, float], step: int) -> None:
        """Hand finite numbers to the target."""

    @abstractmethod
    def _write(self, name: str, text: str) -> None:
        """Hand a text to the target, or the nearest that it has."""

    def _number(self, key: str, value: Any) -> float:
        try:
            # True would be drawn as 1, and a text of digits is still a text.
            if isinstance(value, bool | str | bytes):
                raise TypeError
            number = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            self._warn(key, f"{key} must be a number; received {shortened(value)}. It was left out of the log.")
            return math.nan
        return value if isinstance(value, int) else number

    def _try(self, what: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            told = f"{type(error).__name__}: {error}".splitlines()[0]
            self._warn(
                "",
                f"{self.name} did not take {what} ({told}). Training goes on; this is said once, and the calls that "
                f"failed are counted in `failures`.",
            )

    def _warn(self, about: str, text: str) -> None:
        self.failures += 1
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(text, TrackerWarning, stacklevel=4)
