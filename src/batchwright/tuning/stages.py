"""The stages of a run: each asks one part of batchwright and returns its section.

Promises:
- a stage reads what came before from the run, so that one that is resumed needs nothing else.
"""

from __future__ import annotations

import math
import platform
from typing import TYPE_CHECKING

import torch
from torch.nn.parameter import is_lazy

from batchwright.auditing.audit import audit_workload
from batchwright.device.step import build_optimizers
from batchwright.errors import InvalidInputError, NothingFitsError
from batchwright.fitting.fit import fit
from batchwright.memory.estimate import estimate
from batchwright.noise.branches import measure_critical_batch
from batchwright.noise.noise_run import fitting_split, measure_noise
from batchwright.state.untouched import untouched
from batchwright.trace.fake_model import build_skeleton
from batchwright.tuning.throughput import measure_throughput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn

    from batchwright.tuning.run_file import Measured, Section
    from batchwright.tuning.tune_request import TuneRequest
    from batchwright.workload import Workload

    Say = Callable[[str], None]


# At most so many sizes are timed, from a small one up to the largest: the answer may be far below what fits.
_TIMED_SIZES, _SMALL = 6, 8
_NOISE_BATCH = 64
_AUDITED = 8


def describe_workload(workload: Workload, target: str | None, request: TuneRequest) -> Section:
    """Return what the workload is."""
    with untouched(workload, is_traced=True):
        return _describe(workload, target, request)


def _describe(workload: Workload, target: str | None, request: TuneRequest) -> Section:
    from batchwright import __version__

    model, _ = build_skeleton(workload)
    optimizers = build_optimizers(workload, model) if workload.optimizer is not None else ()
    rates = {group.get("lr") for optimizer in optimizers for group in optimizer.param_groups}
    return {
        "name": workload.name,
        "target": target,
        "num_parameters": _num_numbers(model.parameters()),
        "num_trained": _num_numbers(parameter for parameter in model.parameters() if parameter.requires_grad),
        "samples": None if workload.data is None else len(workload.data),
        "optimizer": type(optimizers[0]).__name__ if optimizers else None,
        "learning_rate": float(rates.pop()) if len(rates) == 1 and None not in rates else None,
        "batchwright": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": None if target is None else request.command(target),
        **request.to_dict(),
    }


def _num_numbers(parameters: Iterable[nn.Parameter]) -> int | None:
    """Return the numbers in some parameters; None if a lazy one does not know its shape yet."""
    counted = list(parameters)
    return None if any(map(is_lazy, counted)) else sum(parameter.numel() for parameter in counted)


def find_fit(work: Workload | str, measured: Measured, request: TuneRequest, say: Say) -> Section:
    """Find the largest micro-batch; if nothing fits, say so and end here."""
    try:
        largest = fit(
            work,
            on=request.on,
            memory=request.memory,
            limit=request.limit,
            shapes=request.shape,
            # Gradients of one micro-batch live through the forward of the next.
            accumulation=2,
            progress=say,
        )
        if largest.micro_batch is not None:
            return largest.to_dict()
        reason = largest.reason
    except NothingFitsError as error:
        reason = str(error)
    say(reason)
    return {"skipped": f"nothing fits: {reason}", "nothing_fits": True}


def predict(work: Workload, measured: Measured, request: TuneRequest, say: Say) -> Section:
    """Predict the memory at the largest micro-batch that fits."""
    return estimate(
        work,
        micro_batch=measured.micro_batch or 1,
        on=request.on if request.is_on_card else "cpu",
        shape=request.shape or None,
        accumulation=2,
        what_if=True,
        progress=say,
    ).to_dict()


def time_steps(work: Workload, measured: Measured, request: TuneRequest, say: Say) -> Section:
    """Time steps from a small micro-batch up to the largest."""
    largest = measured.micro_batch or request.limit or _NOISE_BATCH
    if work.data is not None:
        largest = min(largest, max(len(work.data) // max(request.devices, 1), 1))
    sizes = sizes_to_time(largest)
    return measure_throughput(work, sizes, on=request.on, shape=request.shape or None, progress=say).to_dict()


def sizes_to_time(largest: int) -> list[int]:
    """Return sizes at equal ratios of 2 or more.

    >>> sizes_to_time(2048), sizes_to_time(28), sizes_to_time(3), sizes_to_time(1)
    ([8, 24, 74, 223, 676, 2048], [3, 6, 13, 28], [1, 3], [1])
    """
    smallest = max(min(_SMALL, largest // _SMALL), 1)
    count = min(_TIMED_SIZES, 1 + int(math.log2(largest / smallest)))
    return [round(smallest * (largest / smallest) ** (step / max(count - 1, 1))) for step in range(count)]


def audit_accumulation(work: Workload, measured: Measured, request: TuneRequest, say: Say) -> Section:
    """Compare accumulated gradients with those of the big batch."""
    say("comparing the accumulated gradient with that of the big batch")
    # The big batch runs at once, beside the split.
    most = min(measured.micro_batch or _AUDITED, _AUDITED if work.data is None else len(work.data))
    size = 2 if most >= _AUDITED else 1
    accumulation = max(min(4, most // size), 2)
    return audit_workload(work, micro_batch=size, accumulation=accumulation, shape=request.shape or None).to_dict()


def watch_noise(work: Workload, measured: Measured, request: TuneRequest, say: Say) -> Section:
    """Train for some steps and measure the critical batch."""
    samples, devices = _NOISE_BATCH if work.data is None else len(work.data), request.devices
    batch = request.noise_batch or request.effective_batch or min(_NOISE_BATCH, samples - samples % devices) or 1
    batch = -(-batch // devices) * devices
    if work.data is not None and batch > len(work.data):
        raise InvalidInputError(f"a step of {batch:,} samples was asked for, and data= holds {len(work.data):,}.")
    return measure_noise(
        work,
        effective_batch=batch,
        steps=request.steps,
        micro_batch=fitting_split(batch // devices, measured.micro_batch)[0],
        on=request.on,
        shape=request.shape or None,
        seed=request.seed,
        progress=say,
    ).to_dict()


def train_branches(work: Workload, measured: Measured, request: TuneRequest, say: Say) -> Section:
    """Train short branches at several batches: how the critical batch stands to the noise scale on this trequest."""
    return measure_critical_batch(
        work,
        batches=request.branch_batches,
        steps=max(request.steps // 2, 20),
        seeds=2,
        largest=measured.micro_batch,
        on=request.on,
        shape=request.shape or None,
        progress=say,
    ).to_dict()
