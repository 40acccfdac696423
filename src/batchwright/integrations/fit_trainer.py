"""`fit_trainer`: the largest per-device batch size of a transformers Trainer, set on it with the effective batch kept.

Promises:
- a probe is the trainer's own `train()`, ended after its second optimizer step, on the longest samples of its data;
- afterwards the trainer is as it was, but for the two sizes: it trains as one that was never probed;
- the micro-batch that is set has run with its full accumulation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchwright.errors import InvalidInputError, NothingFitsError, import_extra
from batchwright.fitting.budget import open_budget
from batchwright.fitting.find_batch_size import keep_effective_batch, nothing_fits
from batchwright.fitting.result import Fit
from batchwright.fitting.search import by_doubling, by_peaks
from batchwright.fitting.series import Cap, describe, raise_failure, run_series
from batchwright.fitting.work import refuse_spread
from batchwright.integrations.trainer_probes import TrainerProbes
from batchwright.state.process_state import cheap_collections
from batchwright.units import shortened, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchwright.device.outcome import Outcome
    from batchwright.planning.plan import Plan

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
    cap = Cap(effective, f"the effective batch is {effective:,}")
    if probes.num_samples is not None and probes.num_samples < cap.size:
        cap = Cap(probes.num_samples, f"the dataset holds {probes.num_samples:,} samples")
    if limit is not None and whole_number(limit, "limit") < cap.size:
        cap = Cap(limit, f"the limit is {limit:,}")
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
            raise nothing_fits(series, budget, probes.on)
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
            remedy="fit_trainer on one device, then its sizes on all of them; or batchwright fit under torchrun",
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
