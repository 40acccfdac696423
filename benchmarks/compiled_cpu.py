"""The memory of a compiled step, predicted without a compiler of C++, against Inductor's own run on this CPU.

    python benchmarks/compiled_cpu.py              every case; about fifteen minutes: g++ compiles each of them
    python benchmarks/compiled_cpu.py GPT-2 U-Net  the cases whose name contains one of these

Both sides run three steps. Compared is the largest sum of memory within the third: of the profiler's memory events on
one side, of the trace on the other, counted from before the model is built. The first steps of the real side hold what
compiling takes. What waits in a cycle of references for Python's collector is collected where a phase begins. Seconds
are CPU seconds of predicting. Bars: median error 0.1 %, worst 1 %. The exit code is 1 where one is missed.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import gc
import statistics
import sys
import tempfile
import time
import warnings

import torch
from compiled_cases import compiled_cases
from memory_cases import Case, hf
from torch.profiler import ProfilerActivity, profile, record_function

from batchwright.device.step import StepSettings, run_probe
from batchwright.state.untouched import thrown_away
from batchwright.trace.run import trace_workload
from batchwright.trace.storages import find_peak

STEPS = 3
_MEDIAN_BAR, _WORST_BAR = 0.1, 1.0


def predict(case: Case) -> tuple[int, tuple[str, ...]]:
    """The peak of the last step, and what was noted on the way."""
    traced = trace_workload(case.workload, case.micro_batch, steps=STEPS)
    starts = [position for phase, position in traced.log.phases if phase == "batch"]
    return find_peak(traced.log, since=starts[-1]).num_bytes, traced.notes


def really(case: Case) -> int:
    """The peak of the last step of a real run."""
    batches = 0

    def mark(phase: str) -> None:
        nonlocal batches
        batches += phase == "batch"
        gc.collect()
        if phase == "batch" and batches == STEPS:
            with record_function("the last step"):
                pass

    torch._dynamo.reset()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, thrown_away():
        torch.manual_seed(0)
        run_probe(
            case.workload, case.micro_batch, StepSettings(), device=torch.device("cpu"), steps=STEPS, on_phase=mark
        )
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    start = next(event.start_ns() for event in events if event.name() == "the last step")
    held = highest = 0
    for time_ns, _, num_bytes in sorted(
        (event.start_ns(), index, event.nbytes()) for index, event in enumerate(events) if event.name() == "[memory]"
    ):
        held += num_bytes
        highest = max(highest, held) if time_ns >= start else highest
    return highest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="run only the cases whose name contains one of these")
    names = parser.parse_args().names
    warnings.simplefilter("ignore")
    hf.logging.set_verbosity_error()
    print("| compiled model | micro-batch | predicted bytes | real bytes | error % | seconds | notes |")
    print("|---|---:|---:|---:|---:|---:|---|")
    errors = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        for case in compiled_cases():
            if names and not any(name in case.name for name in names):
                continue
            start = time.process_time()
            predicted, notes = predict(case)
            seconds = time.process_time() - start
            real = really(case)
            errors.append(100 * (predicted / real - 1))
            print(
                f"| {case.name} | {case.micro_batch} | {predicted:,} | {real:,} | {errors[-1]:+.3f} | {seconds:.1f} "
                f"| {'; '.join(notes)} |",
                flush=True,
            )
    sizes = [abs(error) for error in errors]
    median, worst = statistics.median(sizes), max(sizes)
    print(f"\n{len(errors)} models: median error {median:.4f} %, worst {worst:.3f} %")
    return int(median > _MEDIAN_BAR or worst > _WORST_BAR)


if __name__ == "__main__":
    sys.exit(main())
