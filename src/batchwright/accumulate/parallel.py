"""How a model is spread over ranks, and the little that accumulation asks of that: DDP, FSDP2, or one process.

Promises:
- gradients are synchronised in the last backward of a window, and in no other; what the flag was before is put back;
- ranks exchange a few scalars once per window, all of them in one collective.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from batchwright.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn


class OneProcess:
    """No other ranks: nothing to synchronise, nobody to ask."""

    name = "one process"
    size = 1
    gathers_in_forward = False

    def synchronise_next(self, flag: bool) -> None:
        """Say whether the next backward synchronises gradients."""

    def restore(self) -> None:
        """Put back what `synchronise_next` changed."""

    def gather(self, numbers: Sequence[Any]) -> list[list[float]]:
        """Return everybody's numbers, one row per rank."""
        return [[float(number) for number in numbers]]

    def reduce(self, parameters: Iterable[torch.Tensor]) -> None:
        """Average the gradients over ranks, where no backward did."""


class _Ranks(OneProcess):
    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.size = dist.get_world_size(group)
        self._group = group
        # NCCL moves no host memory.
        self._device = device if "gloo" not in dist.get_backend(group) else torch.device("cpu")

    def gather(self, numbers: Sequence[Any]) -> list[list[float]]:
        mine = torch.tensor([0.0 if isinstance(n, torch.Tensor) else n for n in numbers], dtype=torch.float64)
        mine = mine.to(self._device)
        for index, number in enumerate(numbers):
            if isinstance(number, torch.Tensor):
                mine[index] = number  # from device to device: the host does not wait
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine, group=self._group)
        table: list[list[float]] = torch.stack(rows).tolist()
        return table


class DDP(_Ranks):
    """DistributedDataParallel: gradients are averaged in a backward whose forward saw the flag on."""

    name = "DDP"

    def __init__(self, modules: list[DistributedDataParallel], device: torch.device) -> None:
        super().__init__(modules[0].process_group, device)
        self._modules = modules
        self._before = [module.require_backward_grad_sync for module in modules]

    def synchronise_next(self, flag: bool) -> None:
        """Set the flag that `no_sync` sets, so that it covers the forward too."""
        for module in self._modules:
            module.require_backward_grad_sync = flag

    def restore(self) -> None:
        """Put back the flags as they were found."""
        for module, flag in zip(self._modules, self._before, strict=True):
            module.require_backward_grad_sync = flag

    def reduce(self, parameters: Iterable[torch.Tensor]) -> None:
        """Average the gradients by hand, those of one type in one collective."""
        by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for parameter in parameters:
            # Not that of the gradient: a rank without one must send what the others send.
            dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
            by_kind.setdefault((dtype, parameter.device), []).append(parameter)
        for (dtype, device), kind in by_kind.items():
            # One mark per parameter: was there a gradient on any rank? Where not, there is none afterwards either.
            marks = torch.tensor([parameter.grad is not None for parameter in kind], dtype=dtype, device=device)
            flat = torch.cat([marks, *(_gradient(parameter, dtype).flatten() for parameter in kind)])
            dist.all_reduce(flat, group=self._group)
            has_any = (flat[: len(kind)] > 0).tolist()
            sums = flat[len(kind) :].div_(self.size).split([parameter.numel() for parameter in kind])
            for parameter, averaged, is_there in zip(kind, sums, has_any, strict=True):
                if is_there and parameter.grad is not None:
                    parameter.grad.copy_(averaged.view_as(parameter.grad))
                elif is_there:
                    parameter.grad = averaged.view_as(parameter).clone()


class FSDP2(_Ranks):
    """fully_shard: forward and backward gather weights, so every rank must run as many as the others."""

    name = "FSDP2"
    gathers_in_forward = True

    def __init__(self, modules: list[Any], group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self._modules = modules

    def synchronise_next(self, flag: bool) -> None:
        """Say whether the next backward reduces gradients into shards."""
        for module in self._modules:
            module.set_requires_gradient_sync(flag, recurse=False)

    def restore(self) -> None:
        """Synchronise again."""
        # It cannot be asked what the flag was; on is what fully_shard sets.
        self.synchronise_next(True)

    def reduce(self, parameters: Iterable[torch.Tensor]) -> None:
        """Say that it is too late."""
        raise InvalidInputError(
            "this window ended before its last micro-batch, and under FSDP2 its gradients are not yet synchronised.",
            remedy="for micro in accumulator.micro_batches(loader): it knows which micro-batch is the last",
        )


def how_spread(model: nn.Module) -> OneProcess:
    """Find out how a model is spread over ranks.

    >>> how_spread(torch.nn.Linear(2, 1)).name
    'one process'
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    replicated = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    if replicated:
        return DDP(replicated, device)
    if not dist.is_available() or not dist.is_initialized():
        return OneProcess()
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise InvalidInputError(
            "the model is wrapped in FullyShardedDataParallel (FSDP1), which always synchronises.",
            remedy="torch.distributed.fsdp.fully_shard (FSDP2)",
        )
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        return OneProcess()
    mesh = next(p.device_mesh for module in sharded for p in module.parameters() if hasattr(p, "device_mesh"))
    if mesh.size() != dist.get_world_size():
        raise InvalidInputError(
            f"the model's mesh has {mesh.size()} of {dist.get_world_size()} ranks: not all of them share the data.",
            remedy="data-parallel ranks only; with tensor parallelism keep your own loop and audit it",
        )
    assert dist.group.WORLD is not None
    return FSDP2(sharded, dist.group.WORLD, device)


def _gradient(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros_like(parameter, dtype=dtype) if parameter.grad is None else parameter.grad
