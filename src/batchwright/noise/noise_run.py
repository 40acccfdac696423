"""`measure_noise`: train a workload for some steps, and say where its batch stands beside the critical one.

Promises:
- the training is real: the workload's own data, loss and optimizer, stepped by an Accumulator;
- the answer is that of the last half of the run, and the trend shows the whole of it;
- what was left out of the measurement, and why, is in the result.
"""

from __future__ import annotations

import itertools
import statistics
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch

from batchwright.accumulate.accumulator import Accumulator
from batchwright.accumulate.read_ahead import SizedBatches
from batchwright.device.device import open_device
from batchwright.device.step import build_scaler
from batchwright.device.step_checks import checked_loss, needing_larger_micro_batches
from batchwright.errors import BatchwrightError, InvalidInputError
from batchwright.noise.best_batch import best_batch
from batchwright.noise.noise_run_result import NoiseRun, TrendPoint
from batchwright.noise.noise_scale import NoiseScale
from batchwright.noise.ramp import gamma_of
from batchwright.noise.training import split_of, training
from batchwright.noise.verdict import judge
from batchwright.state.untouched import current_keep
from batchwright.units import counted, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from batchwright.accumulate.step import Step
    from batchwright.noise.critical_batch import CriticalBatch
    from batchwright.workload import Workload

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
    device = open_device(on).torch_device  # type: ignore[attr-defined]  # a simulated card cannot train
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
        split_asked = f"an effective batch of {effective_batch}, as {size}x{accumulation},"
        with closing(noise), needing_larger_micro_batches(split_asked):
            done: list[Step] = []
            seconds: list[float] = []
            batches = itertools.islice(trained.batches(size, accumulation), steps * accumulation)
            start = said = time.monotonic()
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
                if now - said > 2 or len(done) == steps:
                    said = now
                    progress(
                        f"step {len(done):,} of {steps:,}, loss {step.loss:.4g}, critical batch {noise.critical_batch}"
                    )
        split = (size, accumulation, trained.ranks)
        return _told(workload, noise, done, seconds, split, trained.optimizers, times, on=str(device))


def _told(
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
        # Where nothing tells how many samples a unit has, both are in units.
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
        verdict=verdict,
        by_group=noise.by_group,
        seconds_per_step=statistics.median(seconds),
        gamma=gamma_of(noise.history),
        best=best,
        skipped=noise.skipped,
        notes=tuple(notes),
    )


def _trend(
    noise: NoiseScale, done: Sequence[Step], effective_batch: int, last: CriticalBatch
) -> tuple[TrendPoint, ...]:
    found = [(point.step, point.critical_batch) for point in noise.history]
    if not found or found[-1][0] < done[-1].number:
        found.append((done[-1].number, last))
    points, before = [], 0
    for number, critical in found:
        losses = [step.loss for step in done if before < step.number <= number]
        before = number
        mean = sum(losses) / len(losses) if losses else float("nan")
        points.append(TrendPoint(number, number * effective_batch, mean, critical))
    return tuple(points)
