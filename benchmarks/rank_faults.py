"""One rank of several raises, runs out of memory, hangs or dies: seconds to the verdict, exit codes, and what is said.

    python benchmarks/rank_faults.py                 # every case, with the usual limit of 60 s
    python benchmarks/rank_faults.py --ranks 2 --timeout 10 noise

Seconds are from the fault to the end of the last process, torchrun included. Exit codes are those of the ranks, as
torchrun lists them: a rank that was ended by a signal has a negative one.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TARGET = Path(__file__).with_name("rank_faults_target.py")
ROOT = Path(__file__).parents[1]
STAGES = ("fit", "estimate", "throughput", "audit", "noise", "branches")
QUICK = ["--memory", "512MiB", "--limit", "16"]
FAULTS = ("bug", "out of memory", "hang", "SIGKILL")


def tune_only(stage: str) -> list[str]:
    """Return the command that runs one stage alone."""
    skipped = ",".join(other for other in STAGES if other != stage)
    branches = ["--branches", "8,16"] if stage == "branches" else []
    return ["tune", f"{TARGET}:workload", *QUICK, "--steps", "20", "--skip", skipped, *branches]


COMMANDS = {
    "tune, loading": (["tune", f"{TARGET}:workload", *QUICK, "--steps", "20"], {"FAULT_PLACE": "load"}),
    "tune, fit (a probe)": (tune_only("fit"), {"FAULT_IN_CHILD": "1"}),
    **{f"tune, {stage}": (tune_only(stage), {}) for stage in STAGES[1:]},
    "noise": (["noise", f"{TARGET}:workload", "--effective-batch", "16", "--steps", "20"], {}),
    "fit, loading": (["fit", f"{TARGET}:workload", *QUICK, "--no-cache"], {"FAULT_PLACE": "load"}),
    "fit, loading in a probe": (
        ["fit", f"{TARGET}:workload", *QUICK, "--no-cache"],
        {"FAULT_PLACE": "load", "FAULT_IN_CHILD": "1"},
    ),
    "fit, a probe": (["fit", f"{TARGET}:workload", *QUICK, "--no-cache"], {"FAULT_IN_CHILD": "1"}),
    "fit, the leader's trace": (["fit", f"{TARGET}:workload", *QUICK, "--no-cache"], {"FAULT_RANK": "0"}),
}


def run_case(command: list[str], settings: dict[str, str], fault: str, ranks: int, timeout: float) -> list[str]:
    """Run one case and return the cells of its row."""
    with tempfile.TemporaryDirectory() as folder:
        marker = Path(folder) / "fault"
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "OMP_NUM_THREADS": "1",
            "BATCHWRIGHT_RANK_TIMEOUT": f"{timeout:g}",
            "FAULT": fault,
            "FAULT_MARKER": str(marker),
            **settings,
        }
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        begun = time.time()
        done = subprocess.run(
            [*launcher, "-m", "batchwright", *command],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=1800,
        )
        since = float(marker.read_text()) if marker.exists() else begun
        seconds = time.time() - since
    summary = done.stderr.find("FAILED\n")
    codes = re.findall(r"rank\s+: (\d+) .*\n\s+exitcode\s+: (-?\d+)", done.stderr[max(summary, 0) :])
    listed = ", ".join(f"rank {rank}: {code}" for rank, code in codes) or str(done.returncode)
    return [f"{seconds:.0f}", listed, message_of(done.stderr) or "(an answer)"]


def message_of(text: str) -> str:
    """Return what batchwright said at the end: one line, the last of a traceback behind it."""
    lines = text.splitlines()
    found = [number for number, line in enumerate(lines) if re.match(r"(Error: )?(rank \d+ |all ranks)", line)]
    if not found:
        return next((line for line in lines if re.match(r"Error: |.*nothing fits|.*does not fit", line)), "")
    first = lines[found[0]].replace(f"{TARGET.parent}{os.sep}", "")
    has_traceback = first.endswith(":") and "wait for" not in first
    raised = [line for line in lines[found[0] :] if re.match(r"\w[\w.]*Error\b", line)]
    error = raised[0] if has_traceback and raised else ""
    more = "" if len(found) == 1 else f" ({len(found)} messages)"
    return f"{first} {error}{more}".strip()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("named", nargs="*", help="only cases whose name holds one of these")
    parser.add_argument("--ranks", type=int, action="append")
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--fault", action="append")
    asked = parser.parse_args()
    print("| command, where | fault | ranks | s to the end | exit codes | message |\n|---|---|---|---|---|---|")
    for ranks in asked.ranks or (2, 4):
        for name, (command, settings) in COMMANDS.items():
            if asked.named and not any(part in name for part in asked.named):
                continue
            for fault in asked.fault or FAULTS:
                row = [name, fault, str(ranks), *run_case(command, settings, fault, ranks, asked.timeout)]
                print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
