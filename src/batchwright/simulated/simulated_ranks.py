"""Ranks that are not there: `wrap` runs for real, over a process group that sends nothing.

FSDP2 runs its own code on fake tensors: shards, all-gathers and reduce-scatters take what they take. DDP's buckets are
allocated in its place (replica.py), meshes are made of real numbers (real_meshes.py).

Promises:
- a process group of the user's own is not touched: where there is one, ranks are not simulated;
- a `wrap` that starts or ends the process group itself finds it started, and leaves it so;
- what cannot be simulated is refused by name (refused_wraps.py);
- torch is as it was afterwards.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes

from batchwright.errors import InvalidInputError
from batchwright.simulated.real_meshes import real_meshes
from batchwright.simulated.refused_wraps import refused_wraps
from batchwright.simulated.replica import replicas
from batchwright.simulated.torch_cuda import seen_device
from batchwright.simulated.torch_patches import Patch, applied, undone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SHAPES = "_propagate_tensor_meta_non_cached"


@contextmanager
def simulated_ranks(devices: int) -> Iterator[None]:
    """Have torch believe in so many ranks, of which this is the first."""
    if dist.is_initialized():
        raise InvalidInputError("ranks cannot be simulated in a process that has a process group of its own.")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # torch marks every later traceback of the process with the rank, and never stops by itself.
    hook_as_it_was = partial(setattr, sys, "excepthook", sys.excepthook)
    shapes_as_they_were = partial(_forget_shapes, set(FakeTensorMode.cache))
    with applied(_group_is_ours()), undone(_end_group), undone(hook_as_it_was), undone(shapes_as_they_were):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=devices)
        with applied(_group_stays(), _shards(), real_meshes(), replicas(), refused_wraps()):
            yield


def _forget_shapes(before: set[Any]) -> None:
    """torch remembers shapes for good, of sharded tensors by the group, which is another one in every run."""
    for key in [key for key in list(FakeTensorMode.cache) if key not in before]:
        FakeTensorMode.cache.pop(key, None)


def _end_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _group_is_ours() -> Iterator[Patch]:
    """The group is the whole process's: other threads are told that there is none."""
    world: Any = distributed_c10d._World
    yield Patch(world, "default_pg", vars(world)["default_pg"], outside=property(lambda _: None))


def _shards() -> Iterator[Patch]:
    yield Patch(ShardingPropagator, _SHAPES, _uncounted(getattr(ShardingPropagator, _SHAPES)))
    true_device: Any = torch.Tensor.device
    yield Patch(DTensor, "device", property(seen_device(true_device.__get__)))


def _group_stays() -> Iterator[Patch]:
    """Let a script start and end its process group: there is one already, and it is ours to end."""
    for name in ("init_process_group", "destroy_process_group"):
        function: Any = getattr(dist, name)
        # torch wraps some of them for its logs: what is inside is exchanged, so that names bound before follow.
        inside = [cell for cell in function.__closure__ or () if callable(cell.cell_contents)]
        yield from (Patch(cell, "cell_contents", _nothing) for cell in inside)
        yield from (Patch(place, name, _nothing) for place in (() if inside else (dist, distributed_c10d)))


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _uncounted(find_shapes: Callable[..., Any]) -> Callable[..., Any]:
    """Sharded tensors find out the shapes of results on fake ones of full size, which take nothing anywhere."""

    def find(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return find_shapes(*args, **kwargs)

    return find
