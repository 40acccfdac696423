"""How much time `batchwright --help` takes, next to a bare click program and to `accelerate --help`.

    python benchmarks/cli_startup.py

Prints CPU time (user and system) of whole processes, run in turn, as the median of the ratios to the bare click
program of the same round. The bar is 1.5.
"""

from __future__ import annotations

import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROUNDS = 25
BARE = """
import click

@click.group()
def group():
    "A program with one command and nothing in it."

@group.command()
def nothing():
    "Do nothing."

group()
"""


def cpu_seconds(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    scripts = Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as folder:
        bare = Path(folder, "bare.py")
        bare.write_text(BARE)
        commands = {
            "bare click": [sys.executable, str(bare), "--help"],
            "batchwright --help": [str(scripts / "batchwright"), "--help"],
            "batchwright plan": [str(scripts / "batchwright"), "plan", "1024", "--micro-batch", "48", "--devices", "4"],
        }
        accelerate = shutil.which("accelerate", path=str(scripts))
        if accelerate:
            commands["accelerate --help"] = [accelerate, "--help"]
        for command in commands.values():
            cpu_seconds(command)
        rounds = [{name: cpu_seconds(command) for name, command in commands.items()} for _ in range(ROUNDS)]
    print(f"{'':<20} {'median CPU s':>12} {'ratio to bare click':>20}   {ROUNDS} rounds")
    for name in commands:
        seconds = statistics.median(times[name] for times in rounds)
        ratio = statistics.median(times[name] / times["bare click"] for times in rounds)
        print(f"{name:<20} {seconds:>12.3f} {ratio:>20.2f}")


if __name__ == "__main__":
    main()
