"""The batch of a run that is going on: what the callbacks of all frameworks measure, and whom they tell.

Promises:
- training is only looked at: what cannot be measured becomes a note, never an error that ends the run;
- ranks come to the same metrics, and asking for them needs no other rank.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

from batchwright.errors import BatchwrightError, InvalidInputError
from batchwright.integrations.trackers import WASTE, Tracker, batch_metrics, configured_metrics, tracker_for
from batchwright.noise.noise_scale import NoiseScale
from batchwright.report.text.audit_text import summarize_audit
from batchwright.units import positive_number, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchwright.auditing.audit_result import Audit
    from batchwright.planning.critical_batch import CriticalBatch


class LiveBatch:
    """Settings, noise and padding of one run; `every`, `window` and `population` are those of `NoiseScale`."""

    def __init__(
        self,
        *,
        tracker: Any = None,
        every: int = 1,
        window: float | None = None,
        population: int | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.tracker: Tracker | None = None if tracker is None else tracker_for(tracker)
        self._options: dict[str, Any] = {
            "every": whole_number(every, "every"),
            "window": window
            if window is None
            else positive_number(window, "window must be above 0, in samples", least=math.ulp(0.0), most=math.inf),
            "population": population if population is None else whole_number(population, "population"),
        }
        self._say = say or to_stderr
        self.noise: NoiseScale | None = None
        self.audit: Audit | None = None
        self.notes: list[str] = []
        self.micro_batch: int | None = None
        self.accumulation = self.devices = 1
        self._waste: float | None = None
        self._described: dict[int, tuple[int, int, int]] = {}

    @property
    def critical_batch(self) -> CriticalBatch | None:
        """The critical batch of the run so far; None where nothing was measured yet."""
        return None if self.noise is None else self.noise.critical_batch

    def measure(self, model: Any, optimizer: Any, *, micro_batch: int | None, scaler: Any = None) -> None:
        """Begin to measure, or go on with micro-batches of another size; a model that cannot be is noted."""
        before = None if self.noise is None else self.noise.state_dict()
        self.stop()
        self.micro_batch = None if self.is_by_budget else micro_batch
        if self.is_by_budget:
            self.note(
                "batches by budget differ in size, and how a framework weighs them is not known: the critical batch is "
                "not measured (bw.NoiseScale with a bw.Accumulator does)"
            )
            return
        if any(type(module).__name__ == "DeepSpeedEngine" for module in model.modules()):
            self.note("DeepSpeed adds up and steps by itself: the critical batch is not measured")
            return
        if micro_batch is None:
            self.note("how many samples a batch has is not known: the critical batch is not measured")
            return
        try:
            self.noise = NoiseScale(
                model, optimizer=optimizer, micro_batch=micro_batch, scaler=scaler, unit="samples", **self._options
            )
            if before is not None:
                self.noise.load_state_dict(before)
        except BatchwrightError as error:
            self.noise = None
            self.note(f"the critical batch is not measured: {error}")

    def judge(self, audit: Callable[[], Audit]) -> None:
        """Audit the accumulation; where that fails, the run goes on without a verdict."""
        try:
            self.audit = audit()
        except Exception as error:
            self.note(f"the accumulation was not audited: {type(error).__name__}: {error}")
        else:
            self._say_once(summarize_audit(self.audit))

    def look_at_sampler(self, loader: Any) -> None:
        """Take the share of padding from a loader's `TokenBatchSampler`, where it has one; before `measure`."""
        sampler: Any = getattr(loader, "batch_sampler", None)
        self._waste = sampler.stats().waste if hasattr(sampler, "count_received") else None

    @property
    def is_by_budget(self) -> bool:
        """Whether batches differ in size because a `TokenBatchSampler` makes them."""
        return self._waste is not None

    def metrics(self) -> dict[str, float]:
        """Return the `batch/*` metrics as they stand."""
        known = configured_metrics(self.micro_batch, self.accumulation, self.devices)
        metrics = {**known, **batch_metrics(self.critical_batch)}
        return metrics if self._waste is None else {**metrics, WASTE: self._waste}

    def tell(self, metrics: dict[str, float], step: int, *others: Tracker) -> None:
        """Write metrics to the tracker and to others; before the first of them, and when it changed, the product."""
        trackers = [*([self.tracker] if self.tracker is not None else []), *others]
        for tracker in trackers:
            self.describe(tracker)
            tracker.log(metrics, step)

    def describe(self, tracker: Tracker) -> None:
        """Write the effective batch as a product, once for each of its values."""
        if self.micro_batch is not None:
            product = (self.micro_batch, self.accumulation, self.devices)
            if self._described.get(id(tracker.target)) != product:
                self._described[id(tracker.target)] = product
                tracker.log_effective_batch(*product)

    def note(self, text: str) -> None:
        """Keep a note, and say it once."""
        if text not in self.notes:
            self.notes.append(text)
            self._say_once(text)

    def forget(self) -> None:
        """Begin anew: another run, maybe of another model."""
        self.stop()
        self.noise = None

    def stop(self) -> None:
        """Take every hook away; the answer stays."""
        if self.noise is not None:
            self.noise.close()

    def _say_once(self, text: str) -> None:
        """Say something on the first rank only."""
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
            self._say(text)


class ShowsLiveBatch:
    """What the callbacks of all frameworks show of the batch they watch."""

    _live: LiveBatch

    @property
    def noise(self) -> NoiseScale | None:
        """What measures; None before training, and where nothing can be measured, for a reason that is in `notes`."""
        return self._live.noise

    @property
    def critical_batch(self) -> CriticalBatch | None:
        """The critical batch of the run so far, the same on all ranks."""
        return self._live.critical_batch

    @property
    def audit(self) -> Audit | None:
        """The verdict on the accumulation; None where there was none, for a reason that is in `notes`."""
        return self._live.audit

    @property
    def notes(self) -> list[str]:
        """What could not be measured or audited, and why."""
        return self._live.notes

    @property
    def metrics(self) -> dict[str, float]:
        """The `batch/*` metrics as they stand."""
        return self._live.metrics()


def check_flag(value: object, name: str) -> bool:
    """Return a switch as it is, or say that it is none."""
    if not isinstance(value, bool):
        raise InvalidInputError(f"{name} must be True or False; received {value!r}.")
    return value


def to_stderr(text: str) -> None:
    """Say something where it does not mix with what a program prints."""
    print(text, file=sys.stderr)
