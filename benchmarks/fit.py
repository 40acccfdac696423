"""Finders of the largest micro-batch side by side: limits that merely raise, real byte budgets, state, ranks.

    pip install --no-deps toma==1.1.0 batch-finder==0.6.0   # the two peers that `make test` does not bring
    python benchmarks/fit.py all --json FILE            everything; half an hour on two idle cores
    python benchmarks/fit.py sweep                      limits that merely raise, seconds
    python benchmarks/fit.py state                      what finders leave behind (benchmarks/fit_state.py)
    python benchmarks/fit.py ranks                      2 and 4 ranks (benchmarks/fit_ranks.py)
    python benchmarks/fit.py budgets --without-caches   no buffers of MKL and oneDNN kept from one size to the next
    python benchmarks/fit.py budgets --cells mlp:200 lstm:400 --finders toma batchwright

Sweep. A step that raises torch.OutOfMemoryError above a limit and otherwise counts. Samples are the sum of the sizes of
all calls, those that raise included. Exact means the limit itself, and no answer at all at limit 0.

Budgets. Each finder on each cell is one fresh process with its allocator's thresholds pinned: imports, model and
optimizer built, soft RLIMIT_DATA = what is held then + the budget, then the clock and the finder on the bare training
step. The truth is a bisection with one fresh process per size, five steps each (benchmarks/fit_cells.py); it starts
from our answer, which shortens the way and changes nothing. Afterwards five further steps at the answer, in the same
process under the same limit. `changed` is found by hashes from before and after. An answer above the truth counts as
near it only if these steps succeed. A peer is stopped after 60 s of CPU time. Our finder comes twice: on live objects
in the same process, and on a target, where each probe is a fresh child. The time of the latter is that of the process
that asks, without its waiting for children, plus the seconds each trial states, which begin where the child has
imported torch and the target; its five steps run in a fresh process too. All cells of ours come first, then the peers.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fit_ranks
import fit_state
import torch
from fit_cells import CELLS, Cell, Truth, find_truth
from fit_child import CPU_SECONDS, OURS_LIVE, OURS_TARGET, first_line, has_ours, ours_on_step
from fit_peers import PEERS, Task, quiet
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LIMITS = (0, 1, 3, 37, 100, 1000, 5000, 100_000)
# However busy the machine is, a process of ours ends at some time.
TIME_OUT_SECONDS = 600.0
NEAR_ENOUGH = 0.95
CHILD = Path(__file__).resolve().with_name("fit_child.py")
# The thresholds keep glibc from holding on to freed blocks, so that a limit means the same at the end as at the start.
# Threads that spin while they wait would count as CPU time.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "OMP_NUM_THREADS": "2",
    "OMP_WAIT_POLICY": "PASSIVE",
}
# What a process can hold depends on the sizes it has tried: MKL keeps its buffers (23 MiB for the MLP, 128 to 1024
# samples) and oneDNN its primitives. These settings take that away, from the truth as well.
WITHOUT_CACHES = {"MKL_DISABLE_FAST_MM": "1", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0"}


# --- limits that merely raise


class Raising:
    """A step that runs out of memory above a limit and counts how often and how large it was called."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.calls: list[int] = []

    def __call__(self, n: int) -> None:
        """Count, then raise or not."""
        self.calls.append(n)
        if n > self._limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    def loss(self, model: nn.Module, n: int) -> torch.Tensor:
        """Do the same where a finder wants a loss."""
        self(n)
        total: torch.Tensor = model(torch.ones(1, 1)).sum()
        return total


@dataclass(frozen=True)
class SweepRow:
    """One finder at one limit."""

    finder: str
    limit: int
    answer: int | None
    ending: str
    calls: int
    out_of_memory: int
    samples: int
    is_executed: bool
    """Whether the answer was among the sizes that ran."""

    @property
    def is_exact(self) -> bool:
        """The limit itself; at limit 0, no size at all."""
        return self.answer == (self.limit or None)


def sweep_once(name: str, limit: int, find: Callable[[Task], int | None]) -> SweepRow:
    raising, model = Raising(limit), nn.Linear(1, 1)
    task = Task(
        step=raising,
        model=model,
        batch=lambda n: n,
        loss=raising.loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        large=131_072,
        steps_per_call=1,
    )
    answer, ending = None, "no answer"
    try:
        with quiet():
            answer = find(task)
        ending = "no answer" if answer is None else str(answer)
    except Exception as error:  # how it ends is the result
        ending = first_line(error)
    calls = raising.calls
    return SweepRow(
        finder=name,
        limit=limit,
        answer=answer,
        ending=ending,
        calls=len(calls),
        out_of_memory=sum(n > limit for n in calls),
        samples=sum(calls),
        is_executed=answer is not None and answer <= limit and answer in calls,
    )


