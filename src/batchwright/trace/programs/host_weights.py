"""Weights that a program makes on the host: without memory, as long as nothing reads them.

A large block is address space until it is written to, and what writes to weights first are their initial values. On a
simulated card nobody needs those: a model of 8 billion weights is built in a fraction of its 32 GB.

Promises:
- only the initial values of large parameters are left out, and copies of such parameters; what held other values before
  it became a weight, what is loaded from a checkpoint, batches and buffers are real;
- if anything reads such a weight, its initial values are drawn then, and it is real from there on;
- nothing on the card reads a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_iter

from batchwright.simulated.torch_patches.patches import Patch

# Smaller blocks are part of a page that is written to anyway.
_LEAST_BYTES = 2**20

_aten = torch.ops.aten
# What gives a tensor values, whatever it held.
_FILLS = {
    *(_aten.normal_.default, _aten.uniform_.default, _aten.zero_.default, _aten.fill_.Scalar, _aten.fill_.Tensor),
    *(_aten.exponential_.default, _aten.bernoulli_.float, _aten.random_.default),
}
_NEW = (_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default, _aten.new_empty.default)
_COPIES = (_aten.clone.default, _aten._to_copy.default)
# These compute a new value from what is there.
_INITIALS = ("trunc_normal_", "kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "xavier_normal_", "orthogonal_")


class _Block:
    """A large block of the host that was made and not written to, and what is to be done when it is read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.reference = StorageWeakRef(tensor.untyped_storage())
        self.is_weight = False
        self.fills: list[Callable[[], object]] = []


class HostWeights:
    """Which blocks of the host are weights that need not be written to."""

    def __init__(self) -> None:
        # By address, held weakly: that of a block that died may be given to a batch.
        self._blocks: dict[int, _Block] = {}
        self._is_reading = False

    def answer(self, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return the result of an operator that only gives a weight its initial values; None if it is another."""
        if func in _NEW:
            return self._make(func, args, kwargs)
        if not self._blocks or self._is_reading:
            return None
        if func in _FILLS and self._is_weight(args[0]):
            self._block(args[0]).fills.append(partial(func, args[0].detach(), *args[1:], **kwargs))  # type: ignore[union-attr]
            return args[0]
        if func in _COPIES and self._is_weight(args[0]) and _is_host(kwargs.get("device")):
            return self._copy(args[0], kwargs)
        if func is _aten.copy_.default and (block := self._block(args[0])) is not None and _is_whole(args[0]):
            block.fills.clear()  # written over
        if not getattr(func, "is_view", False):
            for tensor in tree_iter((args, kwargs)):
                self._read(tensor)
        return None

    def seeing_parameters(self) -> Iterator[Patch]:
        """Learn of every parameter that a module is given, and leave out what computes its initial values."""
        register = nn.Module.register_parameter

        def learn(module: nn.Module, name: str, param: Any) -> None:
            register(module, name, param)
            self._learn(param)

        yield Patch(nn.Module, "register_parameter", learn)
        for name in _INITIALS:
            yield Patch(nn.init, name, self._later(getattr(nn.init, name)))

    def _later(self, initial: Callable[..., Any]) -> Callable[..., Any]:
        def fill(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_reading or not self._is_weight(tensor):
                return initial(tensor, *args, **kwargs)
            self._block(tensor).fills.append(partial(initial, tensor.detach(), *args, **kwargs))  # type: ignore[union-attr]
            return tensor

        return fill

    def _make(self, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        block = func(*args, **kwargs)
        if _is_of_host(block) and block.untyped_storage().nbytes() >= _LEAST_BYTES:
            self._blocks[block.untyped_storage()._cdata] = _Block(block)
        return block

    def _learn(self, tensor: Any) -> None:
        block = self._block(tensor)
        if block is not None:
            block.is_weight = True

    def _block(self, tensor: Any) -> _Block | None:
        if not _is_of_host(tensor):
            return None
        key = tensor.untyped_storage()._cdata
        block = self._blocks.get(key)
        if block is not None and block.reference.expired():
            del self._blocks[key]
            return None
        return block

    def _is_weight(self, tensor: Any) -> bool:
        block = self._block(tensor)
        return block is not None and (block.is_weight or isinstance(tensor, nn.Parameter))

    def _read(self, tensor: Any) -> None:
        """Give a block the values that were left out: something reads or writes it."""
        block = self._block(tensor)
        if block is None:
            return
        del self._blocks[tensor.untyped_storage()._cdata]
        self._is_reading = True
        try:
            with torch.no_grad():
                for fill in block.fills:
                    fill()
        finally:
            self._is_reading = False

    def _copy(self, weight: torch.Tensor, kwargs: Mapping[str, Any]) -> torch.Tensor:
        copy = torch.empty_like(weight, dtype=kwargs.get("dtype"), memory_format=kwargs.get("memory_format"))
        block = _Block(copy)
        block.is_weight = True
        block.fills.append(lambda: self._copy_values(copy_of=weight, into=copy.detach()))
        self._blocks[copy.untyped_storage()._cdata] = block
        return copy

    def _copy_values(self, *, copy_of: torch.Tensor, into: torch.Tensor) -> None:
        self._is_reading = False
        self._read(copy_of)
        into.copy_(copy_of.detach())


def _is_whole(tensor: torch.Tensor) -> bool:
    return tensor.nbytes == tensor.untyped_storage().nbytes()


def _is_host(device: Any) -> bool:
    return device is None or torch.device(device).type == "cpu"


def _is_of_host(tensor: Any) -> bool:
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, FakeTensor):
        return False
    return tensor.device.type == "cpu" and tensor.layout is torch.strided
