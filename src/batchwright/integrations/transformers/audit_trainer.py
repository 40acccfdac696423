"""Audit a transformers Trainer as it is configured: its own `train()`, ended where its optimizer would step.

Promises:
- the first window's samples, as the trainer's own loader gives them, once accumulated and once as one batch;
- a copy of the model is trained, dropout off, no optimizer steps, and afterwards the trainer is as it was.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch

from batchwright.auditing.audit import audit_subject
from batchwright.auditing.audit_result import TOLERANCES, Audit
from batchwright.auditing.audited_workload import AuditSubject
from batchwright.auditing.gradients import Gradient, comparison_dtype, named_weights
from batchwright.auditing.loop_recorder import RecordedWindow
from batchwright.auditing.overrides import without_dropout
from batchwright.device.batches import join, tensors_in
from batchwright.errors import InvalidInputError, import_extra
from batchwright.integrations.transformers.fit_trainer import TrainerProbes
from batchwright.state.process_state import cheap_collections
from batchwright.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class _AtTheStep(BaseException):
    """Ends `train()` where the optimizer would step."""


def audit_trainer(trainer: Any) -> Audit:
    """Compare the gradient of a trainer's first window with that of the same samples as one batch."""
    subject = TrainerSubject(trainer)
    sizes = subject.sizes
    tails = [sizes[:1]] if len(sizes) > 1 else []
    name = f"{type(trainer).__name__} with {type(trainer.model).__name__}"
    return audit_subject(subject, [sizes], tails, name=name, what="the trainer's own train(), as configured")


