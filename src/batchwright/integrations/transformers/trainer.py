"""A Trainer of transformers, probed as it is configured: its largest batch size (`fit_trainer`), its accumulation.

Promises:
- a probe is the trainer's own `train()`, ended after its second optimizer step, on the longest samples of its data, at
  every size; it logs, evaluates, saves and reports nothing, and calls no callback but the trainer's own flow;
- afterwards the trainer is as it was, but for the two sizes: it trains as one that was never probed;
- the micro-batch that is set has run with its full accumulation, the effective batch kept;
- an audit takes the first window's samples, as the trainer's own loader gives them, once accumulated and once as one
  batch; a copy of the model is trained, dropout off, no optimizer steps, and afterwards the trainer is as it was.
"""

from __future__ import annotations

import copy
import itertools
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset, SequentialSampler, Subset

from batchwright.auditing.audit import audit_subject
from batchwright.auditing.audit_result import TOLERANCES, Audit
from batchwright.auditing.audited_workload import AuditSubject
from batchwright.auditing.gradients import Gradient, comparison_dtype, named_weights
from batchwright.auditing.loop_recorder import RecordedWindow
from batchwright.auditing.overrides import without_dropout
from batchwright.device.batches import join, tensors_in
from batchwright.device.device import open_limited
from batchwright.device.host import live_bytes
from batchwright.errors import InvalidInputError, NothingFitsError, import_extra
from batchwright.fitting.find_batch_size import CountedSteps, keep_effective_batch, run_until_second_step
from batchwright.fitting.fit import longest_first
from batchwright.fitting.fit_result import Fit, Restored
from batchwright.fitting.probers import open_budget, refuse_spread
from batchwright.fitting.run_search import Cap, Cause, describe, nothing_fits, raise_failure, refuse_series, run_series
from batchwright.planning.search import by_doubling, by_peaks
from batchwright.state.held_objects import CONTAINERS, held_objects
from batchwright.state.kept_state import KeptState
from batchwright.state.process_state import cheap_collections, uninterrupted
from batchwright.state.untouched import untouched
from batchwright.units import counted, shortened, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from batchwright.device.outcome import Outcome
    from batchwright.planning.plan import Plan


# More than two: under fp16 the first steps are often skipped, and a skipped step makes no moments.
_MOST_STEPS = 20
# What a probe must not do, in the words of TrainingArguments.
_QUIET = {
    "max_steps": _MOST_STEPS,
    "auto_find_batch_size": False,
    "eval_on_start": False,
    "load_best_model_at_end": False,
    "logging_first_step": False,
    "push_to_hub": False,
    # Workers are other processes: what they hold is not the device's, and starting them costs more than the probe.
    "dataloader_num_workers": 0,
    "dataloader_persistent_workers": False,
    "dataloader_prefetch_factor": None,
    "dataloader_multiprocessing_context": None,
}


