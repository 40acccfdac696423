"""Run a training step at growing sizes under a soft RLIMIT_DATA and print each error, as JSON lines.

Usage: python limited_child.py KIND BUDGET_MIB FIRST_SIZE
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path

import torch
from torch import nn

from batchwright.device.outcome import find_rule

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 128, 2, batch_first=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.lstm(inputs)[0]
        return outputs


def build(kind: str) -> tuple[nn.Module, tuple[int, ...]]:
    if kind == "mlp":
        layers = [part for _ in range(4) for part in (nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU())]
        return nn.Sequential(*layers), (256,)
    if kind == "conv":
        first, second = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1)
        return nn.Sequential(first, nn.BatchNorm2d(32), nn.ReLU(), second, nn.ReLU()), (3, 32, 32)
    return Lstm(), (32, 64)


def main() -> None:
    import resource  # Not on Windows, where this file is collected by pytest but never run.

    kind, budget_mib, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    # As the fact in DESIGN.md has it: with the thresholds pinned, freed memory goes back to the system.
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(M_MMAP_THRESHOLD, 65536)
    libc.mallopt(M_TRIM_THRESHOLD, 65536)
    torch.set_num_threads(1)
    model, sample = build(kind)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(n: int) -> None:
        model(torch.randn(n, *sample)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(2)
    lines = Path("/proc/self/status").read_text().splitlines()
    used = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + budget_mib * 2**20, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    for n in (int(size * 0.7**k) + 2 for k in range(20)):
        try:
            step(n)
        except Exception as error:
            rule = find_rule(error)
            name = rule.name if rule else None
            print(json.dumps({"size": n, "rule": name, "error": repr(error)}), flush=True)
        else:
            print(json.dumps({"size": n, "rule": "fits", "error": ""}), flush=True)
        optimizer.zero_grad()
    # Not a plain exit: torch's own clean-up can crash where it may not take the memory it wants.
    os._exit(0)


if __name__ == "__main__":
    main()
