"""Measures for benchmarks/memory_cpu.py: the peak predicted, the peak for real, and what MemTracker says."""

from __future__ import annotations

import gc
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.profiler import ProfilerActivity, profile

from batchwright.device.step import StepSettings, run_probe
from batchwright.state.untouched import thrown_away, untouched
from batchwright.trace.run import FakeParts, build_skeleton, trace_workload
from batchwright.trace.storages import find_peak

if TYPE_CHECKING:
    from memory_cases import Case

CPU = torch.device("cpu")
MIB = 2**20
SEED = 0


@dataclass(frozen=True)
class Row:
    """What came out for one case."""

    name: str
    micro_batch: int
    predicted_bytes: int
    predict_seconds: float
    real_bytes: int
    run_seconds: float
    mem_tracker: str

    @property
    def error_percent(self) -> float:
        """How much the prediction is off; above zero it is too high."""
        return 100 * (self.predicted_bytes / self.real_bytes - 1)


class StepsClock:
    """An observer of a probe that takes the CPU time from the first batch to the end."""

    def __init__(self) -> None:
        self._start: float | None = None
        self.seconds = 0.0

    def phase(self, name: str) -> None:
        """Start with the first batch, when the model has been built."""
        if self._start is None and name == "batch":
            self._start = time.process_time()
        if self._start is not None:
            self.seconds = time.process_time() - self._start


def _settings(case: Case) -> StepSettings:
    return StepSettings(accumulation=case.accumulation, clip_norm=case.clip_norm)


def predict(case: Case) -> tuple[int, float]:
    start = time.process_time()
    traced = trace_workload(case.workload, case.micro_batch, _settings(case))
    num_bytes = find_peak(traced.log).num_bytes
    return num_bytes, time.process_time() - start


def run(case: Case) -> float:
    """Run the steps for real and return their CPU seconds."""
    clock = StepsClock()
    torch.manual_seed(SEED)
    with thrown_away():
        run_probe(
            case.workload,
            case.micro_batch,
            _settings(case),
            device=CPU,
            on_phase=clock.phase,
        )
    gc.collect()
    return clock.seconds


def memory_events(case: Case) -> list[int]:
    """The allocations (positive) and frees (negative) of a real run, in order."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run(case)
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    timed = sorted((e.start_ns(), i, e.nbytes()) for i, e in enumerate(events) if e.name() == "[memory]")
    return [num_bytes for _, _, num_bytes in timed]


def real_peak(case: Case) -> int:
    held = highest = 0
    for num_bytes in memory_events(case):
        held += num_bytes
        highest = max(highest, held)
    return highest


class BetweenSteps:
    """An observer that lets MemTracker forget the step before; it refuses a second one otherwise."""

    def __init__(self, tracker: MemTracker) -> None:
        self._tracker = tracker

    def phase(self, name: str) -> None:
        """Forget when a new batch comes."""
        if name == "batch":
            self._tracker.reset_mod_stats()


def mem_tracker_peak(case: Case) -> int:
    mode, tracker = FakeTensorMode(allow_non_fake_inputs=True), MemTracker()
    with untouched(case.workload, is_traced=True), ExitStack() as modes:
        skeleton, _ = build_skeleton(case.workload)
        model = FakeParts(mode, CPU).put_into_model(skeleton)
        tracker.track_external(model)
        modes.enter_context(mode)
        modes.enter_context(tracker)
        run_probe(
            case.workload,
            case.micro_batch,
            _settings(case),
            device=CPU,
            build=lambda *_: model,
            on_phase=BetweenSteps(tracker).phase,
        )
    return int(tracker.get_tracker_snapshot("peak")[CPU]["Total"])


def mem_tracker_verdict(case: Case, real_bytes: int) -> str:
    try:
        return f"{100 * (mem_tracker_peak(case) / real_bytes - 1):+.2f} %"
    except Exception as error:  # whatever it raises is its result here
        return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:60]}"


def measure(case: Case) -> Row:
    predicted, predict_seconds = predict(case)
    real = real_peak(case)
    seconds = run(case)
    return Row(case.name, case.micro_batch, predicted, predict_seconds, real, seconds, mem_tracker_verdict(case, real))


def print_head() -> None:
    print("| model | micro-batch | predicted MiB | real MiB | error % | predict s | run s | ratio | MemTracker |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---|")


def print_row(row: Row) -> None:
    cells = [
        row.name,
        str(row.micro_batch),
        f"{row.predicted_bytes / MIB:.2f}",
        f"{row.real_bytes / MIB:.2f}",
        f"{row.error_percent:+.3f}",
        f"{row.predict_seconds:.2f}",
        f"{row.run_seconds:.2f}",
        f"{row.run_seconds / row.predict_seconds:.1f}",
        row.mem_tracker,
    ]
    print("| " + " | ".join(cells) + " |", flush=True)
