"""For accelerate: `watch` a loop, `audit_first_window` of one, `prepare_loader` of a `TokenBatchSampler`.

accelerate shards every batch sampler once more when it prepares a loader, so that ranks would lose batches of one that
deals them itself. Such a loader is prepared as usual (device, seeds, the end of an epoch), and then told that there is
nothing to shard; a transformers Trainer is handed one likewise (`use_batch_sampler`).

Promises:
- the loop stays as it is: hooks on what `accelerator.prepare` returned see it, and change nothing;
- metrics go to `accelerator.log` and to `tracker`, from the main process; all processes have the same answer.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from batchwright.errors import InvalidInputError
from batchwright.integrations.live_run import FirstWindow, LiveBatch, ShowsLiveBatch
from batchwright.integrations.trackers import WandbRun, tracker_for
from batchwright.units import counted, shortened, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import TracebackType

    import torch

    from batchwright.auditing.audit_result import Audit
    from batchwright.sampler.token_batch_sampler import TokenBatchSampler


__all__ = ["AcceleratorWatch", "Watched", "audit_first_window", "prepare_loader", "watch"]


def watch(
    accelerator: Any,
    model: Any,
    optimizer: Any,
    *,
    micro_batch: int | None = None,
    loader: Any = None,
    tracker: Any = None,
    log_every: int = 10,
    every: int = 1,
    window: float | None = None,
    population: int | None = None,
    say: Callable[[str], None] | None = None,
) -> AcceleratorWatch:
    """Measure the critical batch of an accelerate loop; call it after `accelerator.prepare`, before the loop.

    `model` and `optimizer` are what `prepare` returned, `micro_batch` the samples of one forward on one process. Every
    `log_every` optimizer steps the `batch/*` metrics go to `accelerator.log` and to `tracker`; with 0 never. `loader`
    is the prepared one, where a `TokenBatchSampler` makes its batches: they have no one size, so their padding is told,
    and no critical batch. `every`, `window` and `population` are those of `NoiseScale`. Use it as a context, or call
    `close()`, to take the hooks away.
    """
    live = LiveBatch(tracker=tracker, every=every, window=window, population=population, say=say)
    live.look_at_sampler(loader)
    return AcceleratorWatch(
        accelerator,
        model,
        optimizer,
        live=live,
        micro_batch=None if live.is_by_budget else whole_number(micro_batch, "micro_batch"),
        log_every=whole_number(log_every, "log_every", least=0),
    )


class AcceleratorWatch(ShowsLiveBatch):
    """What `watch` returns: the answer so far, and the way to end it."""

    def __init__(
        self,
        accelerator: Any,
        model: Any,
        optimizer: Any,
        *,
        live: LiveBatch,
        micro_batch: int | None,
        log_every: int,
    ) -> None:
        inner = getattr(optimizer, "optimizer", optimizer)
        if not hasattr(accelerator, "gradient_accumulation_steps") or not hasattr(inner, "register_step_post_hook"):
            raise InvalidInputError(
                f"watch takes an Accelerator, and the model and the optimizer that its prepare returned; "
                f"received {shortened(accelerator)} and {shortened(optimizer)}."
            )
        self._accelerator, self._live, self._log_every = accelerator, live, log_every
        self._own = _AcceleratorLog(accelerator)
        self.steps = 0
        """Optimizer steps seen."""
        live.devices = accelerator.num_processes
        live.measure(model, inner, micro_batch=micro_batch, scaler=accelerator.scaler)
        # After NoiseScale's own hook, which looks before the step.
        self._handle = inner.register_step_post_hook(self._stepped)

    @property
    def metrics(self) -> dict[str, float]:
        """The `batch/*` metrics as they stand."""
        self._live.accumulation = self._accelerator.gradient_accumulation_steps
        return super().metrics

    def close(self) -> None:
        """Take every hook away; the answers stay."""
        self._handle.remove()
        self._live.stop()

    def __enter__(self) -> AcceleratorWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stepped(self, *_: Any) -> None:
        self.steps += 1
        if self._log_every and self.steps % self._log_every == 0 and self._accelerator.is_main_process:
            self._live.tell(self.metrics, self.steps, *([self._own] if self._accelerator.trackers else []))


class _AcceleratorLog(WandbRun):
    """The trackers that an accelerator was made with; it logs as Weights & Biases does."""

    name = "accelerator.log"

    def _write(self, name: str, text: str) -> None:
        for tracker in self.target.trackers:
            held = getattr(tracker, "tracker", None)
            if held is not None and tracker.name in ("tensorboard", "wandb", "trackio", "mlflow"):
                tracker_for(held).write(name, text)


class Watched:
    """A loop whose first window is looked at; the verdict is in `.audit` from its first optimizer step on."""

    def __init__(self, window: FirstWindow) -> None:
        self._window = window

    @property
    def audit(self) -> Audit | None:
        """The verdict; None before the first optimizer step."""
        return self._window.audit

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the loader's batches, noting those of the first window."""
        for batch in loader:
            self._window.see(batch)
            yield batch