class TrainerSubject(AuditSubject):
    """A trainer made ready to be compared with itself; a micro-batch is a list of samples before they are collated.

    Whether its loss is stateful is not looked for.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._probes = TrainerProbes(trainer)
        self._accumulation = trainer.args.gradient_accumulation_steps
        self.notes: list[str] = list(self._probes.notes)
        if trainer.args.world_size > 1:
            raise InvalidInputError(
                f"a trainer is audited in one process; this one has {trainer.args.world_size} ranks.",
                remedy="run the audit without torchrun",
            )
        if next(trainer.model.parameters()).dtype in (torch.bfloat16, torch.float16):
            self.notes.append("the weights are 16 bits wide; they were compared in fp32")
        self._collated: dict[int, Any] | None = None
        self._is_random: bool | None = None
        self._samples = self._first_window()
        self.dtype = comparison_dtype(trainer.model)
        model = copy.deepcopy(trainer.model)
        # As wide as its data: a model of fp64 in fp32 could not take its own batches.
        self.model = model if self.dtype == "fp64" else model.float()
        self.model.zero_grad(set_to_none=True)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The micro-batches of the first window."""
        return tuple(map(len, self._samples))

    @contextmanager
    def open(self) -> Iterator[None]:
        """Compare inside of this: dropout is off."""
        with cheap_collections(), without_dropout(self.model) as off:
            if off:
                self.notes.append(f"dropout was off ({counted(len(off), 'place')})")
            yield

    def _look_for_randomness(self) -> bool:
        # Its train() seeds all generators, each time alike: another seed has to be asked for.
        first, args = self._samples[0], self._trainer.args
        seed, gradients = args.seed, []
        try:
            for other in (seed, seed + 1):
                args.seed = other
                gradients.append(self.of_loss(first))
        finally:
            args.seed = seed
        error = gradients[1].error_to(gradients[0])
        is_random = error is None or error > TOLERANCES[self.dtype]
        if is_random:
            self.notes.append("the loss is random even without dropout: two seeds give two gradients")
        return is_random

    def micro_batches(self, sizes: Sequence[int]) -> list[Any]:
        """Return the micro-batches of a split that the trainer itself forms."""
        return self._samples[: len(sizes)]

    def reference(self, sizes: Sequence[int]) -> Gradient:
        """Return the gradient of one batch of all samples of a split."""
        return self._run(self.micro_batches(sizes), at_once=len(sizes), accumulation=1).gradient

    def of_loss(self, batch: list[Any]) -> Gradient:
        """Return what the trainer would step with if this were its batch, without accumulation."""
        return self._run([batch], at_once=1, accumulation=1).gradient

    @property
    def is_random(self) -> bool:
        """Whether the loss is random even without dropout, by two runs of the first micro-batch."""
        if self._is_random is None:
            self._is_random = self._look_for_randomness()
        return self._is_random

    @property
    def is_random_known(self) -> bool:
        """Whether that was asked already."""
        return self._is_random is not None

    def num_units(self, sizes: Sequence[int]) -> float:
        """Return the loss units of a split: samples, where nothing else is known."""
        return float(sum(sizes))

    @property
    def stepped_names(self) -> set[str]:
        """The weights that an optimizer steps: a trainer steps all that it trains."""
        return set(named_weights(self.model))

    def twice(self, micro_batches: Sequence[list[Any]]) -> list[RecordedWindow]:
        """Return one window: zeroing between two is the trainer's own, and ours ends at the first."""
        return [self.accumulated(micro_batches)]

    def accumulated(
        self, micro_batches: Sequence[list[Any]], *, detailed: bool = False, seed: int = 0
    ) -> RecordedWindow:
        """Return what the trainer would step with; it seeds itself, and is not followed in detail."""
        return self._run(micro_batches, at_once=1, accumulation=self._accumulation)

    def _first_window(self) -> list[list[Any]]:
        """Read the first window by the trainer's own loader, and keep its samples as the collator received them."""
        seen: list[list[Any]] = []
        args = self._trainer.args
        with self._probes.prepared(args.per_device_train_batch_size, self._accumulation):
            collate = self._trainer.data_collator

            def keep(samples: list[Any]) -> Any:
                seen.append([dict(sample) if isinstance(sample, dict) else sample for sample in samples])
                return collate(samples)

            self._trainer.data_collator = keep
            numbers = torch.random.get_rng_state()
            for _, _ in zip(range(self._accumulation), self._trainer.get_train_dataloader(), strict=False):
                pass
            torch.random.set_rng_state(numbers)
            if seen and not _are_equal(collate(seen[0]), collate(seen[0])):
                self._collated = {id(samples): collate(samples) for samples in seen[: self._accumulation]}
                self.notes.append("the collator is random: each micro-batch was collated once, and they were joined")
        window = seen[: self._accumulation]
        if not window:
            raise InvalidInputError("the trainer's train_dataset is empty: there is nothing to audit with.")
        return window

    def _run(self, micro_batches: Sequence[list[Any]], *, at_once: int, accumulation: int) -> RecordedWindow:
        """Train on micro-batches, so many of them as one batch, up to the first optimizer step."""
        callbacks = import_extra("transformers", extra="transformers", purpose="audit of a Trainer")
        caught: list[Gradient] = []
        model = self.model

        class Stop(callbacks.TrainerCallback):  # type: ignore[misc,name-defined]
            def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
                caught.append(Gradient.of(model))
                raise _AtTheStep

        # One entry of the dataset is one micro-batch, so that neither its size nor its order can come out differently.
        with self._probes.prepared(at_once, accumulation, list(range(len(micro_batches)))):
            trainer = self._trainer
            collate = trainer.data_collator

            def gather(numbers: list[int]) -> Any:
                chosen = [micro_batches[number] for number in numbers]
                if self._collated is not None:
                    return join([copy.deepcopy(self._collated[id(samples)]) for samples in chosen])
                return collate([sample for samples in chosen for sample in samples])

            trainer.data_collator = gather
            trainer.args.remove_unused_columns = False
            trainer.model = trainer.model_wrapped = model
            trainer.model_init = None
            trainer.args.max_grad_norm = 0.0
            trainer.args.dataloader_drop_last = False
            trainer.accelerator.native_amp = False
            trainer.callback_handler.callbacks.append(Stop())
            with suppress(_AtTheStep):
                trainer.train()
        gradient = caught[0] if caught else Gradient.of(model)
        model.zero_grad(set_to_none=True)
        return RecordedWindow(gradient, has_stepped=bool(caught), has_clipped=False)


def _are_equal(one: Any, other: Any) -> bool:
    pairs = zip(tensors_in(one), tensors_in(other), strict=False)
    return all(a.shape == b.shape and bool((a == b).all()) for a, b in pairs)
