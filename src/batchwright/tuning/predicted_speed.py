"""The throughput of a card you do not have, predicted: steps of several sizes, on one device and on more.

Promises:
- the section is that of a measured throughput, and says that it is predicted, and how far off it may be;
- a workload without `wrap` is taken to be spread as DistributedDataParallel spreads it;
- sizes between two traced ones lie on their line, or are traced;
- a program of the user's own is run on the card at two sizes; what other numbers of ranks send is known where it only
  adds gradients up;
- where there is no time, the section says why.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from batchwright.device.step import StepSettings
from batchwright.errors import BatchwrightError
from batchwright.memory.estimate import without_torchs_own_log
from batchwright.memory.on_card import card_named
from batchwright.planning.times import TimedPoint, TimeModel, fit_times
from batchwright.scripts.probe import Probes
from batchwright.scripts.script import Script
from batchwright.simulated.card import SimulatedCard
from batchwright.timing.collectives import COLLECTIVES, Network, read_network
from batchwright.timing.on_card import time_on
from batchwright.timing.step_time import NoTime, StepTime
from batchwright.trace.run import trace_workload
from batchwright.trace.work import StepWork
from batchwright.tuning.stages import Throughput, TimedSize, sizes_to_time

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from batchwright.catalogue.cards import Card
    from batchwright.tuning.run_file import Measured, Section
    from batchwright.tuning.tune import TuneRequest
    from batchwright.workload import Workload

    Say = Callable[[str], None]

_LARGEST = 64
_TAKEN_AS_REPLICAS = "; a workload without wrap= is taken to be spread by DistributedDataParallel"
# One node; beyond it what joins nodes has to be known.
_DEVICES, _WITH_NETWORK = (1, 2, 4, 8), (16, 32, 64)


def predict_throughput(work: Workload | Script, measured: Measured, request: TuneRequest, say: Say) -> Section:
    """Predict steps from a small micro-batch up to the largest that fits."""
    card = card_named(request.on, memory=request.memory)
    assert card is not None
    sizes = sizes_to_time(measured.micro_batch or request.limit or _LARGEST)
    accumulation = 1
    if isinstance(work, Script):
        steps, accumulation = _run_sizes(work, sizes, request, say)
        kinds = {entry.kind for step in steps.values() for entry in step.entries} & set(COLLECTIVES)
        is_replicated, ranks = kinds == {"all_reduce"}, ""
        if request.devices > 1 and not kinds:
            unshared = f"{work.name} sends nothing between {request.devices} devices"
            return {"skipped": f"no time is predicted: {unshared}; start it with torchrun, and with DDP or FSDP in it"}
    else:
        is_replicated = work.wrap is None
        spread = replace(work, wrap=DistributedDataParallel) if is_replicated else work
        # What replicas send does not depend on how many they are; shards do.
        traced = 2 if is_replicated else request.devices
        alone = spread if traced > 1 else replace(work, wrap=None)
        steps = _trace_sizes(alone, sizes, card, request.shape, traced, say)
        ranks = _TAKEN_AS_REPLICAS if is_replicated else ""
    network = read_network(request.network)
    others = _DEVICES if network is None else (*_DEVICES, *_WITH_NETWORK)
    counts = sorted({*others, request.devices}) if is_replicated else [request.devices]
    rows: list[TimedSize] = []
    unsure: list[str] = []
    times: dict[int, TimeModel] = {}
    for devices in counts:
        split = StepSettings({}, accumulation, devices=devices)
        predicted = [_row(card, steps[size], size, split, network) for size in sizes]
        known = [row for row, _ in predicted if isinstance(row, TimedSize)]
        if devices == request.devices:
            missing = next((row for row, _ in predicted if isinstance(row, NoTime)), None)
            if missing is not None:
                return {"skipped": f"no time is predicted: {missing.reason}"}
            rows, unsure = known, predicted[-1][1]
        if len(known) == len(sizes):
            times[devices] = _fit(known)
    throughput = Throughput(work.name, request.on, request.devices, tuple(rows), times[request.devices])
    low, high = rows[-1].low_seconds / rows[-1].seconds, rows[-1].high_seconds / rows[-1].seconds
    spoken = f"predicted: in nine of ten cases steps take {low:.2f} to {high:.2f} times as long"
    answer = throughput.to_dict()
    return {
        **answer,
        "source": "predicted",
        "times": {**answer["times"], "source": "predicted"},
        "interval": [low, high],
        "by_devices": [
            {"devices": devices, "times": {**model.to_dict(), "source": "predicted"}}
            for devices, model in times.items()
        ],
        "notes": [spoken + ranks, *unsure],
    }


def _trace_sizes(
    work: Workload, sizes: list[int], card: Card, shape: Mapping[str, Any], devices: int, say: Say
) -> dict[int, StepWork]:
    """Return the work of every size: traced at two, on their line between."""

    def trace(size: int) -> StepWork:
        say(f"tracing micro-batch {size:,} on {card.name}")
        with without_torchs_own_log():
            settings = StepSettings(shape, devices=devices)
            run = trace_workload(work, size, settings, card=SimulatedCard(card, is_roomy=True))
        return run.work or StepWork((), (), 0)  # of a pipeline, whose ranks wait for each other, there is no time

    return _on_lines(trace, sizes)


def _run_sizes(script: Script, sizes: list[int], request: TuneRequest, say: Say) -> tuple[dict[int, StepWork], int]:
    """Return the work of a program's step at every size, and its accumulation: run at two, on their line between."""
    accumulations: set[int] = set()
    with Probes(script, request.on, devices=request.devices) as probes:

        def run(size: int) -> StepWork:
            say(f"running the program at micro-batch {size:,} on {request.on}")
            seen = probes.run(script.at(size, accumulation=script.least_accumulation, shape=request.shape))
            accumulations.add(seen.accumulation or 1)
            if seen.work is None or not seen.work.entries:
                raise BatchwrightError(f"what {script.name} asks of the card was not seen.")
            return seen.work

        steps = _on_lines(run, sizes)
    return steps, max(accumulations)


