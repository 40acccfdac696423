"""What the trace says a size will take, corrected by what earlier probes took beyond it.

Promises:
- a step that cannot be traced is no error: the search then goes by what probes measure;
- the correction learnt at one shape starts the next one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from batchwright.device.out_of_memory import is_too_small
from batchwright.device.step import StepSettings
from batchwright.errors import BatchwrightError
from batchwright.fitting.fit_result import MemoryLine, limited_peak
from batchwright.fitting.search import CannotPredictError
from batchwright.memory.breakdown import break_down
from batchwright.memory.estimate import without_torchs_own_log
from batchwright.planning.largest import Curve
from batchwright.trace.run import trace_workload
from batchwright.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from batchwright.device.outcome import Outcome
    from batchwright.fitting.request import FitRequest
    from batchwright.memory.breakdown import Breakdown
    from batchwright.workload import Workload


# A thread's stack as Linux reserves it: private memory from the moment the thread starts.
_STACK_BYTES = 8 * 2**20
_KERNELS_KEEP_BYTES = 16 * 2**20


class Forecast:
    """Predicted peaks of one workload, shape after shape."""

    def __init__(
        self,
        workload: Workload | None,
        limit_bytes: int | None,
        request: FitRequest,
        *,
        say: Callable[[str], None],
    ) -> None:
        self._workload = workload
        self._limit_bytes = limit_bytes
        self._request = request
        self._say = say
        self._shape: Mapping[str, Any] = {}
        self._seen: dict[int, Breakdown] = {}
        # The main thread has its stack already; each of torch's others, and autograd's, takes one.
        self.allowance = (torch.get_num_threads() + 1) * _STACK_BYTES + _KERNELS_KEEP_BYTES

    def turn_to(self, shape: Mapping[str, Any]) -> None:
        """Speak of this shape from now on."""
        self._shape, self._seen = shape, {}

    def is_possible(self) -> bool:
        """Whether the step can be traced at all."""
        if self._workload is None:
            return False
        self._say("predicting from traces")
        try:
            self.predict(1)
        except CannotPredictError:
            return False
        return True

    @property
    def is_known(self) -> bool:
        """Whether something of this shape has been predicted."""
        return bool(self._seen)

    def predict(self, micro_batch: int) -> int:
        """Return the bytes at a size; a trace that fails there is a `CannotPredictError`."""
        try:
            return self._break_down(micro_batch).peak_bytes
        except Exception as error:
            # Whatever it is, a probe at that size will say it better: it has real values and the user's own traceback.
            raise CannotPredictError(f"the trace failed at micro-batch {micro_batch:,}") from error

    def guess_largest(self, cap: int) -> int | None:
        """Return the largest size that should fit by prediction alone; None if nothing can be predicted."""
        if self._limit_bytes is None or not self.is_possible():
            return None
        try:
            return Curve(self.predict, cap=cap).roughly_within(self._limit_bytes - self.allowance) or None
        except CannotPredictError:
            return None

    def learn(self, trials: Sequence[Outcome]) -> None:
        """Take over what the largest size that fits took beyond its prediction."""
        measured = [(t.micro_batch, limited_peak(t)) for t in trials if t.fits and limited_peak(t) is not None]
        known = [(n, peak) for n, peak in measured if n in self._seen]
        if known:
            size, peak = max(known)
            assert peak is not None
            # Rounding differs from shape to shape: a little more, so that the first probe still fits.
            self.allowance = max(0, math.ceil(1.02 * (peak - self.predict(size))))

    def draw_line(self, micro_batch: int | None, trials: Sequence[Outcome]) -> MemoryLine | None:
        """Return the line near the answer: its slope from the trace if there is one, else from two probes."""
        peaks = {t.micro_batch: peak for t in trials if t.fits and (peak := limited_peak(t)) is not None}
        if micro_batch is None or micro_batch not in peaks:
            return None
        slope, source = self._slope(micro_batch), "predicted"
        below = [n for n in peaks if n < micro_batch]
        if slope is None and below:
            slope, source = (peaks[micro_batch] - peaks[max(below)]) / (micro_batch - max(below)), "measured"
        if slope is None or slope <= 0:
            return None  # one reading, or two that differ by noise alone
        return MemoryLine(round(peaks[micro_batch] - slope * micro_batch), round(slope), source)

    def _slope(self, micro_batch: int) -> float | None:
        half = micro_batch // 2
        if not self._seen or half == 0:
            return None
        try:
            return (self.predict(micro_batch) - self.predict(half)) / (micro_batch - half)
        except CannotPredictError:
            return None

    def predict_need(self, micro_batch: int) -> float:
        """Return the bytes at a size; infinite if they are not known."""
        try:
            return self.predict(micro_batch) if self.is_known else math.inf
        except CannotPredictError:
            return math.inf

    def describe_need(self, micro_batch: int) -> list[str]:
        """Say what a size needs, by parts; nothing if it cannot be predicted."""
        if self.predict_need(micro_batch) == math.inf:
            return []
        needed = self._break_down(micro_batch)
        parts = ", ".join(f"{part} {format_bytes(n)}" for part, n in sorted(needed.parts.items(), key=lambda p: -p[1]))
        return [f"predicted need {format_bytes(needed.peak_bytes)}: {parts}"]

    def suggest_remedy(self) -> str:
        """Return what would help."""
        if not self._seen:
            return "more memory, a smaller model or shape, or an optimizer that keeps less state"
        return "an estimate with --what-if (what_if=True) prints what each change of the set-up would save"

    def _break_down(self, micro_batch: int) -> Breakdown:
        if micro_batch not in self._seen:
            assert self._workload is not None
            try:
                with without_torchs_own_log():
                    traced = trace_workload(
                        self._workload,
                        micro_batch,
                        StepSettings(self._shape, self._request.accumulation, self._request.clip_norm),
                    )
            except BatchwrightError:
                raise
            except Exception as error:
                if not is_too_small(error):
                    raise
                # One sample is too few for BatchNorm; two need hardly more.
                return self._break_down(micro_batch + 1)
            self._seen[micro_batch] = break_down(traced.log)
        return self._seen[micro_batch]
