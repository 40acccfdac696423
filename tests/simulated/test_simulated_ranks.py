"""One of several ranks on a simulated card: FSDP2 by its own code, DDP by its buckets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import batchwright as bw
from batchwright.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, LAYERS = 1024, 8
MODEL_BYTES = LAYERS * (WIDTH * WIDTH + WIDTH) * 4
LAYER_BYTES = MODEL_BYTES // LAYERS


def sharded(model: Any) -> nn.Module:
    for layer in model:
        fully_shard(layer)
    whole: nn.Module = fully_shard(model)
    return whole


def workload(wrap: Callable[[nn.Module], nn.Module] | None) -> bw.Workload:
    return bw.Workload(
        model=lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]),
        batch=lambda n: torch.randn(n, WIDTH),
        loss=lambda model, batch: model(batch).pow(2).mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        wrap=wrap,
    )


def peak(wrap: Callable[[nn.Module], nn.Module] | None, devices: int) -> int:
    return bw.estimate(workload(wrap), micro_batch=2, on="a100-40gb", devices=devices).peak


@pytest.mark.parametrize("degree", [2, 8, 64])
def test_a_shard_holds_its_part_of_weights_gradients_and_state(degree: int) -> None:
    found = bw.estimate(workload(sharded), micro_batch=2, on="a100-40gb", devices=degree)
    for part in ("weights", "optimizer"):
        assert found.parts[part] == pytest.approx(MODEL_BYTES / degree, rel=0.01)
    # Two layers gathered, gradients of one in full, and what the collectives copy from and to.
    held = 3 * MODEL_BYTES / degree + 16.25 * 2**20
    assert held < found.peak < held + 6 * LAYER_BYTES


def test_buckets_hold_every_gradient_once_more_unless_gradients_are_views_of_them() -> None:
    alone = peak(None, 1)
    assert peak(lambda model: DistributedDataParallel(model), 4) - alone == pytest.approx(MODEL_BYTES, rel=0.01)
    views = peak(lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True), 4)
    assert views - alone < 2 * LAYER_BYTES


def test_nothing_is_left_behind() -> None:
    peak(sharded, 4)
    assert not dist.is_initialized()
    assert DistributedDataParallel.__init__.__qualname__ == "DistributedDataParallel.__init__"


def test_ranks_need_a_card_and_a_wrap() -> None:
    with pytest.raises(InvalidInputError, match="on cards only"):
        bw.estimate(workload(sharded), devices=2)
    with pytest.raises(InvalidInputError, match="has no wrap="):
        peak(None, 2)
