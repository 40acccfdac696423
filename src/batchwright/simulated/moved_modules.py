"""`model.cuda()`, `model.to("cuda")`, `model.half()` on fake parameters.

torch swaps a fake parameter for the moved one, which it cannot while the trace watches the parameter.

Promises:
- a parameter, gradient or buffer that is already there stays the very same;
- one that is not is moved within itself, so that an optimizer which holds it goes on holding it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from batchwright.simulated.torch_patches import Patch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def modules_move_in_place() -> Iterator[Patch]:
    """Have modules move their fake parameters without swapping them."""
    yield Patch(nn.Module, "_apply", _in_place(nn.Module._apply))


def _in_place(apply: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    def move(self: nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
        held = [parameter for parameter in self._parameters.values() if parameter is not None]
        if not any(isinstance(parameter, FakeTensor) or is_traceable_wrapper_subclass(parameter) for parameter in held):
            return apply(self, fn, recurse)  # real ones, or those of a model that is being built on meta
        if recurse:
            for module in self.children():
                module._apply(fn)
        for parameter in held:
            gradient, parameter.grad = parameter.grad, None
            _move(parameter, fn)
            if gradient is not None:
                _move(gradient, fn)
            parameter.grad = gradient
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = fn(buffer)
        return self

    return move


def _move(tensor: Any, fn: Callable[[Any], Any]) -> None:
    with torch.no_grad():
        moved = fn(tensor)
    if moved is tensor:
        return
    moved = moved.detach().requires_grad_(tensor.requires_grad)
    if not isinstance(tensor, FakeTensor):  # a shard
        torch.utils.swap_tensors(tensor, nn.Parameter(moved, tensor.requires_grad))
        return
    # `.data =` is refused between devices, and torch's own swap where anything refers weakly to the tensor, as the
    # trace does: the tensor's insides and what is written on it (where it lies, above all) are exchanged by hand.
    torch._C._swap_tensor_impl(tensor, moved)
    tensor.__dict__, moved.__dict__ = moved.__dict__, tensor.__dict__
