"""A run that is going on: what the callbacks of all frameworks measure of it and whom they tell, and an audit of its
first window (`FirstWindow`, `audit`) that leaves it as if nobody had looked.

Promises:
- training is only looked at: what cannot be measured becomes a note, never an error that ends the run;
- ranks come to the same metrics, and asking for them needs no other rank;
- gradients, buffers and random numbers are afterwards what the run had made of them;
- dropout is off during the window that is audited, and said so, because two runs of one step would differ otherwise.
"""

from __future__ import annotations

import math
import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from batchwright.accumulate.weights import batch_norms
from batchwright.auditing.audit import audit_workload
from batchwright.auditing.audit_result import TOLERANCES, Audit, SplitAudit
from batchwright.auditing.causes import BATCH_NORM, NOT_A_MEAN, NOT_ADDITIVE, RANDOM_LOSS, UNKNOWN, cause_by_weights
from batchwright.auditing.gradients import Gradient, compare_modules, comparison_dtype
from batchwright.auditing.overrides import without_autocast, without_dropout
from batchwright.device.batches import clear_num_samples, join
from batchwright.errors import BatchwrightError, InvalidInputError
from batchwright.integrations.trackers import WASTE, Tracker, batch_metrics, configured_metrics, tracker_for
from batchwright.noise.noise_scale import NoiseScale
from batchwright.report.text.training_text import summarize_audit
from batchwright.scripts.audit_script import audit_script
from batchwright.scripts.script import Script
from batchwright.state.process_state import kept_random_state
from batchwright.units import counted, positive_number, shortened, whole_number
from batchwright.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

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


def audit(subject: Any, **options: Any) -> Audit:
    """Compare the accumulated gradient with that of the big batch.

    `subject` is a workload, a `bw.Script` or a transformers Trainer. For a script the options are `micro_batch`,
    `accumulation`, `shape` and `progress`; for a workload the options are `micro_batch`, `accumulation`,
    `splits`, `dtype` ("fp32" or "fp64"), `dropout` ("off" or "replayed") and `shape`. A Trainer is audited as it is
    configured, and left as it was.

    >>> import torch
    >>> workload = Workload(
    ...     model=lambda: torch.nn.Linear(8, 1),
    ...     batch=lambda n: torch.randn(n, 8),
    ...     loss=lambda model, batch: model(batch).pow(2).mean(),
    ...     optimizer=torch.optim.SGD,
    ... )
    >>> audit(workload, splits="4x2,1x8").exact
    True
    """
    if isinstance(subject, Workload):
        return audit_workload(subject, **options)
    if isinstance(subject, Script):
        return audit_script(subject, **options)
    if isinstance(subject, str):
        from batchwright.targets import load_workload

        return audit_workload(load_workload(subject), **options)
    if all(hasattr(subject, name) for name in ("training_step", "get_train_dataloader", "args", "accelerator")):
        if options:
            raise InvalidInputError(
                f"a trainer is audited as it is configured: {', '.join(options)} cannot be chosen.",
                remedy="set them in its TrainingArguments",
            )
        from batchwright.integrations.transformers.trainer import audit_trainer

        return audit_trainer(subject)
    raise InvalidInputError(
        f"audit takes a Workload, a target, or a transformers Trainer; received {shortened(subject)}.",
        remedy="for accelerate and Lightning: bw.integrations.accelerate.audit_first_window, "
        "bw.integrations.lightning.AuditFirstWindow",
    )


class FirstWindow:
    """The micro-batches of a window as they go by, and the verdict at its end (`audit`); then it sees nothing more."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any], torch.Tensor],
        *,
        accumulation: int,
        name: str,
        what: str,
        merge: Callable[[list[Any]], Any] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.audit: Audit | None = None
        self._say = say or to_stderr
        self._model = model
        self._loss = loss
        self._accumulation = accumulation
        self._name, self._what = name, what
        self._merge = merge or join
        self._batches: list[Any] = []
        self._gradient: Gradient | None = None
        self._undo = ExitStack()
        self._off = self._undo.enter_context(without_dropout(model))
        self._cast = self._undo.enter_context(without_autocast())

    def see(self, batch: Any) -> None:
        """Note a micro-batch before it runs."""
        if self.audit is None:
            self._batches.append(batch)

    def take(self) -> None:
        """Take the gradient, before anything clips it."""
        if self._gradient is None and self.audit is None:
            self._gradient = Gradient.of(self._model)

    def leave(self) -> None:
        """Turn dropout on again."""
        self._undo.close()

    def judge(self) -> None:
        """Compare with one batch of the same samples at the first step, say the verdict, and leave."""
        if self.audit is None:
            self.take()
            self.audit = self._verdict()
            self._batches, self._gradient = [], None
            self._say(summarize_audit(self.audit))

    def _verdict(self) -> Audit:
        assert self._gradient is not None
        try:
            reference = self._of(self._merge(self._batches))
            parts = [self._of(batch) for batch in self._batches]
            # The same batch again, with the numbers that come next: a random loss has no cause to name.
            moved = self._of(self._batches[0], seed=1).error_to(self._of(self._batches[0], seed=0))
        finally:
            self.leave()
        error, dtype = self._gradient.error_to(reference), comparison_dtype(self._model)
        is_exact = error is not None and error <= TOLERANCES[dtype]
        sizes = tuple(clear_num_samples(batch) or 1 for batch in self._batches)
        is_random = moved is None or moved > TOLERANCES[dtype]
        cause = RANDOM_LOSS if is_random and not is_exact else None
        if not is_exact and not is_random:
            cause = cause_by_weights(self._gradient, reference, parts, self._accumulation)
            if cause in (NOT_ADDITIVE, NOT_A_MEAN, UNKNOWN) and batch_norms(self._model):
                cause = BATCH_NORM
        name = (cause.name or None) if cause else None
        split = SplitAudit(sizes, self._gradient.ratio_to(reference), error, is_exact, name)
        return Audit(
            name=self._name,
            what=self._what,
            dtype=dtype,
            splits=(split,),
            worst=split,
            modules=compare_modules(self._gradient, reference),
            cause=name,
            remedy=cause.remedy if cause else None,
            explanation=cause.explanation if cause else "",
            notes=(
                *([f"dropout was off during this window ({counted(len(self._off), 'place')})"] if self._off else []),
                *(
                    [f"autocast to {self._cast[0].removeprefix('torch.')} was off during this window"]
                    if self._cast
                    else []
                ),
            ),
            is_random=is_random,
        )

    def _of(self, batch: Any, *, seed: int | None = None) -> Gradient:
        gradients = [(parameter, parameter.grad) for parameter in self._model.parameters()]
        buffers = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
        try:
            for parameter, _ in gradients:
                parameter.grad = None
            with kept_random_state():
                if seed is not None:
                    torch.manual_seed(seed)
                loss = self._loss(batch)
                loss.backward()
            return replace(Gradient.of(self._model), loss=float(loss.detach()))
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for name, buffer in self._model.named_buffers():
                buffer.copy_(buffers[name])