class TrainerProbes:
    """Probes of one trainer, which come after each other and leave nothing behind; `limit_bytes` holds each of them."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.on = str(trainer.args.device)
        self._accelerator = None if self.on == "cpu" else torch.device(self.on)
        changed = [trainer, trainer.accelerator, trainer.accelerator.gradient_state]
        # Special tokens of a tokenizer are written into these.
        changed += [getattr(trainer.model, name, None) for name in ("config", "generation_config")]
        self._before = [(thing, dict(vars(thing))) for thing in changed if hasattr(thing, "__dict__")]
        """Objects with their attributes, to be put back by reference."""
        # Held by a call that never happens, so that it is looked for where a function's things are.
        holder = partial(print, trainer, trainer.data_collator, trainer.train_dataset, trainer.accelerator)
        reached = list(held_objects(holder).values())
        self._state = KeptState(accelerator=self._accelerator)
        self._not_kept = self._state.keep_all(reached)
        # With model_init each run makes a model of its own, within the budget anyway.
        self.held_bytes = live_bytes(reached) if trainer.model_init is None else 0
        self.limit_bytes: int | None = None
        data = trainer.train_dataset
        has_numbers = hasattr(data, "__len__") and not isinstance(data, IterableDataset)
        self.num_samples = len(data) if has_numbers else None
        self._order: tuple[int, ...] | None = None
        self.notes: list[str] = []
        kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
        own = [kind.__name__ for kind in kinds if kind.__module__.partition(".")[0] != "transformers"]
        if own:
            self.notes.append(f"callbacks were not called by the probes: {', '.join(own)}")
        if self.num_samples == 0:
            raise InvalidInputError("the trainer's train_dataset is empty: there is no sample to probe with.")

    def look_for_the_longest(self, *, most: int, say: Callable[[str], None]) -> None:
        """Find the samples to probe with; it may read all of the data."""
        if self.num_samples is None:
            self.notes.append("the data cannot be indexed: its first samples were probed, not its longest")
        else:
            try:
                longest = longest_first(self._trainer.train_dataset, most=most, say=say)
            finally:
                self._state.restore()
            self._order = longest.order
            self.notes += [longest.note] if longest.note else []

    def probe(self, size: int, *, accumulation: int) -> Outcome:
        """Train two optimizer steps at one size."""
        device = open_limited(self.on, self.limit_bytes, held_bytes=self.held_bytes)
        steps = CountedSteps(self._accelerator)
        samples: list[Any] | None = None
        if self.num_samples is not None:
            longest = list(itertools.islice(self._order or range(self.num_samples), size))
            samples = Subset(self._trainer.train_dataset, longest * (2 * accumulation))  # type: ignore[assignment]
        with self.prepared(size, accumulation, samples):
            return device.watch(
                lambda: run_until_second_step(self._trainer.train, steps),
                micro_batch=size,
                accumulation=accumulation,
            )

    @contextmanager
    def prepared(self, size: int, accumulation: int, samples: Any = None) -> Iterator[None]:
        """Have the trainer ready for a run that nobody hears of, on these samples in this order, and put it back."""
        with untouched(accelerator=self._accelerator):
            try:
                with self._quiet():
                    self._prepare(size, accumulation, samples)
                    yield
            finally:
                with uninterrupted():
                    for thing, attributes in self._before:
                        vars(thing).clear()
                        vars(thing).update(attributes)
                    self._state.restore()

    def restored(self) -> Restored:
        """What was restored."""
        covered = (*self._state.covered, "state, control, callbacks, arguments and data of the trainer")
        beyond = "files, connections and Python objects that a subclass of Trainer changes itself"
        return Restored(covered, (*self._not_kept, beyond))

    def _prepare(self, size: int, accumulation: int, samples: Any) -> None:
        """Give the trainer copies of what a run changes, and the samples to run on."""
        trainer = self._trainer
        for name, value in vars(trainer).items():
            vars(trainer)[name] = _copied(value)
        for name, value in vars(trainer.accelerator).items():
            vars(trainer.accelerator)[name] = _copied(value)
        args = trainer.args = copy.copy(trainer.args)
        for name, value in _QUIET.items():
            if hasattr(args, name):
                setattr(args, name, value)
        for name in ("eval_strategy", "save_strategy", "logging_strategy"):
            setattr(args, name, type(getattr(args, name))("no"))
        args.per_device_train_batch_size = trainer._train_batch_size = size
        args.gradient_accumulation_steps = accumulation
        trainer.control = copy.copy(trainer.control)
        trainer.callback_handler = copy.copy(trainer.callback_handler)
        trainer.callback_handler.callbacks = [
            callback
            for callback in trainer.callback_handler.callbacks
            if type(callback).__name__ == "DefaultFlowCallback"
        ]
        trainer._memory_tracker = type(trainer._memory_tracker)(skip_memory_metrics=True)
        if samples is not None:
            trainer.train_dataset = samples
            trainer._get_train_sampler = lambda dataset=None: SequentialSampler(trainer.train_dataset)

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        logging = import_extra("transformers", extra="transformers", purpose="fit_trainer").logging
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)


def _copied(value: Any) -> Any:
    """Copy containers, and containers in them, but nothing else: metrics and the like are appended to in place."""
    if type(value) not in CONTAINERS:
        return value
    fresh = copy.copy(value)
    if isinstance(fresh, dict):
        fresh.update({key: _copied(inner) for key, inner in fresh.items()})
    elif isinstance(fresh, list):
        fresh[:] = [_copied(inner) for inner in fresh]
    return fresh


_MAX_TRIALS = 40


def fit_trainer(
    trainer: Any,
    *,
    memory: str | int | None = None,
    limit: int | None = None,
    margin: float = 0.0,
    progress: Callable[[str], None] | None = None,
) -> Fit:
    """Find the largest per-device batch size of a Trainer and set it, the effective batch kept by accumulation.

        trainer = Trainer(model, TrainingArguments(per_device_train_batch_size=64, ...), train_dataset=data)
        found = fit_trainer(trainer)
        trainer.train()  # per_device_train_batch_size=16, gradient_accumulation_steps=4

    The effective batch is what the arguments say: batch size x accumulation; no size above it is tried. `memory` is a
    budget such as "16GiB" (default: what is free), `limit` the largest size of interest, `margin` a share to keep free.
    """
    _check(trainer)
    say = progress or (lambda _: None)
    effective = trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps
    probes = TrainerProbes(trainer)
    budget = open_budget(probes.on, memory, margin=margin, held_bytes=probes.held_bytes)
    probes.limit_bytes = budget.probe_bytes
    cap = Cap(effective, Cause.EFFECTIVE_BATCH)
    if probes.num_samples is not None and probes.num_samples < cap.size:
        cap = Cap(probes.num_samples, Cause.DATASET)
    if limit is not None and whole_number(limit, "limit") < cap.size:
        cap = Cap(limit, Cause.LIMIT)
    probes.look_for_the_longest(most=effective, say=say)
    with cheap_collections():
        series = run_series(
            by_peaks(cap.size, budget.probe_bytes)
            if budget.is_tight and budget.probe_bytes is not None
            else by_doubling(cap.size, start=min(trainer.args.per_device_train_batch_size, cap.size)),
            lambda size: probes.probe(size, accumulation=1 if size >= effective else 2),
            cap=cap,
            max_trials=_MAX_TRIALS,
            say=say,
        )
        if series.micro_batch is None:
            raise nothing_fits([refuse_series(series.trials)], on=probes.on, budget=budget)
        # A batch with all samples in it fits, so one that has room for more does as well.
        most = effective if series.micro_batch == probes.num_samples and limit is None else series.micro_batch
        chosen, notes, more_trials = _certified_plan(probes, effective, most, say)
    trainer.args.per_device_train_batch_size = chosen.micro_batch
    trainer.args.gradient_accumulation_steps = chosen.accumulation
    # What its data loader reads; the arguments were copied into it when the trainer was made.
    trainer._train_batch_size = trainer.args.train_batch_size
    return Fit(
        name=type(trainer.model).__name__,
        on=probes.on,
        micro_batch=series.micro_batch,
        limit=cap.size,
        limit_bytes=budget.limit_bytes,
        trials=(*series.trials, *more_trials),
        next_size=series.next_size,
        reason=series.reason,
        restored=probes.restored(),
        plan=chosen,
        notes=(*budget.notes, *probes.notes, *notes),
    )


def _check(trainer: Any) -> None:
    transformers = import_extra("transformers", extra="transformers", purpose="fit_trainer")
    if not isinstance(trainer, transformers.Trainer):
        raise InvalidInputError(f"fit_trainer takes a transformers.Trainer; received {shortened(trainer)}.")
    args = trainer.args
    refuse_spread(trainer.model_wrapped)
    waits = "one that runs out of memory leaves the others waiting in a collective that nothing can end"
    if args.world_size > 1:
        raise InvalidInputError(
            f"the trainer runs on {args.world_size} ranks, and {waits}.",
            remedy="fit_trainer on one device, then its sizes on all of them; or bw.fit(workload) under torchrun",
        )
    if args.n_gpu > 1:
        raise InvalidInputError(
            f"the trainer spreads its model over {args.n_gpu} cards by DataParallel, whose first card fills before "
            "the others.",
            remedy="CUDA_VISIBLE_DEVICES=0 while fitting",
        )
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise InvalidInputError("the trainer runs under DeepSpeed or FSDP, which one process cannot probe.")


def _certified_plan(
    probes: TrainerProbes, effective: int, most: int, say: Callable[[str], None]
) -> tuple[Plan, list[str], list[Outcome]]:
    """Choose an even split and run it: all micro-batches of a step are on the device at once, which costs too."""
    trials: list[Outcome] = []
    while True:
        chosen, notes = keep_effective_batch(effective, most)
        if chosen.accumulation <= 2 and chosen.micro_batch == most:
            return chosen, notes, trials
        size, accumulation = chosen.micro_batch, chosen.accumulation
        say(f"trying micro-batch {size:,} x accumulation {accumulation:,}")
        trials.append(probes.probe(min(size, probes.num_samples or size), accumulation=accumulation))
        say(describe(trials[-1]))
        if trials[-1].fits:
            return chosen, notes, trials
        if trials[-1].verdict == "failed":
            if trials[-1].exception is not None:
                trials[-1].exception.add_note(
                    f"batchwright: {size:,} is the largest micro-batch that divides the effective batch "
                    f"{effective:,} and is not above {most:,}, which runs."
                )
            raise_failure(trials[-1])
        if size == 1:
            raise NothingFitsError(
                f"micro-batch 1 fits, but not beside the inputs of {accumulation:,} micro-batches, which the "
                "trainer loads at once for each step.",
                remedy="a smaller effective batch",
            )
        most = size - 1


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
