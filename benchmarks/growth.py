"""Does a process grow with the number of estimates it has made? A transformer of 24 blocks, on the CPU and on a card.

    python benchmarks/growth.py              # 300 estimates on each, half an hour of one core
    python benchmarks/growth.py --count 50 --blocks 1

Each device has a process of its own. Printed are the resident memory, what malloc has handed out and not got back,
and the number of objects that Python's collector knows, after a collection, each as a ratio of what it was after ten
estimates. Resident memory alone would not tell a leak from free memory that malloc keeps.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from batchwright import Workload, estimate

MARKS = (10, 50, 100, 200, 300)
DEVICES = ("cpu", "a100-40gb")


def workload(blocks: int) -> Workload:
    def model() -> nn.Module:
        layers = [nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(blocks)]
        return nn.Sequential(nn.Embedding(512, 64), *layers, nn.Linear(64, 512))

    return Workload(
        model=model,
        batch=lambda n: torch.randint(512, (n, 32)),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten()),
        optimizer=lambda parameters: torch.optim.AdamW(parameters),
    )


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


class MallInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def handed_out_bytes() -> int:
    """What malloc has handed out: from its heaps, and mapped one by one (Python's own arenas are beside it)."""
    ask = ctypes.CDLL("libc.so.6").mallinfo2
    ask.restype = MallInfo
    told = ask()
    return int(told.uordblks + told.hblkhd)


def measure(on: str, count: int, blocks: int) -> None:
    first: tuple[int, int, int] | None = None
    for number in range(1, count + 1):
        estimate(workload(blocks), micro_batch=4, on=on)
        if number in MARKS:
            gc.collect()
            memory, used, objects = resident_bytes(), handed_out_bytes(), len(gc.get_objects())
            first = first or (memory, used, objects)
            print(
                f"{on:10} {number:4} estimates: {memory / 2**20:7.1f} MiB resident, x{memory / first[0]:.3f}; "
                f"{used / 2**20:7.2f} MiB handed out, x{used / first[1]:.4f}; "
                f"{objects:8,} objects, x{objects / first[2]:.4f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=MARKS[-1])
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--on", choices=DEVICES, help="one device, in this process")
    asked = parser.parse_args()
    if asked.on:
        measure(asked.on, asked.count, asked.blocks)
        return
    for on in DEVICES:
        told = ["--on", on, "--count", str(asked.count), "--blocks", str(asked.blocks)]
        subprocess.run([sys.executable, __file__, *told], check=True)


if __name__ == "__main__":
    main()