def sweep(chosen: Callable[[str], bool], with_ours: bool) -> list[SweepRow]:
    finders: dict[str, Callable[[Task], int | None]] = {p.name: p.find for p in PEERS if p.in_sweep}
    if with_ours:
        finders["batchwright"] = lambda task: ours_on_step(task.step)
    for peer in PEERS:
        import_module(peer.module)
    # All peers collect garbage at every try; no time is taken here, so spare them the modules.
    gc.freeze()
    return [sweep_once(name, n, find) for name, find in finders.items() if chosen(name) for n in LIMITS]


def print_sweep(rows: Sequence[SweepRow]) -> None:
    print("Limit sweep: the answer, and calls/out-of-memory/samples. * right, ! an answer that was never run")
    names = list(dict.fromkeys(row.finder for row in rows))
    table = [["finder", *(f"limit {limit}" for limit in LIMITS[1:]), "samples", "exact"]]
    for name in names:
        own = [row for row in rows if row.finder == name]
        exact = sum(row.is_exact for row in own)
        cells = [_sweep_cell(row) for row in own if row.limit]
        table.append([name, *cells, f"{sum(row.samples for row in own):,}", f"{exact} of {len(own)}"])
    print_table(table)
    print("\nAt limit 0:")
    for row in rows:
        if row.limit == 0:
            verdict = "right" if row.is_exact else "WRONG: answers"
            print(f"  {row.finder}: {verdict} {row.ending} ({row.calls} calls)")
    exact_everywhere = {n: sum(r.samples for r in rows if r.finder == n) for n in names if _all_exact(rows, n)}
    print("\nExact on the whole sweep, with the samples processed in sum:")
    for name, samples in sorted(exact_everywhere.items(), key=lambda item: item[1]):
        print(f"  {name}: {samples:,}")
    if not exact_everywhere:
        print("  none")


def _sweep_cell(row: SweepRow) -> str:
    mark = ("*" if row.is_exact else "") + ("" if row.is_executed or row.answer is None else "!")
    answer = "-" if row.answer is None else str(row.answer)
    return f"{answer}{mark} {row.calls}/{row.out_of_memory}/{row.samples}"


def _all_exact(rows: Sequence[SweepRow], name: str) -> bool:
    return all(row.is_exact for row in rows if row.finder == name)


# --- real byte budgets


@dataclass(frozen=True)
class BudgetRow:
    """One finder on one cell."""

    finder: str
    cell: str
    truth: int
    answer: int | None = None
    error: str | None = None
    wall_seconds: float | None = None
    cpu_seconds: float | None = None
    further_steps: str | None = None
    changed: list[str] | None = None
    trials: list[tuple[int, str, float]] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """The answer as a part of the truth."""
        return (self.answer or 0) / self.truth

    @property
    def is_near(self) -> bool:
        """Close to the truth; an answer above it must have trained."""
        return self.ratio >= NEAR_ENOUGH and (self.ratio <= 1 or self.further_steps == "fits")