@contextmanager
def audit_first_window(
    accelerator: Any,
    model: torch.nn.Module,
    optimizer: Any,
    loss: Callable[[torch.nn.Module, Any], torch.Tensor],
    *,
    merge: Callable[[list[Any]], Any] | None = None,
) -> Iterator[Watched]:
    """Compare the gradient of the first optimizer step with that of its samples as one batch.

    Around the training loop, with the objects that `accelerator.prepare` returned; the loop runs over
    `watched.batches(loader)`, and `loss(model, batch)` is the loss that it takes. `merge(batches)` makes one batch of
    several, where tensors with samples along dimension 0 are not all there is.
    """
    if accelerator.num_processes > 1:
        raise InvalidInputError(f"audit_first_window works in one process; this run has {accelerator.num_processes}.")
    plain = accelerator.unwrap_model(model)
    window = FirstWindow(
        plain,
        lambda batch: loss(model, batch),
        accumulation=accelerator.gradient_accumulation_steps,
        name=f"accelerate with {type(plain).__name__}",
        what=f"gradient_accumulation_steps={accelerator.gradient_accumulation_steps}, in a real run",
        merge=merge,
    )
    clip = accelerator.clip_grad_norm_

    def take_and_clip(*arguments: Any, **options: Any) -> Any:
        if accelerator.sync_gradients:
            window.take()
        return clip(*arguments, **options)

    accelerator.clip_grad_norm_ = take_and_clip
    inner = getattr(optimizer, "optimizer", optimizer)
    handle = inner.register_step_pre_hook(lambda *_: window.judge())
    try:
        yield Watched(window)
    finally:
        del accelerator.clip_grad_norm_
        handle.remove()
        window.leave()


def prepare_loader(accelerator: Any, loader: Any) -> Any:
    """Prepare a DataLoader whose batch sampler is a `TokenBatchSampler`, in place of `accelerator.prepare(loader)`."""
    sampler = loader.batch_sampler
    _check_ranks(sampler, accelerator.num_processes)
    repeats = sampler.planned.rounds.num_repeats
    if repeats:
        warnings.warn(
            f"{counted(repeats, 'batch')} of an epoch only keep a rank in step and should count nothing; a loop that "
            "does not ask sampler.counts(index) counts them like the others.",
            stacklevel=2,
        )
    prepared = accelerator.prepare_data_loader(loader)
    if type(prepared).__name__ == "DataLoaderDispatcher":
        raise InvalidInputError(
            "dispatch_batches=True reads one rank's batches and deals them out, but each rank's sampler has its own.",
            remedy="DataLoaderConfiguration(dispatch_batches=False)",
        )
    for one in (prepared, getattr(prepared, "base_dataloader", None)):
        if one is not None and getattr(one.batch_sampler, "batch_sampler", None) is sampler:
            # A DataLoader lets nobody exchange its sampler; nothing has been drawn from it yet.
            object.__setattr__(one, "batch_sampler", sampler)
    prepared.set_epoch = partial(_set_epoch, prepared, sampler)
    return prepared


def _set_epoch(prepared: Any, sampler: TokenBatchSampler, epoch: int) -> None:
    """Turn to an epoch; accelerate counts the passes of its loader from 0, and a state that was loaded knows better."""
    if sampler.is_resumed:
        epoch = max(epoch, sampler.epoch)
    prepared.iteration = epoch
    sampler.set_epoch(epoch)


def use_batch_sampler(trainer: Any, sampler: TokenBatchSampler) -> None:
    """Have a transformers Trainer take its training batches from a `TokenBatchSampler`.

    Its per_device_train_batch_size is then ignored. A run that is resumed from a checkpoint skips what it has seen
    by itself, as with any other sampler.
    """
    if len(trainer.train_dataset) != len(sampler.lengths):
        raise InvalidInputError(
            f"the sampler has {counted(len(sampler.lengths), 'length')}, the Trainer's dataset "
            f"{counted(len(trainer.train_dataset), 'sample')}."
        )
    _check_ranks(sampler, trainer.args.world_size)
    trainer.get_train_dataloader = partial(_train_loader, trainer, sampler)


def _train_loader(trainer: Any, sampler: TokenBatchSampler) -> Any:
    from torch.utils.data import DataLoader
    from transformers.trainer_utils import seed_worker

    dataset, collate = trainer.train_dataset, trainer.data_collator
    if type(dataset).__module__.startswith("datasets."):
        dataset = trainer._remove_unused_columns(dataset, description="Training")
    else:
        collate = trainer._get_collator_with_removed_columns(collate, description="Training")
    args = trainer.args
    loader: Any = DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory,
        persistent_workers=args.dataloader_persistent_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
        worker_init_fn=partial(seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index),
    )
    return prepare_loader(trainer.accelerator, loader)


def _check_ranks(sampler: Any, ranks: int) -> None:
    if not hasattr(sampler, "count_received"):
        raise InvalidInputError(
            "the loader has no TokenBatchSampler: accelerator.prepare(loader) is right for any other.",
            remedy="DataLoader(dataset, batch_sampler=bw.TokenBatchSampler(...))",
        )
    if sampler.world_size != ranks:
        raise InvalidInputError(
            f"the sampler deals to {counted(sampler.world_size, 'rank')}, and there are {ranks}.",
            remedy="make it after the process group is there, or with rank=... and world_size=...",
        )
