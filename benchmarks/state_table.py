"""Nothing of the user's changes: live models x commands x faults, each judged by everything it can reach.

    python benchmarks/state_table.py                     all cells; continues where an earlier run ended
    python benchmarks/state_table.py --only scaler       cells with this in their name
    python benchmarks/state_table.py --share 0.5         a random half, always the same

A cell builds one live model in the middle of a training (state_models.py), sets a fault that fires from the first to
the fourth time on that its place is passed (state_faults.py), asks one command, and compares what state_fingerprint.py
sees before and after: every tensor, module, optimizer and object that can be reached, and the settings of the process.
`find_batch_size` runs the function for real in the end, so that its calls are judged as they begin: each probing call,
and the last one, must see the state from before.

Finished cells are lines of JSON in --file, so that a run may be ended at any time. Three counts are printed: changes,
changes that the documentation lists as out of reach, and cells whose fault fired.
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from state_models import Scene

COMMANDS = ("estimate", "estimate on a card", "fit", "audit", "noise", "critical batch", "tune", "find_batch_size")
TIME_OUT_SECONDS = 120
Cell = tuple[str, str, str]


class TookTooLongError(BaseException):
    """Passes through what catches every `Exception`."""


def asked(command: str, scene: Scene) -> Callable[[], Any]:
    """Return what asks the command of a scene's workload."""
    import batchwright as bw
    from batchwright.noise.noise_run import measure_noise

    work = scene.workload
    return {
        "estimate": lambda: bw.estimate(work, micro_batch=2, on="cpu"),
        "estimate on a card": lambda: bw.estimate(work, micro_batch=2, on="a100-40gb"),
        "fit": lambda: bw.fit(work, on="cpu", limit=3, cache=False),
        "audit": lambda: bw.audit(work, splits="2x2,1x4"),
        "noise": lambda: measure_noise(work, effective_batch=4, micro_batch=2, steps=3, on="cpu"),
        "critical batch": lambda: bw.measure_critical_batch(
            work, batches=(2, 4), steps=2, seeds=1, evaluate_samples=4, learning_rates={2: 0.01, 4: 0.01}, on="cpu"
        ),
        "tune": lambda: bw.tune(work, on="cpu", limit=2, steps=3, noise_batch=4, skip=("estimate", "throughput")),
        "find_batch_size": lambda: bw.find_batch_size(scene.train, 2, limit=2, on="cpu")(),
    }[command]


def run_cell(cell: Cell, folder: str) -> dict[str, Any]:
    """Ask one command of one model under one fault, and compare."""
    import numpy as np
    import state_faults
    import torch
    from state_fingerprint import Judge, process_fingerprint
    from state_models import MODELS

    from batchwright.errors import BatchwrightError

    name, command, fault = cell
    seed = zlib.crc32("|".join(cell).encode())
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed % 2**32)
    state_faults.set_fault(state_faults.NONE)
    scene = MODELS[name]()
    changes: list[str] = []
    judge, beyond = Judge(scene.watched, ignored=scene.beyond), Judge(scene.beyond)
    before = process_fingerprint(folder)

    def compare() -> list[str]:
        now = process_fingerprint(folder)
        found = judge.differences()
        return found + [f"{part}: {before[part]} -> {now[part]}" for part in before if now[part] != before[part]]

    is_called = command == "find_batch_size"
    if is_called:
        # While the search runs, these are its own; the other commands are judged by them.
        during = ("signal handlers", "global hooks", "collector", "exception hooks")
        before = {part: value for part, value in before.items() if part not in during}
    look = (lambda: changes.extend(compare())) if is_called else None
    state_faults.set_fault(fault, first=1 + seed % 4, at_call=look)
    ask = asked(command, scene)
    signal.signal(signal.SIGALRM, _stop)
    signal.alarm(TIME_OUT_SECONDS)
    begun, ending = time.perf_counter(), "answered"
    try:
        ask()
    except BatchwrightError as error:
        ending = f"refused: {first_line(error)}"
    except BaseException as error:
        ending = f"raised: {type(error).__name__}: {first_line(error)}"
    finally:
        signal.alarm(0)
    seconds = time.perf_counter() - begun
    fired = state_faults.times_fired()
    state_faults.set_fault(state_faults.NONE)
    if not is_called:
        changes = compare()
    return {
        "cell": cell,
        "ending": ending[:300],
        "fired": fired,
        "changes": changes[:8],
        "num_changes": len(changes),
        "beyond": len(beyond.differences()),
        "seconds": round(seconds, 2),
    }


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


