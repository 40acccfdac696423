"""The critical batch for a simulated card: noise belongs to weights and data, so the CPU of this machine tells it.

The workload is trained here at a small micro-batch, for as many steps as fit into a few minutes; a program of the
user's own is run here as it is typed. A run of the same workload that was measured before is taken as it is.

Promises:
- what would take longer than the minutes, or more memory than is free, is not begun (of a program: whose weights and
  optimizer alone take more); the answer says how long it would take, and how to have the number otherwise;
- what was done is in the section: where, how many steps, in how long.
"""

from __future__ import annotations

import datetime
import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from batchwright.device.device import open_device
from batchwright.device.step import StepSettings
from batchwright.errors import BatchwrightError, InvalidInputError
from batchwright.memory.breakdown import break_down
from batchwright.noise.noise_run import fitting_split, measure_noise
from batchwright.scripts.noise_script import measure_noise_of_script
from batchwright.scripts.script import Script
from batchwright.trace.run import trace_workload
from batchwright.tuning.run_file import is_done, read_run_to_resume
from batchwright.tuning.stages import measure_throughput
from batchwright.units import counted, format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchwright.tuning.run_file import Measured, Run, Section
    from batchwright.tuning.tune import TuneRequest
    from batchwright.workload import Workload

    Say = Callable[[str], None]

_SECONDS = 180.0
_MOST_SOURCES = 5_000
# The usual batch, and one for models whose steps are long here; at fewer steps no interval has an end.
_BATCHES, _FEWEST_STEPS = (64, 16), 40
_OTHERWISE = "hand it in: critical_batch= in Python, or --run-file with a run of tune that measured it elsewhere"
# What has to be the same for a critical batch to be that of another run.
_SAME = ("name", "num_parameters", "num_trained", "samples", "optimizer", "learning_rate", "shape", "script", "seed")


def measure_here(work: Workload | Script, measured: Measured, request: TuneRequest, say: Say) -> Section:
    """Train on the CPU for at most a few minutes; the section is that of `noise`, or says why there is none."""
    start = time.monotonic()
    run = _run_program(work, measured, request, say) if isinstance(work, Script) else _train(work, request, say)
    if "skipped" in run and isinstance(run["skipped"], str):
        return run
    took = format_seconds(time.monotonic() - start)
    steps = f"{counted(run['steps'], 'step')} of {counted(run['effective_batch'], 'sample')}"
    return {**run, "how": f"the critical batch was measured on this machine's CPU: {steps}, {took} in all"}


def _train(work: Workload, request: TuneRequest, say: Say) -> Section:
    batches: tuple[int, ...] = _BATCHES if request.noise_batch is None else (request.noise_batch,)
    if work.data is not None and request.noise_batch is not None and request.noise_batch > len(work.data):
        raise InvalidInputError(
            f"a step of {request.noise_batch:,} samples was asked for, and data= holds {len(work.data):,}."
        )
    if work.data is not None:
        batches = tuple(batch for batch in batches if batch <= len(work.data)) or (max(len(work.data), 1),)
    needed = ""
    for batch in batches:
        micro_batch, accumulation = fitting_split(batch, None)
        say(f"tracing micro-batch {micro_batch:,} on the CPU, to see whether it can train here")
        reason, least = _reason_not_to_begin(work, micro_batch, request)
        if reason:
            needed = reason
            continue
        seconds, about = least * accumulation, "at least"
        if seconds * _FEWEST_STEPS <= _SECONDS:
            timed = measure_throughput(
                work, [micro_batch], on="cpu", shape=request.shape or None, repeats=2, seconds=0.0, progress=say
            )
            seconds, about = timed.rows[0].seconds * accumulation, "about"
        steps = min(request.steps, int(_SECONDS / max(seconds, 1e-6)))
        if steps >= min(_FEWEST_STEPS, request.steps):
            say(f"training {steps:,} steps of {batch:,} samples on the CPU, about {format_seconds(steps * seconds)}")
            return measure_noise(
                work,
                effective_batch=batch,
                micro_batch=micro_batch,
                steps=steps,
                on="cpu",
                shape=request.shape or None,
                seed=request.seed,
                progress=say,
            ).to_dict()
        needed = (
            f"{_FEWEST_STEPS} steps of {batch} samples would take {about} {format_seconds(_FEWEST_STEPS * seconds)} on "
            f"this machine's CPU, and at most {format_seconds(_SECONDS)} are taken: batchwright noise TARGET --on cpu "
            f"--effective-batch {batch} takes that time"
        )
    return {"skipped": f"{needed}; or {_OTHERWISE}"}


