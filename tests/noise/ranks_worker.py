"""What each rank of test_ranks.py does: the noise of the same micro-batches, spread over ranks in every way."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from batchwright.accumulate.accumulator import Accumulator
from batchwright.noise.noise_scale import NoiseScale
from tests.noise.regression import DTYPES, STEPS, WIDTH, batches_of, loss_of, make_model, seen_by

if TYPE_CHECKING:
    from collections.abc import Sequence


def spread(model: nn.Sequential, kind: str) -> Any:
    if kind == "ddp":
        return DistributedDataParallel(model)
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer)
    return fully_shard(model)


def with_accumulator(kind: str, sizes: Sequence[int], dtype: str, **options: Any) -> list[list[float]]:
    """Rank r takes every R-th micro-batch of each step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = spread(make_model(dtype), kind)
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.05), len(sizes) // ranks, **options)
    noise = NoiseScale(accumulator, window=10**9)
    for step in range(STEPS):
        for batch in accumulator.micro_batches(batches_of(step, sizes, dtype)[rank::ranks]):
            accumulator.backward(loss_of(model, batch))
    return seen_by(noise)


def with_own_loop(kind: str, sizes: Sequence[int], dtype: str) -> list[list[float]]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = spread(make_model(dtype), kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    noise = NoiseScale(model, optimizer=optimizer, micro_batch=sizes[0], window=10**9)
    for step in range(STEPS):
        mine = batches_of(step, sizes, dtype)[rank::ranks]
        for number, batch in enumerate(mine):
            is_last = number == len(mine) - 1
            quiet = model.no_sync() if kind == "ddp" and not is_last else contextlib.nullcontext()
            if kind == "fsdp":
                model.set_requires_gradient_sync(is_last)
            with quiet:
                (loss_of(model, batch) / len(mine)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
    return seen_by(noise)


def stratified() -> list[str]:
    """Rank 0 has large inputs, the others small ones."""
    model = DistributedDataParallel(nn.Linear(WIDTH, 1))
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.0), 2)
    noise = NoiseScale(accumulator)
    generator = torch.Generator().manual_seed(dist.get_rank())
    size = 3.0 if dist.get_rank() == 0 else 1.0
    loader = [size * torch.randn(4, WIDTH, generator=generator) for _ in range(80)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in accumulator.micro_batches(loader):
            accumulator.backward(loss_of(model, batch))
        assert noise.critical_batch is not None
    return [str(warning.message) for warning in caught]


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    even, ragged = [4] * (2 * ranks), [3, 1, 2, 4, 2, 5, 1, 2][: 2 * ranks]
    told: dict[str, Any] = {}
    for kind in ("ddp", "fsdp"):
        for dtype in DTYPES:
            told[f"even, {kind}, {dtype}"] = with_accumulator(kind, even, dtype)
            told[f"ragged, {kind}, {dtype}"] = with_accumulator(kind, ragged, dtype)
            told[f"one each, {kind}, {dtype}"] = with_accumulator(kind, even[:ranks], dtype)
        told[f"own loop, {kind}"] = with_own_loop(kind, even, "float64")
    told["stratified"] = stratified()
    Path(folder, str(dist.get_rank())).write_text(json.dumps(told))
    dist.barrier()
    os._exit(0)  # torch's own teardown of gloo aborts at times, after all is done


if __name__ == "__main__":
    main(sys.argv[1])