def run_child(*arguments: str) -> dict[str, Any]:
    """Run one fresh process and return what it said, with how it ended if that was no ordinary end."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result")
        command = [sys.executable, str(CHILD), str(result), *arguments]
        learnt: dict[str, Any] = {}
        ending = None
        try:
            done = subprocess.run(
                command,
                env=os.environ | ENVIRONMENT,
                capture_output=True,
                timeout=TIME_OUT_SECONDS,
                text=True,
                start_new_session=True,
            )
            if done.returncode == -signal.SIGXCPU:
                ending = f"stopped after {CPU_SECONDS} s of CPU time"
            elif done.returncode:
                ending = f"exit code {done.returncode}: {(done.stderr.strip() or '-').splitlines()[-1][:100]}"
        except subprocess.TimeoutExpired:
            ending = f"stopped after {TIME_OUT_SECONDS:.0f} s"
        with contextlib.suppress(FileNotFoundError):
            for line in result.read_text().splitlines():
                learnt.update(json.loads(line))
    if ending:
        # The answer may have come before the process died of the five steps after it.
        learnt.setdefault("further_steps" if "answer" in learnt else "error", ending)
    return learnt


def measure_truth(cell: Cell) -> Truth:
    def fits(sizes: Sequence[int]) -> list[bool]:
        # Two at a time: no time is taken here, and half of each process is importing.
        with ThreadPoolExecutor(2) as pool:
            told = list(pool.map(lambda n: run_child("truth", cell.model, str(cell.budget_mib), str(n)), sizes))
        for size, learnt in zip(sizes, told, strict=True):
            if learnt.get("verdict") not in ("fits", "out of memory"):
                print(f"  {cell.name} at {size}: {learnt}", file=sys.stderr)
        return [learnt.get("verdict") == "fits" for learnt in told]

    return find_truth(fits, near=cell.near)


def read_truths(path: str | None) -> dict[str, Truth]:
    """Return the truths that an earlier run wrote."""
    lines = Path(path).read_text().splitlines() if path else []
    told = [known for known in map(json.loads, lines) if known.pop("kind") == "truth"]
    return {known.pop("cell"): Truth(**known) for known in told}


def run_budget(finder: str, cell: Cell, truth: Truth | None = None) -> BudgetRow:
    learnt = run_child("finder", cell.model, str(cell.budget_mib), finder)
    if finder == OURS_TARGET and learnt.get("answer"):
        told = run_child("truth", cell.model, str(cell.budget_mib), str(learnt["answer"]))
        learnt["further_steps"] = told.get("verdict", "died")
    return BudgetRow(finder=finder, cell=cell.name, truth=truth.size if truth else 0, **learnt)


def budgets(
    cells: Sequence[Cell],
    finders: Sequence[str],
    note: Callable[[str, dict[str, Any]], None],
    *,
    until: float,
    truths: dict[str, Truth],
) -> list[BudgetRow]:
    """Run our finder and the truth on every cell, then the peers, small budgets first, as far as time allows."""
    own, peers = (
        [name for name in finders if (name in (OURS_LIVE, OURS_TARGET)) == is_ours] for is_ours in (True, False)
    )
    rows: list[BudgetRow] = []
    for cell in cells:
        found = [run_budget(finder, cell) for finder in own]
        near = next((row.answer for row in found if row.finder == OURS_TARGET and row.answer), cell.near)
        if cell.name not in truths:
            truths[cell.name] = measure_truth(replace(cell, near=near))
        truth = truths[cell.name]
        note("truth", {"cell": cell.name, **asdict(truth)})
        print(
            f"{cell.name} MiB: truth {truth.size}, fits {truth.again} of {truth.again} times, the next size"
            f" {truth.next_fitted}; largest that ever did {truth.ever}; {truth.processes} processes"
        )
        found = [replace(row, truth=truth.size) for row in found]
        if found:
            _show(found, note)
        rows += found
    for cell in sorted(cells, key=lambda cell: cell.budget_mib):
        if peers and time.perf_counter() > until:
            print(f"{cell.name} MiB: no time left for the peers")
            continue
        if peers:
            print(f"{cell.name} MiB, peers: truth {truths[cell.name].size}", flush=True)
            found = [run_budget(finder, cell, truths[cell.name]) for finder in peers]
            _show(found, note)
            rows += found
    return rows


def _show(rows: Sequence[BudgetRow], note: Callable[[str, dict[str, Any]], None]) -> None:
    table = [["finder", "answer", "/truth", "s", "CPU s", "5 further steps", "changed"]]
    print_table(table + [_budget_line(row) for row in rows], indent="  ")
    print(flush=True)
    for row in rows:
        note("budget", asdict(row) | {"ratio": row.ratio})


def _budget_line(row: BudgetRow) -> list[str]:
    answer = row.error or ("no answer" if row.answer is None else str(row.answer))
    changed = "?" if row.changed is None else ", ".join(row.changed) or "nothing"
    trials = f" ({len(row.trials)} trials)" if row.trials else ""
    seconds = ["-" if s is None else f"{s:.1f}" for s in (row.wall_seconds, row.cpu_seconds)]
    return [row.finder + trials, answer[:60], f"{row.ratio:.3f}", *seconds, row.further_steps or "-", changed]


def _cpu_seconds(row: BudgetRow) -> float:
    """CPU seconds; those of our children are not known without their imports, so wall seconds stand in."""
    return row.cpu_seconds or row.wall_seconds or CPU_SECONDS


def print_summary(rows: Sequence[BudgetRow]) -> None:
    names = list(dict.fromkeys(row.finder for row in rows))
    table = [["finder", "worst", "best", f">= {NEAR_ENOUGH}", "above truth", "no answer", "steps ok", "s", "CPU s"]]
    reaching: dict[str, tuple[float, float]] = {}
    for name in names:
        own = [row for row in rows if row.finder == name]
        near = [row for row in own if row.is_near]
        total = sum(row.wall_seconds or CPU_SECONDS for row in own), sum(map(_cpu_seconds, own))
        if len(near) == len(own):
            reaching[name] = total
        table.append(
            [
                name,
                f"{min(row.ratio for row in own):.3f}",
                f"{max(row.ratio for row in own):.3f}",
                f"{len(near)} of {len(own)}",
                str(sum(row.ratio > 1 for row in own)),
                str(sum(row.answer is None for row in own)),
                f"{sum(row.further_steps == 'fits' for row in own)} of {len(own)}",
                *(f"{seconds:.1f}" for seconds in total),
            ]
        )
    print("All cells:")
    print_table(table)
    peers = {name: total for name, total in reaching.items() if name not in (OURS_LIVE, OURS_TARGET)}
    if len(table) <= 3:
        print("\nNo peer has run.")
        return
    print(f"\nPeers that reach {NEAR_ENOUGH} on every cell: {', '.join(peers) or 'none does'}.")
    if not peers:
        return
    fastest, by_cpu = min(peers, key=lambda n: peers[n][0]), min(peers, key=lambda n: peers[n][1])
    print(f"The fastest of them: {fastest}, {peers[fastest][0]:.1f} s; by CPU time {by_cpu}, {peers[by_cpu][1]:.1f} s.")
    for name in (OURS_LIVE, OURS_TARGET):
        if name in reaching:
            wall, cpu = reaching[name]
            print(f"{name}: {wall / peers[fastest][0]:.2f} of its time, {cpu / peers[by_cpu][1]:.2f} of its CPU time.")


# --- the command


def print_table(table: Sequence[Sequence[str]], indent: str = "") -> None:
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        print(indent + "  ".join(cells).rstrip())


def _names_of_budgets(parts: Sequence[str] | None, with_ours: bool) -> list[str]:
    if parts is None:
        peers = [p.name for p in PEERS if p.in_budgets]
    else:
        peers = [p.name for p in PEERS if any(part in p.name for part in parts)]
    ours = (OURS_LIVE, OURS_TARGET) if with_ours else ()
    return peers + [name for name in ours if parts is None or any(part in name for part in parts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["all", "sweep", "budgets", "state", "ranks"], default="all")
    parser.add_argument("--cells", nargs="+", metavar="MODEL:MIB", help="only these cells, or all of a MODEL")
    parser.add_argument(
        "--finders",
        nargs="+",
        metavar="NAME",
        help="only the finders with one of these in their name; budgets: all of these, the slow ones too",
    )
    parser.add_argument("--without-ours", action="store_true", help="the peers alone")
    parser.add_argument(
        "--without-caches", action="store_true", help="let MKL and oneDNN keep nothing of earlier sizes"
    )
    parser.add_argument(
        "--minutes", type=float, default=25.0, help="start no further cell of the peers after so many minutes"
    )
    parser.add_argument("--truths", metavar="FILE", help="take the truths from what an earlier run wrote with --json")
    parser.add_argument("--json", metavar="FILE", help="append every row to a file as well, as a line of JSON")
    chosen = parser.parse_args()
    with_ours = not chosen.without_ours
    if chosen.without_caches:
        ENVIRONMENT.update(WITHOUT_CACHES)
    if with_ours and not has_ours():
        parser.error("batchwright has no fit yet; --without-ours runs the peers alone")

    def is_chosen(name: str) -> bool:
        return not chosen.finders or any(part in name for part in chosen.finders)

    cells = [c for c in CELLS if not chosen.cells or c.name in chosen.cells or c.model in chosen.cells]
    start = time.perf_counter()

    def note(kind: str, row: dict[str, Any]) -> None:
        # At once, so that nothing is lost when the rest does not come.
        if chosen.json:
            with open(chosen.json, "a") as lines:
                lines.write(json.dumps({"kind": kind, **row}) + "\n")

    if chosen.json:
        Path(chosen.json).write_text("")
    if chosen.part in ("all", "sweep"):
        swept = sweep(is_chosen, with_ours)
        print_sweep(swept)
        for row in swept:
            note("sweep", asdict(row) | {"exact": row.is_exact})
        print()
    if chosen.part in ("all", "budgets"):
        until = start + 60 * chosen.minutes
        finders = _names_of_budgets(chosen.finders, with_ours)
        rows = budgets(cells, finders, note, until=until, truths=read_truths(chosen.truths))
        if rows:
            print_summary(rows)
    if chosen.part in ("all", "state"):
        states = []
        for state in chain(fit_state.run_ours() if with_ours else (), fit_state.run_peers(is_chosen)):
            note("state", asdict(state))
            states.append(state)
        print_table(fit_state.table_of(states))
    if chosen.part in ("all", "ranks") and with_ours:
        print_table(fit_ranks.table_of(fit_ranks.run(lambda row: note("ranks", asdict(row)))))
    print(f"\n{time.perf_counter() - start:.0f} s in all, load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
