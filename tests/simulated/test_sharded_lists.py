"""Multi-tensor operators handed the shards: the same peaks as by torch's own way, element by element only."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import batchwright as bw
from batchwright.simulated.ranks import on_shards

TRACE = "batchwright.trace.trace.on_shards"


def sharded(model: Any) -> nn.Module:
    for layer in model:
        fully_shard(layer)
    whole: nn.Module = fully_shard(model)
    return whole


def estimate(optimizer: Any, **more: Any) -> bw.Estimate:
    workload = bw.Workload(
        model=lambda: nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)]),
        batch=lambda n: torch.randn(n, 256),
        loss=lambda model, batch: model(batch).pow(2).mean(),
        optimizer=optimizer,
        wrap=sharded,
    )
    return bw.estimate(workload, micro_batch=2, on="a100-40gb", devices=4, **more)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda params: torch.optim.AdamW(params, lr=1e-3),
        pytest.param(lambda params: torch.optim.AdamW(params, lr=1e-3, amsgrad=True), marks=pytest.mark.slow),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
        pytest.param(lambda params: torch.optim.RMSprop(params, lr=0.1, centered=True), marks=pytest.mark.slow),
    ],
)
def test_peaks_are_those_of_torchs_own_way(optimizer: Any) -> None:
    with patch(TRACE, lambda *_: NotImplemented):
        by_torch = estimate(optimizer)
    assert estimate(optimizer) == by_torch


def test_norms_of_shards_are_left_to_torch() -> None:
    seen = []

    def listening(func: Any, *rest: Any) -> Any:
        answer = on_shards(func, *rest)
        seen.append((func._schema.name, answer is NotImplemented))
        return answer

    with patch(TRACE, listening):
        estimate(lambda params: torch.optim.SGD(params, lr=0.1), clip_norm=1.0)
    assert ("aten::_foreach_norm", True) in seen
    assert ("aten::_foreach_mul_", False) in seen or ("aten::_foreach_add_", False) in seen
