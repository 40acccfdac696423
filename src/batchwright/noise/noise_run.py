"""Train a workload for real, on its own data, and measure the critical batch beside the one in use (`measure_noise`).

Promises:
- with `data` every sample comes once per epoch, in an order that the seed decides; with `batch` samples are made anew;
- ranks share the data and take different samples; the model is wrapped as the workload says, else in DDP;
- what is live (model, optimizers, scaler, what the functions hold) and the random state come back as they were, so
  that whatever trains next begins where this did;
- the training is real: the workload's own data, loss and optimizer, stepped by an Accumulator;
- the answer is that of the last half of the run, and the trend shows the whole of it;
- what was left out of the measurement, and why, is in the result.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, DistributedSampler

from batchwright.accumulate.accumulator import Accumulator
from batchwright.accumulate.micro_batches import SizedBatches
from batchwright.device.batches import check_data_has_no_shape, make_batch, move_batch
from batchwright.device.device import open_device
from batchwright.device.step import (
    build_model,
    build_optimizers,
    build_scaler,
    checked_loss,
    evaluating,
    needing_larger_micro_batches,
)
from batchwright.errors import BatchwrightError, InvalidInputError
from batchwright.noise.noise_result import NoiseRun, TrendPoint, judge
from batchwright.noise.noise_scale import NoiseScale
from batchwright.noise.ramp import gamma_of
from batchwright.planning.best_batch import best_batch
from batchwright.state.untouched import current_keep, untouched
from batchwright.trace.run import check_shape
from batchwright.units import counted, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from batchwright.accumulate.windows import Step
    from batchwright.planning.critical_batch import CriticalBatch
    from batchwright.planning.horizon import Stretch
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
                remedy=f"effective_batch={max(number // 2, 1)} or less" if number else "a dataset that is not empty",
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


def fitting_split(share: int, largest: int | None) -> tuple[int, int]:
    """Return micro-batch and accumulation of one rank's share: such that there is a spread, and each fits.

    >>> fitting_split(64, None), fitting_split(64, 32), fitting_split(64, 5), fitting_split(66, 4)
    ((16, 4), (16, 4), (4, 16), (3, 22))
    """
    usual, _ = split_of(share, None, 1)
    size = next(size for size in range(min(usual, largest or usual), 0, -1) if share % size == 0)
    return size, share // size


def split_of(effective_batch: int, micro_batch: int | None, ranks: int) -> tuple[int, int]:
    """Return micro-batch and accumulation of this effective batch; without a micro-batch such that there is a spread.

    >>> split_of(64, None, 1), split_of(64, 32, 2), split_of(11, None, 1)
    ((16, 4), (32, 1), (11, 1))
    """
    if effective_batch % ranks:
        raise InvalidInputError(
            f"an effective batch of {effective_batch} cannot be shared by {counted(ranks, 'rank')} alike.",
            remedy=f"effective_batch={-(-effective_batch // ranks) * ranks}",
        )
    share = effective_batch // ranks
    if micro_batch is None:
        # Four parts know the signal to within 15 to 30 % of what single examples would (research: variance of |G|^2).
        accumulation = next((parts for parts in (4, 3, 2, 5, 6, 7) if share % parts == 0), 1)
        return share // accumulation, accumulation
    if share % micro_batch:
        near = next(size for size in range(min(micro_batch, share), 0, -1) if share % size == 0)
        raise InvalidInputError(
            f"an effective batch of {effective_batch} on {counted(ranks, 'rank')} is no whole number of micro-batches "
            f"of {micro_batch}.",
            remedy=f"micro_batch={near}",
        )
    return micro_batch, share // micro_batch


# Steps in a row whose loss is not a number.
_DIVERGED = 5


def measure_noise(
    workload: Workload,
    *,
    effective_batch: int,
    steps: int = 200,
    micro_batch: int | None = None,
    on: str | None = None,
    shape: Mapping[str, Any] | None = None,
    every: int = 1,
    clip_norm: float | None = None,
    unit: str | None = None,
    times: Any = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> NoiseRun:
    """Train for some steps at an effective batch, and measure the critical one.

    >>> import torch
    >>> from batchwright.workload import Workload
    >>> workload = Workload(
    ...     model=lambda: torch.nn.Linear(8, 1),
    ...     batch=lambda n: torch.randn(n, 8),
    ...     loss=lambda model, batch: (model(batch) - batch.sum(1, keepdim=True)).pow(2).mean(),
    ...     optimizer=lambda params: torch.optim.SGD(params, lr=1e-3),
    ... )
    >>> run = measure_noise(workload, effective_batch=32, steps=40)
    >>> run.micro_batch, run.accumulation, run.critical_batch.observations, run.critical_batch.resolved
    (8, 4, 20, True)
    """
    whole_number(effective_batch, "effective batch")
    steps = whole_number(steps, "steps")
    device = open_device(on).torch_device
    with training(workload, device=device, shape=shape, seed=seed) as trained:
        size, accumulation = split_of(effective_batch, micro_batch, trained.ranks)
        assert workload.loss is not None, "training() has refused a workload without one"
        accumulator = Accumulator(
            trained.model,
            list(trained.optimizers),
            accumulation,
            clip_norm=clip_norm,
            scaler=build_scaler(workload),
        )
        noise = NoiseScale(
            accumulator,
            every=every,
            window=None,
            unit=unit or (None if workload.units is None else "units"),
            population=None if workload.data is None else len(workload.data),
        )
        split_in_words = f"an effective batch of {effective_batch}, as {size}x{accumulation},"
        with closing(noise), needing_larger_micro_batches(split_in_words):
            done: list[Step] = []
            seconds: list[float] = []
            batches = itertools.islice(trained.batches(size, accumulation), steps * accumulation)
            start = reported = time.monotonic()
            num_bad = 0
            for batch in accumulator.micro_batches(SizedBatches(batches, size), weight=workload.units):
                loss = checked_loss(workload.loss(trained.model, batch))
                is_bad = not bool(torch.isfinite(loss.detach()).all())
                num_bad = num_bad + 1 if is_bad else 0
                # What counts nothing still keeps ranks in step.
                step = accumulator.backward(loss, weight=0) if is_bad else accumulator.backward(loss)
                if num_bad >= _DIVERGED * accumulation and trained.ranks == 1:
                    first = accumulator.number - _DIVERGED + 1
                    noise.notes.append(f"the loss is {loss.item()} from step {max(first, 1)} on: training ended there")
                    break
                if step is None or step.skipped:
                    continue
                if not done:
                    noise.average_over(max(steps // 2, 1) * step.units / every)
                done.append(step)
                now = time.monotonic()
                seconds.append(now - start)
                start = now
                if now - reported > 2 or len(done) == steps:
                    reported = now
                    progress(
                        f"step {len(done):,} of {steps:,}, loss {step.loss:.4g}, critical batch {noise.critical_batch}"
                    )
        split = (size, accumulation, trained.ranks)
        return _judge_run(workload, noise, done, seconds, split, trained.optimizers, times, on=str(device))


def _judge_run(
    workload: Workload,
    noise: NoiseScale,
    done: Sequence[Step],
    seconds: Sequence[float],
    split: tuple[int, int, int],
    optimizers: Sequence[Any],
    times: Any,
    *,
    on: str,
) -> NoiseRun:
    critical = noise.critical_batch
    if critical is None:
        reasons = [f"{counted(number, 'step')}: {reason}" for reason, number in noise.skipped.items()]
        raise BatchwrightError(
            f"{counted(len(done), 'step')} gave no observation of the noise.", details=[*reasons, *noise.notes]
        )
    micro_batch, accumulation, ranks = split
    effective_batch = micro_batch * accumulation * ranks
    samples = critical.in_samples()
    group = optimizers[0].param_groups[0]
    best, notes = None, [*noise.notes, *current_keep().notes]
    if times is not None:
        try:
            best = best_batch(samples or critical, times, devices=ranks)
        except InvalidInputError as error:
            notes.append(f"no batch can be named as the soonest: {error.problem.rstrip('.')}")
    verdict = judge(
        samples or critical,
        # If the samples of a unit were not counted, both are in units.
        effective_batch if samples else sum(step.units for step in done) / len(done),
        optimizer=type(optimizers[0]).__name__,
        # A schedule may stand at 0 in the end.
        learning_rate=float(group.get("lr", 0.0)) or None,
        betas=group.get("betas"),
        weight_decay=group.get("weight_decay"),
        devices=ranks,
    )
    return NoiseRun(
        name=workload.name,
        critical_batch=critical,
        effective_batch=effective_batch,
        micro_batch=micro_batch,
        accumulation=accumulation,
        ranks=ranks,
        on=on,
        steps=len(done),
        history=_trend(noise, done, effective_batch, critical),
        course=_with_losses(noise.stretches, done),
        verdict=verdict,
        by_group=noise.by_group,
        seconds_per_step=statistics.median(seconds),
        gamma=gamma_of(noise.history),
        best=best,
        skipped=noise.skipped,
        notes=tuple(notes),
    )


def _with_losses(stretches: Sequence[Stretch], done: Sequence[Step]) -> tuple[Stretch, ...]:
    befores = [0, *(stretch.step for stretch in stretches)]
    return tuple(
        replace(
            stretch, loss=statistics.fmean([s.loss for s in done if before < s.number <= stretch.step] or [math.nan])
        )
        for before, stretch in zip(befores, stretches, strict=False)
    )


def _trend(
    noise: NoiseScale, done: Sequence[Step], effective_batch: int, last: CriticalBatch
) -> tuple[TrendPoint, ...]:
    estimates = [(point.step, point.critical_batch) for point in noise.history]
    if not estimates or estimates[-1][0] < done[-1].number:
        estimates.append((done[-1].number, last))
    points, before = [], 0
    for number, critical in estimates:
        losses = [step.loss for step in done if before < step.number <= number]
        before = number
        mean = sum(losses) / len(losses) if losses else float("nan")
        points.append(TrendPoint(number, number * effective_batch, mean, critical))
    return tuple(points)
