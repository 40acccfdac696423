"""A workload that trains in no time, and runs made by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import batchwright as bw
from batchwright.tuning.run_file import new_run

CRITICAL = {
    "value": 400.0,
    "low": 300.0,
    "high": 550.0,
    "resolved": True,
    "unit": "samples",
    "observations": 100,
    "steps_needed": None,
    "trace": 1.0,
    "signal": 0.0025,
    "samples_per_unit": 1.0,
}


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    off: torch.Tensor = model(batch) - batch.sum(1, keepdim=True) - torch.randn(len(batch), 1, device=batch.device)
    return off.pow(2).mean()


def quick(**changes: Any) -> bw.Workload:
    arguments = {
        "model": lambda: nn.Linear(8, 1),
        "batch": lambda n: torch.randn(n, 8),
        "loss": loss,
        "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-3),
        "name": "quick",
    }
    return bw.Workload(**{**arguments, **changes})


def by_hand(**sections: Any) -> dict[str, Any]:
    """A run in which a micro-batch of 16 fits, a pass takes 0.03 s and 0.002 per sample, an update 0.01."""
    points = [
        {"micro_batch": size, "accumulation": accumulation, "seconds": 0.03 + 0.002 * size + 0.01 * bool(accumulation)}
        for size in (4, 8, 16)
        for accumulation in (None, 1)
    ]
    run = {
        **new_run("2026-11-16T12:00:00+00:00"),
        "workload": {"name": "by hand", "samples": 10_000, "optimizer": "AdamW", "learning_rate": 3e-4},
        "fit": {
            "micro_batch": 16,
            "limit": 4096,
            "limit_bytes": 2**30,
            "line": {"fixed_bytes": 2**28, "bytes_per_sample": 2**25, "source": "traced"},
        },
        "throughput": {"fastest_micro_batch": 16, "times": {"points": points}},
        "noise": {"critical_batch": CRITICAL, "effective_batch": 64},
    }
    return {**run, **sections}
