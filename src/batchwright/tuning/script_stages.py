"""The stages of a run about the user's own program: each runs it again, unmodified, and returns its section.

Promises:
- sections have the keys of a workload's, so that recommendation and report read both alike;
- what is recommended is also said as the very command line to type, if the program has options for it.
"""

from __future__ import annotations

import platform
import statistics
from typing import TYPE_CHECKING, Any

import torch

from batchwright.errors import BatchwrightError, InvalidInputError
from batchwright.noise.noise_run import fitting_split
from batchwright.planning.times import TimedPoint, fit_times
from batchwright.scripts.audit_script import audit_script
from batchwright.scripts.noise_script import measure_noise_of_script
from batchwright.scripts.probe import Probes
from batchwright.scripts.recognise import run_as_typed, with_options_of
from batchwright.tuning.stages import Throughput, TimedSize, find_fit, sizes_to_time

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from batchwright.scripts.script import Script
    from batchwright.scripts.script_run import ScriptRun
    from batchwright.tuning.run_file import Measured, Section
    from batchwright.tuning.tune import TuneRequest

    Say = Callable[[str], None]

# The first steps of a process are slower, and are not counted.
_TIMED_STEPS, _WARM_STEPS = 8, 2
_TIMED_SIZES = 4
_NOISE_BATCH = 64
_AUDITED = 8


def describe_script(script: Script, request: TuneRequest, say: Say) -> tuple[Script, Section]:
    """Run the program as it is typed; return it with the options that were recognised, and what was seen of it."""
    from batchwright import __version__

    say("running the program as it is typed, to see what it trains")
    with Probes(script, request.on) as probes:
        run = run_as_typed(probes, request.shape)
    question = request.command(script)
    script = with_options_of(run, script)
    return script, {
        "name": script.name,
        "target": None,
        "num_parameters": None,
        "num_trained": run.num_trained,
        "samples": run.num_samples,
        "optimizer": run.optimizers[0] if run.optimizers else None,
        "learning_rate": run.learning_rate,
        "batchwright": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": question,
        "script": list(script.words),
        **request.to_dict(),
    }


def predict(*_: Any) -> Section:
    """Nothing is traced: the program itself was run."""
    return {"skipped": "a program of your own is run, not traced: its peak is in what fits"}


def time_steps(script: Script, measured: Measured, request: TuneRequest, say: Say) -> Section:
    """Time optimizer steps of the program from a small micro-batch up to the largest."""
    largest = measured.micro_batch or request.limit or _NOISE_BATCH
    # A loader that drops its last batch has none that is larger than the data.
    largest = min(largest, max((measured.samples or largest) // 2, 1))
    sizes = sizes_to_time(largest)[-_TIMED_SIZES:]
    rows = []
    with Probes(script, request.on) as probes:
        for size in sizes:
            say(f"timing micro-batch {size:,}")
            command = script.at(size, accumulation=script.least_accumulation, shape=request.shape)
            rows.append(_timed(size, probes.run(command, num_windows=_TIMED_STEPS)))
    points = [TimedPoint(row.micro_batch, row.seconds, row.accumulation) for row in rows]
    notes = ("steps were timed whole: what loading takes is in them",)
    return Throughput(script.name, request.on, 1, tuple(rows), fit_times(points), notes).to_dict()


def _timed(size: int, run: ScriptRun) -> TimedSize:
    seconds = run.window_seconds[_WARM_STEPS:] or run.window_seconds[-1:]
    if not seconds:
        raise BatchwrightError(f"the program made no step that could be timed at micro-batch {size:,}.")
    low, high = (min(seconds), max(seconds)) if len(seconds) < 4 else statistics.quantiles(seconds, n=4)[::2]
    middle, accumulation = statistics.median(seconds), run.accumulation or 1
    return TimedSize(size, middle / accumulation, middle, low, high, len(seconds), accumulation)


def audit_accumulation(script: Script, measured: Measured, request: TuneRequest, say: Say) -> Section:
    """Compare the gradients of the program at one batch and at a split of it."""
    if not script.sets_accumulation:
        raise InvalidInputError(
            f"no option of {script.name} sets its accumulation.", remedy="{accumulation} in the place that does"
        )
    most = min(measured.micro_batch or _AUDITED, _AUDITED)
    size = 2 if most >= _AUDITED else 1
    accumulation = max(min(4, most // size), 2)
    return audit_script(
        script, micro_batch=size, accumulation=accumulation, shape=request.shape, on=request.on, progress=say
    ).to_dict()


def watch_noise(script: Script, measured: Measured, request: TuneRequest, say: Say) -> Section:
    """Let the program train for some steps and measure the critical batch."""
    batch = request.noise_batch or request.effective_batch or _NOISE_BATCH
    micro_batch, accumulation = fitting_split(batch, measured.micro_batch)
    return measure_noise_of_script(
        script,
        steps=request.steps,
        micro_batch=micro_batch if script.sets_micro_batch else None,
        accumulation=accumulation if script.sets_accumulation else None,
        on=request.on,
        shape=request.shape,
        progress=say,
    ).to_dict()


def begin_again(*_: Any) -> Section:
    """Branches, a race and a sweep of rates need a training that can be begun again from the same weights."""
    return {"skipped": "branches, races and sweeps of rates start from the same weights: they need a workload"}


RUNS: Mapping[str, Callable[..., Section]] = {
    "fit": find_fit,
    "estimate": predict,
    "throughput": time_steps,
    "audit": audit_accumulation,
    "noise": watch_noise,
    "branches": begin_again,
    "race": begin_again,
    "rate": begin_again,
}


def fill_in(advised: Section, script: Script, request: TuneRequest) -> None:
    """Write the command line to type into a recommendation."""
    if "skipped" in advised or not script.sets_micro_batch:
        return
    accumulation = advised["accumulation"] if script.sets_accumulation else None
    command = script.at(advised["micro_batch"], accumulation=accumulation, shape=request.shape)
    advised["command"] = str(command)
    if command.loader_sizes is not None:
        advised["notes"].append(
            f"no option of {script.name} sets its micro-batch: write DataLoader(batch_size={advised['micro_batch']}) "
            f"where it is {command.loader_sizes[0]}"
        )
    if accumulation is None and advised["accumulation"] > 1:
        advised["notes"].append(
            f"no option of {script.name} sets its accumulation: {advised['accumulation']} micro-batches per step "
            "are to be set in the program itself"
        )
