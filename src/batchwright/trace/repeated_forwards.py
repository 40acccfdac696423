"""Evaluation repeats itself: a forward without gradients that is like the ones before need not be followed again.

A script that trains evaluates first, or in between, hundreds of batches of one shape. Their memory is that of the first
few: what they leave behind is their outputs.

Promises:
- a forward is left out only if the same module, in evaluation mode and without gradients, was called three times before
  with tensors of the same shapes and the same other arguments, and left as much behind each time: outputs of the same
  shapes, whose values are not known;
- what it holds while it runs, on top of what is held now, is held for a moment where that would be the peak; if it is
  too much at once, the forward is followed;
- a module with hooks anywhere inside, or one of whose settings, counters or lists has changed, is always followed;
- its outputs are new tensors without memory, as they would be; a note says how many forwards were left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_iter, tree_unflatten

if TYPE_CHECKING:
    from batchwright.simulated.allocator.segments import Counter

# So often is a forward followed before it is believed to repeat itself.
_FOLLOWED = 3
# By so much may what is held have grown since one was followed.
_GROWTH = 1.01
_PLAIN = (type(None), bool, int, float, str)


@dataclass
class _Known:
    """What the calls of one kind did so far."""

    outputs: Any
    growth: int
    # The most that a call held while it ran, on top of what was held before.
    extra: int
    num_alike: int = 1


class RepeatedForwards:
    """The forwards of a program that were seen, by what they were called with."""

    def __init__(self, allocated: Counter, is_known: Callable[[torch.Tensor], bool]) -> None:
        self._allocated, self._is_known = allocated, is_known
        self._known: dict[Any, _Known] = {}
        # The peak before the forwards that are under way.
        self._peak_before = 0
        self.num_left_out = 0

    def run(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a module, or make its outputs if they are known."""
        if torch.is_grad_enabled() or module.training:
            return call(module, *args, **kwargs)
        inputs, settings = _describe((args, kwargs)), _describe_settings(module)
        if inputs is None or settings is None:
            return call(module, *args, **kwargs)
        autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        # The module itself, so that another one does not get its place.
        key = (module, autocast, torch.is_inference_mode_enabled(), inputs, settings)
        known, held = self._known.get(key), self._allocated.current
        if known is not None and known.num_alike >= _FOLLOWED and self._can_hold(known.extra):
            self.num_left_out += 1
            return self._make(known.outputs)
        outputs, extra = self._measure(lambda: call(module, *args, **kwargs))
        seen, growth = _describe_outputs(outputs, (args, kwargs)), self._allocated.current - held
        if seen is None or any(isinstance(leaf, torch.Tensor) and self._is_known(leaf) for leaf in tree_iter(outputs)):
            self._known.pop(key, None)
        elif known is not None and (known.outputs, known.growth) == (seen, growth):
            known.num_alike += 1
            known.extra = max(known.extra, extra)
        else:
            self._known[key] = _Known(seen, growth, extra)
        return outputs

    def _measure(self, call: Callable[[], Any]) -> tuple[Any, int]:
        """Return the outputs of a call and the most it held while it ran, on top of what was held before."""
        held, peak, peak_before = self._allocated.current, self._allocated.peak, self._peak_before
        self._allocated.peak, self._peak_before = held, max(peak, peak_before)
        try:
            outputs = call()
            return outputs, self._allocated.peak - held
        finally:
            self._allocated.peak, self._peak_before = max(peak, self._allocated.peak), peak_before

    def _can_hold(self, extra: int) -> bool:
        """Hold so much for a moment, unless as much was held before; return whether the card has it."""
        peak = self._allocated.current + extra
        if peak > max(self._allocated.peak, self._peak_before):
            try:
                torch.empty(extra, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError:
                return False
        self._allocated.peak = max(self._allocated.peak, peak)
        return True

    def _make(self, described: Any) -> Any:
        leaves, structure = described
        outputs = [
            torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device="cuda")
            if isinstance(leaf, _Layout)
            else leaf
            for leaf in leaves
        ]
        return tree_unflatten(outputs, structure)


@dataclass(frozen=True)
class _Layout:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str


def _describe(values: Any) -> Any:
    """Return what makes two calls alike; None if it cannot be told."""
    leaves, structure = tree_flatten(values)
    described: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            with torch._C.DisableTorchFunction():
                layout = _Layout(tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device.type)
            described.append(layout)
        elif isinstance(leaf, _PLAIN):
            described.append(leaf)
        else:
            return None
    return tuple(described), structure


def _describe_settings(module: nn.Module) -> Any:
    """Return the settings, counters and lengths of lists of a module and all in it; None if it has hooks."""
    settings: list[Any] = []
    for part in module.modules():
        if part._forward_hooks or part._forward_pre_hooks:
            return None
        for name, value in vars(part).items():
            if isinstance(value, _PLAIN):
                settings.append((name, value))
            elif isinstance(value, Sized) and not isinstance(value, torch.Tensor):
                settings.append((name, len(value)))
    return tuple(settings)


def _describe_outputs(outputs: Any, inputs: Any) -> Any:
    """Return what to make of outputs; None if one is not a tensor of the card, with memory of its own."""
    leaves = [leaf for leaf in tree_flatten(outputs)[0] if isinstance(leaf, torch.Tensor)]
    if not leaves or any(not isinstance(leaf, FakeTensor) or leaf.requires_grad for leaf in leaves):
        return None
    before = [leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, torch.Tensor)]
    with torch._C.DisableTorchFunction():
        keys = [leaf.untyped_storage()._cdata for leaf in (*before, *leaves)]
    return _describe(outputs) if len(set(keys)) == len({id(t) for t in (*before, *leaves)}) else None
