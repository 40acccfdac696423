"""A sampler that deals batches to ranks itself, in accelerate and in a transformers Trainer.

accelerate shards every batch sampler once more when it prepares a loader, so that ranks would lose batches. Here the
loader is prepared as usual (device, seeds, the end of an epoch), and then told that there is nothing to shard.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

from batchwright.errors import InvalidInputError
from batchwright.units import counted

if TYPE_CHECKING:
    from batchwright.sampler.token_batch_sampler import TokenBatchSampler


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

    Its per_device_train_batch_size has no say any more. A run that is resumed from a checkpoint skips what it has seen
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
