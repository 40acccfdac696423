"""The memory of one rank of several, predicted on a simulated card, against real ranks with gloo on this CPU.

    python benchmarks/memory_ranks.py               every case; about fifteen minutes
    python benchmarks/memory_ranks.py 1F1B          the cases whose name contains one of these
    python benchmarks/memory_ranks.py --ranks 4     on four ranks (default: 2)

Both sides run three steps of the same workload, from before the model is built. Compared is the largest sum of memory
on each rank: of the profiler's memory events on the real side, of the trace's log on the other. Left out of the
prediction is what only a card has: the workspaces of cuBLAS. The bar is 1 % for every rank of every case. The exit code
is 1 where one misses it.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import rank_group
import torch
import torch.distributed as dist
from rank_cases import ACCUMULATION, PIPELINES, cases_of
from torch.profiler import ProfilerActivity, profile

from batchwright.catalogue.cards import find_card
from batchwright.device.pipeline import apply_wrap
from batchwright.device.step import StepSettings, run_probe
from batchwright.simulated.card import SimulatedCard
from batchwright.state.untouched import thrown_away
from batchwright.trace.run import trace_workload
from batchwright.trace.storages import Block, find_peak

if TYPE_CHECKING:
    from batchwright.workload import Workload

STEPS, MICRO_BATCH = 3, 4
_BAR = 1.0


def really(workload: Workload, accumulation: int) -> int:
    """The peak of a real run on this rank."""
    wrap, given = workload.wrap, workload.model
    assert wrap is not None
    work = replace(workload, model=lambda: apply_wrap(wrap, given()), wrap=None)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, thrown_away():
        settings = StepSettings(accumulation=accumulation)
        run_probe(work, MICRO_BATCH, settings, device=torch.device("cpu"), steps=STEPS, on_phase=lambda _: gc.collect())
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    held = highest = 0
    for _, _, num_bytes in sorted(
        (event.start_ns(), index, event.nbytes()) for index, event in enumerate(events) if event.name() == "[memory]"
    ):
        held += num_bytes
        highest = max(highest, held)
    return highest


def work_as_rank(name: str, folder: Path) -> None:
    """Run one case on this rank, and write what it took."""
    torch.manual_seed(0)
    rank_group.register()
    dist.init_process_group("gloo" if name in PIPELINES else "counted")
    peak = really(cases_of("cpu")[name], ACCUMULATION.get(name, 1))
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(peak))
    dist.barrier()
    dist.destroy_process_group()


def measure(name: str, ranks: int) -> list[int]:
    """The peak of each real rank."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), __file__]
        subprocess.run([sys.executable, *command, "--case", name, "--folder", folder], check=True)
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]


def predict(name: str, ranks: int) -> list[int]:
    """The predicted peak of each rank; where all are alike, of the first."""
    workload = cases_of("cuda")[name]
    peaks = []
    for rank in range(ranks):
        card = SimulatedCard(find_card("a100-40gb"), is_roomy=True)
        step = StepSettings(accumulation=ACCUMULATION.get(name, 1), devices=ranks, rank=rank)
        traced = trace_workload(workload, MICRO_BATCH, step, steps=STEPS, card=card)
        peaks.append(find_peak(traced.log, _without_libraries).num_bytes)
        if not any("pipeline" in note for note in traced.notes):
            return peaks * ranks
    return peaks


def _without_libraries(block: Block) -> float:
    return 0.0 if block.operator == "cuBLAS" else 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="run only the cases whose name contains one of these")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--case")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.case:
        work_as_rank(options.case, options.folder)
        return 0
    print(f"| case, {options.ranks} ranks | predicted bytes by rank | real bytes by rank | worst error % |")
    print("|---|---|---|---:|")
    errors = []
    for name in cases_of("cuda"):
        if options.names and not any(part in name for part in options.names):
            continue
        predicted, real = predict(name, options.ranks), measure(name, options.ranks)
        error = max((100 * (ours / theirs - 1) for ours, theirs in zip(predicted, real, strict=True)), key=abs)
        errors.append(abs(error))
        spoken = (", ".join(f"{peak:,}" for peak in peaks) for peaks in (predicted, real))
        print(f"| {name} | {' | '.join(spoken)} | {error:+.3f} |", flush=True)
    print(f"\n{len(errors)} cases: worst error {max(errors):.3f} %")
    return int(max(errors) > _BAR)


if __name__ == "__main__":
    sys.exit(main())
