"""Train a workload for real, on its own data: what the noise of gradients and the critical batch are measured in.

Promises:
- with `data` every sample comes once per epoch, in an order that the seed decides; with `batch` samples are made anew;
- ranks share the data and take different samples; the model is wrapped as the workload says, else in DDP;
- what is live (model, optimizers, scaler, what the functions hold) and the random state come back as they were, so
  that whatever trains next begins where this did.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, DistributedSampler

from batchwright.device.batches import check_data_has_no_shape, make_batch, move_batch
from batchwright.device.step import build_model, build_optimizers, evaluating
from batchwright.errors import InvalidInputError
from batchwright.memory.estimate import check_shape
from batchwright.state.untouched import untouched
from batchwright.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from batchwright.workload import Workload


@dataclass(frozen=True)
class Trained:
    """A model that is ready to train, and who trains it."""

    workload: Workload
    model: nn.Module
    optimizers: tuple[Any, ...]
    device: torch.device
    shape: Mapping[str, Any]
    seed: int
    rank: int
    ranks: int

    def batches(self, micro_batch: int, accumulation: int) -> Iterator[Any]:
        """Yield micro-batches of this rank without end; no step has samples of two epochs, or one twice."""
        if self.workload.data is None:
            return (make_batch(self.workload, micro_batch, self.shape, self.device) for _ in itertools.count())
        samples, number = micro_batch * accumulation * self.ranks, len(self.workload.data)
        if number < samples:
            raise InvalidInputError(
                f"a step of {counted(samples, 'sample')} was asked for, but data= holds {counted(number, 'sample')}.",
                remedy=f"--effective-batch {max(number // 2, 1)} or less" if number else "a dataset that is not empty",
            )
        return self._epochs(micro_batch, accumulation)

    def summed(self, *numbers: float) -> tuple[float, ...]:
        """Return the sums over ranks, the same to the bit on each; alone, what was given."""
        if self.ranks == 1:
            return numbers
        # NCCL moves no host memory.
        device = self.device if "gloo" not in dist.get_backend() else torch.device("cpu")
        sums = torch.tensor(numbers, dtype=torch.float64, device=device)
        dist.all_reduce(sums)
        return tuple(sums.tolist())

    def _epochs(self, micro_batch: int, accumulation: int) -> Iterator[Any]:
        data = self.workload.data
        sampler: Any = DistributedSampler(
            data, num_replicas=self.ranks, rank=self.rank, shuffle=True, seed=self.seed, drop_last=True
        )
        loader: Any = DataLoader(
            data, batch_size=micro_batch, sampler=sampler, collate_fn=self.workload.collate, drop_last=True
        )
        for epoch in itertools.count():
            sampler.set_epoch(epoch)
            for batch in itertools.islice(loader, len(loader) // accumulation * accumulation):
                yield move_batch(batch, self.device)


@contextmanager
def training(
    workload: Workload, *, device: torch.device, shape: Mapping[str, Any] | None = None, seed: int = 0
) -> Iterator[Trained]:
    """Build the workload's model and optimizer on a device, seeded; put a live model back on the way out."""
    if workload.loss is None or workload.optimizer is None:
        raise InvalidInputError(
            "noise is measured while a workload trains, and this one only infers.",
            remedy="loss=... and optimizer=...",
        )
    check_data_has_no_shape(workload, shape or {})
    check_shape(workload, shape or {})
    is_spread = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if is_spread else (0, 1)
    with untouched(workload, accelerator=None if device.type == "cpu" else device):
        torch.manual_seed(seed)
        model = build_model(workload, device)
        _materialise(workload, model, device, dict(shape or {}))
        if is_spread:
            model = (workload.wrap or nn.parallel.DistributedDataParallel)(model)
        optimizers = build_optimizers(workload, model)
        if not model.training:
            model.train()
        # Samples that are made, and dropout, must differ from rank to rank.
        torch.manual_seed(seed + 1_000_003 * rank + 1)
        yield Trained(workload, model, optimizers, device, dict(shape or {}), seed, rank, ranks)


def _materialise(workload: Workload, model: nn.Module, device: torch.device, shape: Mapping[str, Any]) -> None:
    """Run one forward of a model with lazy parameters: hooks and ranks need to know their shapes."""
    assert workload.loss is not None
    if any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        with torch.no_grad(), evaluating(model):
            workload.loss(model, make_batch(workload, 1, shape, device))


def fitting_split(each: int, largest: int | None) -> tuple[int, int]:
    """Return micro-batch and accumulation of one rank's share: such that there is a spread, and each fits.

    >>> fitting_split(64, None), fitting_split(64, 32), fitting_split(64, 5), fitting_split(66, 4)
    ((16, 4), (16, 4), (4, 16), (3, 22))
    """
    usual, _ = split_of(each, None, 1)
    size = next(size for size in range(min(usual, largest or usual), 0, -1) if each % size == 0)
    return size, each // size


def split_of(effective_batch: int, micro_batch: int | None, ranks: int) -> tuple[int, int]:
    """Return micro-batch and accumulation of this effective batch; without a micro-batch such that there is a spread.

    >>> split_of(64, None, 1), split_of(64, 32, 2), split_of(11, None, 1)
    ((16, 4), (32, 1), (11, 1))
    """
    if effective_batch % ranks:
        raise InvalidInputError(
            f"an effective batch of {effective_batch} cannot be shared by {counted(ranks, 'rank')} alike.",
            remedy=f"--effective-batch {-(-effective_batch // ranks) * ranks}",
        )
    each = effective_batch // ranks
    if micro_batch is None:
        # Four parts know the signal to within 15 to 30 % of what single examples would (research: variance of |G|^2).
        accumulation = next((parts for parts in (4, 3, 2, 5, 6, 7) if each % parts == 0), 1)
        return each // accumulation, accumulation
    if each % micro_batch:
        near = next(size for size in range(min(micro_batch, each), 0, -1) if each % size == 0)
        raise InvalidInputError(
            f"an effective batch of {effective_batch} on {counted(ranks, 'rank')} is no whole number of micro-batches "
            f"of {micro_batch}.",
            remedy=f"--micro-batch {near}",
        )
    return micro_batch, each // micro_batch
