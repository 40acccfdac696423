"""Ranks that are not there: `wrap` runs for real, over a process group that sends nothing.

FSDP2 runs its own code on fake tensors: shards, all-gathers and reduce-scatters take what they take. DDP's reducer is
C++ that reads memory, so its buckets are allocated in its place, by its own sizes.

Promises:
- a process group of the user's own is not touched: where there is one, ranks are not simulated;
- torch is as it was afterwards.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

from batchwright.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# torch/nn/parallel/distributed.py: the first bucket is small so that communication starts early.
_FIRST_BUCKET, _BUCKET_MIB = 1 << 20, 25
_SHAPES = "_propagate_tensor_meta_non_cached"


@contextmanager
def simulated_ranks(devices: int) -> Iterator[None]:
    """Have torch believe in so many ranks, of which this is the first."""
    if dist.is_initialized():
        raise InvalidInputError("ranks cannot be simulated in a process that has a process group of its own.")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=devices)
    try:
        with ExitStack() as stack:
            for place in ("torch.distributed.device_mesh", "torch.distributed.fsdp._fully_shard._fsdp_init"):
                stack.enter_context(patch.object(import_module(place), "init_device_mesh", _mesh_of_real_numbers))
            stack.enter_context(
                patch.object(ShardingPropagator, _SHAPES, _uncounted(getattr(ShardingPropagator, _SHAPES)))
            )
            for name in ("__init__", "forward", "no_sync"):
                stack.enter_context(patch.object(DistributedDataParallel, name, getattr(_Replica, name)))
            yield
    finally:
        dist.destroy_process_group()


def _uncounted(find_shapes: Callable[..., Any]) -> Callable[..., Any]:
    """Sharded tensors find out the shapes of results on fake ones of full size, which take nothing anywhere."""

    def find(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return find_shapes(*args, **kwargs)

    return find


def _mesh_of_real_numbers(*args: Any, **kwargs: Any) -> Any:
    """A mesh reads where this rank stands in it, so it cannot be made of fake tensors."""
    with unset_fake_temporarily():
        return init_device_mesh(*args, **kwargs)


class _Replica:
    """What DistributedDataParallel does to memory: buckets for all gradients, beside them or in their place."""

    def __init__(self: Any, module: nn.Module, *_: Any, **options: Any) -> None:
        nn.Module.__init__(self)
        self.module = module
        self._is_view = bool(options.get("gradient_as_bucket_view", False))
        limit = int(float(options.get("bucket_cap_mb") or _BUCKET_MIB) * 2**20)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.gradient_buckets: list[torch.Tensor] = []
        self._places: list[tuple[nn.Parameter, torch.Tensor]] = []
        for bucket in _buckets(trained, limit):
            first = bucket[0]
            flat = first.detach().new_empty(sum(p.numel() for p in bucket))
            self.gradient_buckets.append(flat)
            pieces = flat.split([parameter.numel() for parameter in bucket])
            self._places += list(zip(bucket, pieces, strict=True))

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._is_view and torch.is_grad_enabled():
            for parameter, piece in self._places:
                if parameter.grad is None:
                    parameter.grad = piece.view(parameter.shape)
        return self.module(*args, **kwargs)

    def no_sync(self: Any) -> Any:
        return nullcontext()


def _buckets(parameters: list[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    """Group parameters as DDP does: in reverse order, one number format each, up to a size."""
    buckets: list[list[nn.Parameter]] = []
    sizes: dict[torch.dtype, tuple[list[nn.Parameter], int]] = {}
    for parameter in reversed(parameters):
        bucket, held = sizes.get(parameter.dtype, ([], 0))
        if not bucket:
            buckets.append(bucket)
        bucket.append(parameter)
        held += parameter.numel() * parameter.element_size()
        is_full = held >= (_FIRST_BUCKET if len(buckets) == 1 else limit)
        sizes[parameter.dtype] = ([], 0) if is_full else (bucket, held)
    return buckets