def _stop(*_: object) -> None:
    raise TookTooLongError(f"stopped after {TIME_OUT_SECONDS} s")


def work_off(cells: list[Cell], file: Path) -> None:
    """Run cells in this process, and write each one's line."""
    warnings.simplefilter("ignore")
    import torch

    # The first optimizer of a process imports it, whoever makes it; it sets a variable and makes its cache folder.
    import torch._dynamo

    torch.set_num_threads(1)
    import state_models  # noqa: F401

    # A collection of all that torch's modules made takes longer than a cell.
    gc.collect()
    gc.freeze()
    # The handler is part of what must be as before.
    signal.signal(signal.SIGALRM, _stop)
    with tempfile.TemporaryDirectory() as folder, file.open("a") as lines:
        tempfile.tempdir = folder
        os.environ["TMPDIR"] = folder
        for cell in cells:
            os.chdir(folder)
            result = run_cell(cell, folder)
            lines.write(json.dumps(result) + "\n")
            lines.flush()


def all_cells(only: str, share: float) -> list[Cell]:
    from state_faults import PLACES
    from state_models import MODELS

    cells = [(model, command, fault) for model in MODELS for command in COMMANDS for fault in PLACES]
    random.Random(0).shuffle(cells)
    cells = cells[: round(share * len(cells))]
    return [cell for cell in cells if all(word in "|".join(cell) for word in only.split(","))]


def finished(file: Path) -> dict[Cell, dict[str, Any]]:
    if not file.exists():
        return {}
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    return {(row["cell"][0], row["cell"][1], row["cell"][2]): row for row in rows}


def run_all(cells: list[Cell], file: Path, workers: int) -> None:
    """Work off cells in several processes, in short lists, so that one that dies loses one cell."""
    waiting = [cell for cell in cells if cell not in finished(file)]
    running: list[tuple[subprocess.Popen[bytes], list[Cell]]] = []
    while waiting or running:
        while waiting and len(running) < workers:
            some, waiting = waiting[:60], waiting[60:]
            call = [sys.executable, __file__, "--file", str(file), "--cells", json.dumps(some)]
            running.append((subprocess.Popen(call), some))
        time.sleep(0.2)
        for entry in [entry for entry in running if entry[0].poll() is not None]:
            running.remove(entry)
            done = finished(file)
            left = [cell for cell in entry[1] if cell not in done]
            if left:
                # Whichever was the first of these ended its process.
                died = {"cell": left[0], "ending": f"the process ended with {entry[0].returncode}", "fired": 0}
                with file.open("a") as lines:
                    lines.write(json.dumps(died | {"changes": [], "num_changes": 1, "beyond": 0, "seconds": 0}) + "\n")
                waiting = left[1:] + waiting
            print(f"{len(done)} of {len(cells)} cells", file=sys.stderr, flush=True)


def print_table(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if row["num_changes"]:
            print(" | ".join(row["cell"]), f"-> {row['ending'][:150]}")
            for change in row["changes"]:
                print(f"    {change}")
    print("| command | cells | answered | refused | raised | fault fired | cells with changes | out of reach |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for command in (*COMMANDS, "all"):
        mine = [row for row in rows if command in ("all", row["cell"][1])]
        ends = collections.Counter(row["ending"].split(":")[0] for row in mine)
        print(
            f"| {command} | {len(mine):,} | {ends['answered']:,} | {ends['refused']:,} | "
            f"{len(mine) - ends['answered'] - ends['refused']:,} | {sum(row['fired'] > 0 for row in mine):,} | "
            f"{sum(row['num_changes'] > 0 for row in mine):,} | {sum(row['beyond'] > 0 for row in mine):,} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="words that a cell's name must have, comma-separated")
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--file", type=Path, default=Path(tempfile.gettempdir()) / "state_table.jsonl")
    parser.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--cells", help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.cells:
        work_off([(a, b, c) for a, b, c in json.loads(told.cells)], told.file)
        return
    if not told.resume:
        told.file.unlink(missing_ok=True)
    cells = all_cells(told.only, told.share)
    run_all(cells, told.file.resolve(), told.workers)
    done = finished(told.file)
    print_table([done[cell] for cell in cells])
    sys.exit(any(done[cell]["num_changes"] for cell in cells))


if __name__ == "__main__":
    main()
