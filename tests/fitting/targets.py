"""Workloads that child processes load by name."""

from __future__ import annotations

import os
import signal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import batchwright as bw

WIDTH = 512


def build() -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(batch).pow(2).mean()
    return result


def batch(n: int, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(n, width)


def adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters)  # type: ignore[arg-type]


def mlp() -> bw.Workload:
    """Lies picklable too: nothing in it is a lambda."""
    return bw.Workload(model=build, batch=batch, loss=loss, optimizer=adam)


def interrupted() -> bw.Workload:
    """Raises an interrupt of its own, but not while it is traced."""

    def interrupting(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        if type(inputs) is torch.Tensor:
            raise KeyboardInterrupt
        return loss(model, inputs)

    return bw.Workload(model=build, batch=batch, loss=interrupting, optimizer=adam)


def with_bug() -> bw.Workload:
    def wrong(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        if inputs.device.type == "cpu" and not torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE):
            raise KeyError("a bug of mine")
        return loss(model, inputs)

    return bw.Workload(model=build, batch=batch, loss=wrong, optimizer=adam)


def crashing() -> bw.Workload:
    def broken(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGSEGV)
        return loss(model, inputs)

    return bw.Workload(model=build, batch=batch, loss=broken, optimizer=adam)


def killed_above_100() -> bw.Workload:
    def dying(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        if len(inputs) > 100:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss(model, inputs)

    return bw.Workload(model=build, batch=batch, loss=dying, optimizer=adam)


def on_ranks(wrap: str, *, sick_rank: int | None = None, how: str = "") -> bw.Workload:
    def maybe_sick(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        if os.environ.get("RANK") == str(sick_rank) and len(inputs) > 8:
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "out of memory":
                raise torch.OutOfMemoryError("CUDA out of memory.")
            raise KeyError("a bug on one rank")
        return loss(model, inputs)

    def spread(model: nn.Module) -> nn.Module:
        if wrap == "ddp":
            return DistributedDataParallel(model)
        from torch.distributed.fsdp import fully_shard  # here: it takes a second, and most probes need none

        fully_shard(model)
        return model

    return bw.Workload(model=build, batch=batch, loss=maybe_sick, optimizer=adam, wrap=spread)


def ddp_out_of_memory_on_rank_1() -> bw.Workload:
    return on_ranks("ddp", sick_rank=1, how="out of memory")


def fsdp_dies_on_rank_1() -> bw.Workload:
    return on_ranks("fsdp", sick_rank=1, how="dies")


def ddp_bug_on_rank_1() -> bw.Workload:
    return on_ranks("ddp", sick_rank=1, how="bug")
