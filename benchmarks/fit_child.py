"""One fresh process of benchmarks/fit.py: a finder on a cell, or the five steps of one size for the truth.

    python benchmarks/fit_child.py RESULT truth  MODEL BUDGET_MIB SIZE
    python benchmarks/fit_child.py RESULT finder MODEL BUDGET_MIB NAME

Each thing learnt is a line of JSON appended to RESULT at once, so that a process that dies later has still said it.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import random
import resource
import time
from contextlib import contextmanager
from importlib import import_module, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from fit_cells import MIB, WORKLOADS, Live, adam, data_bytes, limit_data
from fit_peers import PEERS, Task, quiet

import batchwright.device.step  # noqa: F401  # what a child of ours imports, before any clock starts
from batchwright.device.outcome import is_out_of_memory
from batchwright.memory.estimate import estimate
from batchwright.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STEPS = 5
# A peer is stopped after so much CPU time: wall time would depend on who else uses the machine.
CPU_SECONDS = 60
OURS_LIVE = "batchwright, live objects"
OURS_TARGET = "batchwright, target in children"
HERE = Path(__file__).resolve().parent


class Clock:
    """Wall and CPU time since it was made, children included."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), self.cpu_seconds()

    @staticmethod
    def cpu_seconds() -> float:
        """Return what this process and its ended children have used since their start."""
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(usage.ru_utime + usage.ru_stime for usage in used)

    def read(self) -> dict[str, float]:
        """Return what has passed."""
        return {
            "wall_seconds": time.perf_counter() - self._wall,
            "cpu_seconds": self.cpu_seconds() - self._cpu,
        }


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:100]}"


