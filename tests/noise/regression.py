"""A small problem that the tests of this folder share: micro-batches by number, a net, a loss."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tests.oracle.noise_by_hand import observe_by_hand

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchwright.noise.noise_scale import NoiseScale

WIDTH, STEPS = 5, 3
DTYPES = ("float64", "float32")


def make_model(dtype: str = "float64") -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1)).to(getattr(torch, dtype))


def batches_of(step: int, sizes: Sequence[int], dtype: str = "float64") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    rows = torch.randn(sum(sizes), WIDTH, generator=generator, dtype=torch.float64)
    return list(rows.to(getattr(torch, dtype)).split(list(sizes)))


def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(batch) - batch.sum(1, keepdim=True)).pow(2).mean()
    return loss


def seen_by(noise: NoiseScale) -> list[list[float]]:
    """T and |G|^2 of every observation, summed over groups."""
    return [[sum(one["traces"]), sum(one["signals"])] for one in noise.state_dict()["track"]["kept"]]


def expected(sizes: Sequence[int], dtype: str = "float64", *, steps: int = STEPS, trains: bool = True) -> Any:
    """The same by hand, along plain big-batch training in one process."""
    model = make_model(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 if trains else 0.0)
    critical = []
    for step in range(steps):
        parts = batches_of(step, sizes, dtype)
        critical.append(
            list(observe_by_hand(copy.deepcopy(model).double(), loss_of, [p.double() for p in parts], sizes))
        )
        optimizer.zero_grad()
        loss_of(model, torch.cat(parts)).backward()
        optimizer.step()
    return critical
