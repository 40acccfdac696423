"""Ctrl-C at random moments: what is changed, which files and which processes are left.

    python benchmarks/interrupts.py             100 of tune, 100 of fit on a simulated card
    python benchmarks/interrupts.py --times 20

A process builds live objects in the middle of a training (the last one of state_models.py), and asks; this one sends
SIGINT after a random part of the time that asking takes. Then the former compares what state_fingerprint.py sees with
what it saw before: every object that can be reached, the settings of the process, and the files in a folder for
temporary files of its own; and looks for children. The same process then asks again.
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
import threading
import time
import warnings
from pathlib import Path
from typing import Any

COMMANDS = ("tune", "fit on a card")
MODEL = "everything at once"
WARM_UPS = 3


class Interrupt:
    """A handler that interrupts only while somebody asks: a signal that comes late must not end the comparison."""

    def __init__(self) -> None:
        self.is_armed = False
        self.num_delivered = 0

    def __call__(self, number: int, frame: Any) -> None:
        """Interrupt."""
        if self.is_armed:
            self.num_delivered += 1
            raise KeyboardInterrupt


def drive(command: str) -> None:
    """Ask again and again, as lines on stdin say; one line of JSON on stdout for each time."""
    warnings.simplefilter("ignore")
    folder = tempfile.gettempdir()
    os.chdir(folder)
    import torch
    from state_faults import NONE, set_fault
    from state_fingerprint import Judge, process_fingerprint
    from state_models import MODELS

    import batchwright as bw

    torch.set_num_threads(1)
    set_fault(NONE)
    # A collection of all that torch's modules made takes longer than the rest.
    gc.collect()
    gc.freeze()
    interrupt = Interrupt()
    signal.signal(signal.SIGINT, interrupt)
    there: set[str] = set()
    print("ready", flush=True)
    for _ in sys.stdin:
        scene = MODELS[MODEL]()
        there = there or {*os.listdir(folder)}  # torch makes a folder for its compiler when an optimizer is first built
        judge, before = Judge(scene.watched), process_fingerprint(folder)
        num_threads = threading.active_count()
        interrupt.num_delivered, interrupt.is_armed = 0, False
        print("asking", flush=True)
        begun = time.perf_counter()
        try:
            interrupt.is_armed = True
            if command == "tune":
                bw.tune(scene.workload, on="cpu", limit=3, steps=4, noise_batch=4, skip=("throughput",))
            else:
                bw.fit(scene.workload, on="a100-40gb", limit=6, cache=False)
            interrupt.is_armed = False
            ending = "swallowed" if interrupt.num_delivered else "answered"
        except KeyboardInterrupt:
            ending = "interrupted"
        except BaseException as error:
            ending = f"raised {type(error).__name__}: {error}"[:300]
        interrupt.is_armed = False
        seconds = time.perf_counter() - begun
        now = process_fingerprint(folder)
        changes = judge.differences()
        changes += [f"{part}: {before[part]} -> {now[part]}" for part in now if now[part] != before[part]]
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        result = {
            "ending": ending,
            "seconds": seconds,
            "changes": changes[:8],
            "files": sorted({*os.listdir(folder)} - there),
            "children": len(children),
            "threads": threading.active_count() - num_threads,
        }
        print(json.dumps(result), flush=True)


def interrupt_often(command: str, times: int, seed: int) -> list[dict[str, Any]]:
    """Return what was seen at each interrupt that came while somebody asked."""
    draws = random.Random(seed)
    results: list[Any] = []
    durations: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        driver = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--drive", command],
            env=os.environ | {"TMPDIR": folder, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert driver.stdin is not None
        assert driver.stdout is not None
        assert driver.stdout.readline() == "ready\n"
        while len(results) < times:
            print("ask", file=driver.stdin, flush=True)
            assert driver.stdout.readline() == "asking\n", "the driver has ended"
            is_warm = len(durations) >= WARM_UPS
            if is_warm:
                time.sleep(draws.uniform(0, min(durations[1:])))
                driver.send_signal(signal.SIGINT)
            row = json.loads(driver.stdout.readline())
            if row["ending"] == "answered":
                durations.append(row["seconds"])  # before the first interrupt, or it came too late
            if not is_warm:
                if row["ending"] != "answered" or row["changes"]:
                    raise SystemExit(f"without an interrupt: {row}")
            elif row["ending"] != "answered":
                results.append(row)
                print(f"{command}: {len(results)} of {times}", file=sys.stderr, flush=True)
        driver.stdin.close()
        driver.wait(60)
        # What this process and those it started leave in its folder.
        results[-1]["files"] += [name for name in os.listdir(folder) if not name.startswith("torchinductor")]
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=COMMANDS)
    parser.add_argument("--drive", help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.drive:
        drive(told.drive)
        return
    is_wrong = False
    table = ["| command | interrupts | ended by it | with changes | files left | children left |"]
    table.append("|---|---:|---:|---:|---:|---:|")
    for command in [told.only] if told.only else COMMANDS:
        rows = interrupt_often(command, told.times, told.seed)
        for row in rows:
            if row["changes"] or row["files"] or row["ending"] != "interrupted":
                print(row["ending"], *row["changes"], *row["files"], sep="\n    ")
        ends = collections.Counter(row["ending"] for row in rows)
        changed, files, children = (sum(bool(row[kind]) for row in rows) for kind in ("changes", "files", "children"))
        is_wrong |= bool(changed or files or children or ends["interrupted"] < len(rows))
        table.append(f"| {command} | {len(rows)} | {ends['interrupted']} | {changed} | {files} | {children} |")
    print("\n".join(table))
    sys.exit(is_wrong)


if __name__ == "__main__":
    main()