def fingerprints(live: Live) -> dict[str, str]:
    """Return a hash of each kind of state a finder could disturb."""

    def digest(tensors: Any) -> str:
        hashed = hashlib.sha256()
        for tensor in tensors:
            hashed.update(tensor.detach().contiguous().numpy().tobytes())
        return hashed.hexdigest()

    moments = [v for state in live.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    generators = repr((random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state().tolist()))
    return {
        "weights": digest(live.model.parameters()),
        "buffers": digest(live.model.buffers()),
        "optimizer": digest(moments),
        "gradients": digest(p.grad for p in live.model.parameters() if p.grad is not None),
        "rng": hashlib.sha256(generators.encode()).hexdigest(),
        "mode": repr([module.training for module in live.model.modules()]),
    }


def run_steps(live: Live, n: int) -> str:
    """Return "fits" when all steps succeed, and otherwise what stopped them."""
    try:
        for _ in range(STEPS):
            live.step(n)
    except Exception as error:  # the verdict
        return "out of memory" if is_out_of_memory(error) else first_line(error)
    return "fits"


def has_ours() -> bool:
    return util.find_spec("batchwright.fitting.fit") is not None


def import_ours() -> None:
    """Import our finder and, by tracing next to nothing, what torch imports only when it first traces."""
    import_module("batchwright.fitting.fit")
    tiny = Workload(
        model=torch.nn.Linear(1, 1),
        batch=lambda n: torch.ones(n, 1),
        loss=lambda model, batch: model(batch).mean(),
        optimizer=adam,
    )
    estimate(tiny, micro_batch=2)


def ours_on_step(step: Callable[[int], None]) -> int:
    """Our finder on a step that merely raises; at limit 0 it raises NothingFitsError."""
    found: int = _fit(step, on="cpu").micro_batch
    return found


def ours_live(live: Live, budget_bytes: int) -> dict[str, Any]:
    """Our finder on the objects of this process; it sets and lifts the limit itself."""
    workload = Workload(model=live.model, batch=live.batch, loss=live.loss, optimizer=lambda _: live.optimizer)
    return _told(_fit(workload, on="cpu", memory=live.num_bytes + budget_bytes))


def ours_target(name: str, live: Live, budget_bytes: int) -> dict[str, Any]:
    """Our finder on a target: a fresh child per probe, its limit counted from before the model is built."""
    return _told(_fit(f"{HERE / 'fit_cells.py'}:{name}", on="cpu", memory=live.num_bytes + budget_bytes))


def _fit(subject: Any, **options: Any) -> Any:
    fit = import_module("batchwright.fitting.fit").fit
    if "cache" in inspect.signature(fit).parameters:
        # Or the second run of this benchmark would remember the first.
        options["cache"] = False
    return fit(subject, **options)


def _told(found: Any) -> dict[str, Any]:
    trials = [(trial.micro_batch, str(trial.verdict), round(trial.seconds, 3)) for trial in found.trials]
    return {"answer": found.micro_batch, "trials": trials}


@contextmanager
def counted_children() -> Iterator[list[float]]:
    """Count the seconds this process waits for children of ours, from their start to their end."""
    probers = import_module("batchwright.fitting.probers")
    waited: list[float] = []
    run = probers.probe_in_child

    def timed(*arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return run(*arguments, **options)
        finally:
            waited.append(time.perf_counter() - start)

    probers.probe_in_child = timed  # type: ignore[attr-defined]
    try:
        yield waited
    finally:
        probers.probe_in_child = run  # type: ignore[attr-defined]


class Result:
    """The file that outlives the process."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.known: dict[str, Any] = {}

    def tell(self, **learnt: Any) -> None:
        """Append what was learnt."""
        self.known.update(learnt)
        with open(self._path, "a") as lines:
            lines.write(json.dumps(learnt) + "\n")


def run_truth(name: str, budget_bytes: int, size: int, result: Result) -> None:
    live = Live(WORKLOADS[name]())
    limit_data(data_bytes() + budget_bytes)
    result.tell(verdict=run_steps(live, size))


def run_finder(name: str, budget_bytes: int, finder: str, result: Result) -> None:
    peer = next((peer for peer in PEERS if peer.name == finder), None)
    if peer:
        import_module(peer.module)
    else:
        import_ours()
    workload = WORKLOADS[name]()
    live = Live(workload)
    limit_bytes = data_bytes() + budget_bytes
    before = fingerprints(live)
    waited: list[float] = []
    # After the model is built: the first optimizer of a process imports torch._dynamo, 1.6 s.
    clock = Clock()
    try:
        if peer is not None:
            assert not isinstance(workload.model, torch.nn.Module)
            limit_data(limit_bytes)
            resource.setrlimit(resource.RLIMIT_CPU, (int(Clock.cpu_seconds()) + CPU_SECONDS, resource.RLIM_INFINITY))
            with quiet():
                result.tell(answer=peer.find(Task.of(live, workload.model)))
        elif finder == OURS_LIVE:
            result.tell(**ours_live(live, budget_bytes))
        else:
            with counted_children() as waited:
                result.tell(**ours_target(name, live, budget_bytes))
    except Exception as error:  # how it ended is its row
        result.tell(error=first_line(error))
    passed = clock.read()
    if waited:
        # A child's own seconds begin where it has imported torch and the target.
        passed["wall_seconds"] += sum(trial[2] for trial in result.known.get("trials", ())) - sum(waited)
        del passed["cpu_seconds"]
    result.tell(**passed)
    resource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    after = fingerprints(live)
    result.tell(changed=[kind for kind in before if before[kind] != after[kind]])
    # The answer for a target is one for fresh processes; benchmarks/fit.py tries it in one.
    if result.known.get("answer") and finder != OURS_TARGET:
        limit_data(limit_bytes)
        result.tell(further_steps=run_steps(live, result.known["answer"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result")
    parser.add_argument("kind", choices=["truth", "finder"])
    parser.add_argument("model", choices=WORKLOADS)
    parser.add_argument("budget_mib", type=int)
    parser.add_argument("subject", help="a size for the truth, the name of a row for a finder")
    chosen = parser.parse_args()
    torch.set_num_threads(2)
    result = Result(chosen.result)
    budget_bytes = chosen.budget_mib * MIB
    if chosen.kind == "truth":
        run_truth(chosen.model, budget_bytes, int(chosen.subject), result)
    else:
        run_finder(chosen.model, budget_bytes, chosen.subject, result)


if __name__ == "__main__":
    main()
