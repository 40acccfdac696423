"""Meshes of ranks are made of real numbers: a mesh reads where this rank stands in it, and fake tensors have no values.

What is exchanged are methods of `DeviceMesh`, so it does not matter how a `wrap` came by `init_device_mesh`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from batchwright.simulated.backend import NAME
from batchwright.simulated.torch_patches import Patch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# The ways into a mesh after which it makes another one, or reads its numbers; not every torch has all of them.
_READ_NUMBERS = ("__getitem__", "_flatten", "_unflatten", "get_local_rank", "_get_all_submeshes", "__repr__")
_READ_NUMBERS_STATIC = ("from_group", "_concatenate")


def real_meshes() -> Iterator[Patch]:
    """Let meshes be made and sliced while tensors are fake."""
    yield Patch(DeviceMesh, "__init__", _made_of_real_numbers(DeviceMesh.__init__))
    for name in _READ_NUMBERS:
        if name in vars(DeviceMesh):
            yield Patch(DeviceMesh, name, _on_real_numbers(getattr(DeviceMesh, name)))
    for name in _READ_NUMBERS_STATIC:
        if name in vars(DeviceMesh):
            yield Patch(DeviceMesh, name, staticmethod(_on_real_numbers(getattr(DeviceMesh, name))))
    true_type: Any = vars(DeviceMesh).get("device_type")
    # In older torch a plain attribute, which says cuda throughout.
    if isinstance(true_type, property) and true_type.fget is not None:
        yield Patch(DeviceMesh, "device_type", property(_seen_type(true_type.fget)))


def _seen_type(true_type: Callable[[Any], str]) -> Callable[[Any], str]:
    """Have a mesh say of its devices what its tensors say of theirs: cuda to a step, the truth in a backward pass."""

    def seen(mesh: Any) -> str:
        told = true_type(mesh)
        return NAME if told == "cuda" and not torch._C._is_torch_function_mode_enabled() else told

    return seen


def _on_real_numbers(method: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return method(*args, **kwargs)

    return run


def _made_of_real_numbers(init: Callable[..., None]) -> Callable[..., None]:
    make = _on_real_numbers(init)

    def init_mesh(self: DeviceMesh, device_type: str, mesh: Any = None, **options: Any) -> None:
        if "_rank_map" in options:
            options["_rank_map"] = _in_order(options["_rank_map"])
        make(self, device_type, _in_order(mesh), **options)

    return init_mesh


def _in_order(ranks: Any) -> Any:
    """Number the ranks of a fake tensor from 0, as `torch.arange` does: an order of its own changes no memory."""
    if not isinstance(ranks, FakeTensor):
        return ranks
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return torch.arange(ranks.numel(), dtype=torch.int, device="cpu").view(tuple(ranks.shape))
