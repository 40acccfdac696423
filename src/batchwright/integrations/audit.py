"""Audit the first window of a run that is going on, and leave it as if nobody had looked.

Promises:
- gradients, buffers and random numbers are afterwards what the run had made of them;
- dropout is off during that window, and said so, because two runs of one step would differ otherwise.
"""

from __future__ import annotations

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
from batchwright.errors import InvalidInputError
from batchwright.integrations.live_batch import to_stderr
from batchwright.report.text.audit_text import summarize_audit
from batchwright.scripts.audit_script import audit_script
from batchwright.scripts.script import Script
from batchwright.state.process_state import kept_random_state
from batchwright.units import counted, shortened
from batchwright.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn


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
        from batchwright.integrations.transformers.audit_trainer import audit_trainer

        return audit_trainer(subject)
    raise InvalidInputError(
        f"audit takes a Workload, a target, or a transformers Trainer; received {shortened(subject)}.",
        remedy="for accelerate and Lightning: batchwright.integrations.accelerate.audit_first_window, "
        "batchwright.integrations.lightning.AuditFirstWindow",
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
            notes=tuple(self._notes()),
            is_random=is_random,
        )

    def _notes(self) -> Iterator[str]:
        if self._off:
            yield f"dropout was off during this window ({counted(len(self._off), 'place')})"
        if self._cast:
            yield f"autocast to {self._cast[0].removeprefix('torch.')} was off during this window"

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