def _on_lines(trace: Callable[[int], StepWork], sizes: list[int]) -> dict[int, StepWork]:
    ends = {size: trace(size) for size in {sizes[-1], sizes[len(sizes) // 2]}}
    steps = dict(ends)
    for size in sizes:
        if size not in steps:
            low, high = min(ends), max(ends)
            line = ends[low].scaled(ends[high], low, high, size) if low != high else None
            steps[size] = trace(size) if line is None else line
    return steps


def _row(
    card: Card, step: StepWork, size: int, settings: StepSettings, network: Network | None
) -> tuple[TimedSize | NoTime, list[str]]:
    """Return a size as if it were timed, and why it is unsure."""
    if settings.devices == 1:
        step = _part(step, lambda entry: entry.kind not in COLLECTIVES)
    whole = time_on(card, step, size, settings, network)
    alone = _part(step, lambda entry: entry.phase != "optimizer" and entry.kind not in COLLECTIVES)
    once = time_on(card, alone, size, settings, network)
    if not isinstance(whole, StepTime) or not isinstance(once, StepTime):
        return (whole if isinstance(whole, NoTime) else NoTime("a part of the step has no time")), []
    # An update that takes no time would leave the line through the points without its constant.
    each = min(once.seconds, whole.seconds) / settings.accumulation
    row = TimedSize(size, each, whole.seconds, whole.low, whole.high, 0, settings.accumulation)
    return row, list(whole.unsure)


def _part(step: StepWork, is_kept: Callable[[Any], bool]) -> StepWork:
    kept = [number for number, entry in enumerate(step.entries) if is_kept(entry)]
    entries, modules = tuple(step.entries[n] for n in kept), tuple(step.modules[n] for n in kept)
    return StepWork(entries, modules, step.num_views)


def _fit(rows: list[TimedSize]) -> TimeModel:
    points = [TimedPoint(row.micro_batch, row.pass_seconds) for row in rows]
    return fit_times([*points, *(TimedPoint(row.micro_batch, row.seconds, row.accumulation) for row in rows)])