def _reason_not_to_begin(work: Workload, micro_batch: int, request: TuneRequest) -> tuple[str, float]:
    """Return why a step cannot be tried here, and the least seconds of a micro-batch."""
    traced = trace_workload(work, micro_batch, StepSettings(request.shape))
    peak, free = break_down(traced.log).peak_bytes, open_device("cpu").free_bytes
    if free is not None and peak > free:
        needs = f"micro-batch {micro_batch:,} takes {format_bytes(peak)}"
        return f"{needs} of this machine's memory, and {format_bytes(free)} are free", 0.0
    flops = 0 if traced.work is None else traced.work.flops
    return "", flops / _rate_of_products()


def _rate_of_products(size: int = 512) -> float:
    """FLOPs per second of a large product on this machine, with the threads that torch has here."""
    a = torch.ones(size, size)
    best = 0.0
    for _ in range(3):
        start = time.perf_counter()
        a @ a
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


def _run_program(script: Script, measured: Measured, request: TuneRequest, say: Say) -> Section:
    """Run the program on the CPU for as many steps as there is time for."""
    held = 0 if measured.estimate is None else measured.estimate.fixed_bytes
    free = open_device("cpu").free_bytes
    if free is not None and held > free:
        needs = f"its weights, gradients and optimizer take {format_bytes(held)}"
        return {"skipped": f"{needs}, and {format_bytes(free)} of this machine's memory are free; {_OTHERWISE}"}
    bounded = replace(script, seconds=min(script.seconds, _SECONDS))
    batch = request.noise_batch or _BATCHES[0]
    micro_batch, accumulation = fitting_split(batch, None) if script.sets_accumulation else (batch, 1)
    try:
        return measure_noise_of_script(
            bounded,
            steps=request.steps,
            micro_batch=micro_batch if script.sets_micro_batch else None,
            accumulation=accumulation if script.sets_accumulation else None,
            on="cpu",
            shape=request.shape,
            progress=say,
        ).to_dict()
    except BatchwrightError as error:
        first = getattr(error, "problem", "") or str(error).strip().splitlines()[-1]
        return {"skipped": f"the program gave no critical batch on this machine's CPU ({first}); {_OTHERWISE}"}


def take_from(file: Path, about: Section, request: TuneRequest, say: Say) -> dict[str, Section]:
    """Return noise and branches of an earlier run of the same workload; nothing where there is none."""
    try:
        before: Run = read_run_to_resume(file)[0]
    except BatchwrightError:
        return {}
    known: dict[str, Any] = before["workload"]
    is_same = all(known.get(name) == about.get(name) for name in _SAME) and (known.get("steps") or 0) >= request.steps
    is_at_batch = request.noise_batch in (None, before["noise"].get("effective_batch"))
    if not is_same or not is_at_batch or _has_changed_since(before):
        return {}
    taken = {name: before[name] for name in ("noise", "branches") if is_done(before[name])}
    if "noise" in taken:
        how = f"the critical batch is that of the run of {before['created']} in {file.name}"
        taken["noise"] = {**taken["noise"], "how": how}
        say(how)
    return taken


def _has_changed_since(run: Run) -> bool:
    """Whether what is trained may be another thing by now: its files are younger than the run, or not known."""
    about = run["workload"]
    words = [str(about.get("target") or "").partition(":")[0], *(about.get("script") or ())]
    files = [Path(word) for word in words if word.endswith(".py") and Path(word).is_file()]
    created = datetime.datetime.fromisoformat(run["created"]).timestamp()
    # What it imports lies beside it or below; of a large tree the first files stand for all.
    beside = {source for file in files for source in itertools.islice(file.parent.rglob("*.py"), _MOST_SOURCES)}
    return not files or any(source.stat().st_mtime > created for source in {*files, *beside})
