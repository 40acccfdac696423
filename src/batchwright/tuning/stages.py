"""The stages of a run: each asks one part of batchwright and returns its section.

Promises:
- a stage reads what came before from the run, so that one that is taken up again needs nothing else.
"""

from __future__ import annotations

import math
import platform
from typing import TYPE_CHECKING, Any

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

    from batchwright.tuning.request import Ask
    from batchwright.tuning.run_file import Known
    from batchwright.workload import Workload

    Say = Callable[[str], None]


# At most so many sizes are timed, from a small one up to the largest: the answer may be far below what fits.
_TIMED_SIZES, _SMALL = 6, 8
_NOISE_BATCH = 64
_AUDITED = 8


def describe_workload(workload: Workload, target: str | None, ask: Ask) -> dict[str, Any]:
    """Return what the workload is."""
    with untouched(workload, is_traced=True):
        return _description(workload, target, ask)


def _description(workload: Workload, target: str | None, ask: Ask) -> dict[str, Any]:
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
        "command": None if target is None else ask.command(target),
        **ask.to_dict(),
    }


def _num_numbers(parameters: Iterable[nn.Parameter]) -> int | None:
    """Return the numbers in some parameters; None if a lazy one does not know its shape yet."""
    counted = list(parameters)
    return None if any(map(is_lazy, counted)) else sum(parameter.numel() for parameter in counted)


def find_fit(work: Workload | str, known: Known, ask: Ask, say: Say) -> dict[str, Any]:
    """Find the largest micro-batch; where nothing fits, say so and end here."""
    try:
        found = fit(
            work,
            on=ask.on,
            memory=ask.memory,
            limit=ask.limit,
            shapes=ask.shape,
            # Gradients of one micro-batch live through the forward of the next.
            accumulation=2,
            progress=say,
        )
        if found.micro_batch is not None:
            return found.to_dict()
        why = found.reason
    except NothingFitsError as error:
        why = str(error)
    say(why)
    return {"skipped": f"nothing fits: {why}", "nothing_fits": True}


def predict(work: Workload, known: Known, ask: Ask, say: Say) -> dict[str, Any]:
    """Predict the memory at the largest micro-batch that fits."""
    return estimate(
        work,
        micro_batch=known.micro_batch or 1,
        on=ask.on if ask.is_on_card else "cpu",
        shape=ask.shape or None,
        accumulation=2,
        what_if=True,
        progress=say,
    ).to_dict()


def time_steps(work: Workload, known: Known, ask: Ask, say: Say) -> dict[str, Any]:
    """Time steps from a small micro-batch up to the largest."""
    largest = known.micro_batch or ask.limit or _NOISE_BATCH
    if work.data is not None:
        largest = min(largest, max(len(work.data) // max(ask.devices, 1), 1))
    return measure_throughput(work, sizes_to_time(largest), on=ask.on, shape=ask.shape or None, progress=say).to_dict()


def sizes_to_time(largest: int) -> list[int]:
    """Return sizes at equal ratios of 2 or more.

    >>> sizes_to_time(2048), sizes_to_time(28), sizes_to_time(3), sizes_to_time(1)
    ([8, 24, 74, 223, 676, 2048], [3, 6, 13, 28], [1, 3], [1])
    """
    smallest = max(min(_SMALL, largest // _SMALL), 1)
    count = min(_TIMED_SIZES, 1 + int(math.log2(largest / smallest)))
    return [round(smallest * (largest / smallest) ** (step / max(count - 1, 1))) for step in range(count)]


def audit_accumulation(work: Workload, known: Known, ask: Ask, say: Say) -> dict[str, Any]:
    """Compare accumulated gradients with those of the big batch."""
    say("comparing the accumulated gradient with that of the big batch")
    # The big batch runs at once, beside the split.
    most = min(known.micro_batch or _AUDITED, _AUDITED if work.data is None else len(work.data))
    size = 2 if most >= _AUDITED else 1
    found = audit_workload(work, micro_batch=size, accumulation=max(min(4, most // size), 2), shape=ask.shape or None)
    return found.to_dict()


def watch_noise(work: Workload, known: Known, ask: Ask, say: Say) -> dict[str, Any]:
    """Train for some steps and measure the critical batch."""
    samples = _NOISE_BATCH if work.data is None else len(work.data)
    batch = ask.noise_batch or ask.effective_batch or min(_NOISE_BATCH, samples - samples % ask.devices) or 1
    batch = -(-batch // ask.devices) * ask.devices
    if work.data is not None and batch > len(work.data):
        raise InvalidInputError(f"a step of {batch:,} samples was asked for, and data= holds {len(work.data):,}.")
    return measure_noise(
        work,
        effective_batch=batch,
        steps=ask.steps,
        micro_batch=fitting_split(batch // ask.devices, known.micro_batch)[0],
        on=ask.on,
        shape=ask.shape or None,
        seed=ask.seed,
        progress=say,
    ).to_dict()


def train_branches(work: Workload, known: Known, ask: Ask, say: Say) -> dict[str, Any]:
    """Train short branches at several batches: how the critical batch stands to the noise scale on this task."""
    return measure_critical_batch(
        work,
        batches=ask.branch_batches,
        steps=max(ask.steps // 2, 20),
        seeds=2,
        largest=known.micro_batch,
        on=ask.on,
        shape=ask.shape or None,
        progress=say,
    ).to_dict()
