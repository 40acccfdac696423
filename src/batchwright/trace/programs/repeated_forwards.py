"""Evaluation repeats itself: a forward without gradients that is like the ones before need not be followed again.

A script that trains evaluates first, or in between, hundreds of batches of one shape. Their memory is that of the first
few: what they leave behind is their outputs.

Promises:
- a forward is left out only if the same module was called without gradients three times before with tensors of the same
  shapes and the same other arguments, and left as much behind each time: outputs of the same shapes, whose values are
  not known;
- or if it goes on as three before it: those of a generation, which get a token more each time (`growing_forwards.py`);
- what it holds while it runs, on top of what is held now, is held for a moment where that would be the peak; if it is
  too much at once, the forward is followed;
- a module with hooks anywhere inside, or one of whose settings, counters or lists has changed, is always followed;
- its outputs are new tensors without memory, as they would be; a note says how many forwards were left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_iter, tree_unflatten

from batchwright.trace.programs.growing_forwards import GrowingForwards, Parts, Use

if TYPE_CHECKING:
    from batchwright.simulated.allocator.segments import AllocatorCounters, Counter

# So often is a forward followed before it is believed to repeat itself.
_FOLLOWED = 3
_PLAIN = (type(None), bool, int, float, str)


@dataclass
class _Known:
    """What the calls of one kind did so far."""

    outputs: Any
    growth: int
    # The most that a call held while it ran, on top of what was held before.
    extra: int
    num_alike: int = 1


@dataclass
class _Held:
    """What is held, and its peak while a call runs."""

    counter: Counter
    # The peak before the calls that are under way.
    peak_before: int = 0

    @contextmanager
    def measured(self) -> Iterator[Use]:
        """Measure what a call takes, on top of what was held before."""
        use = Use()
        held, peak, before = self.counter.current, self.counter.peak, self.peak_before
        self.counter.peak, self.peak_before = held, max(peak, before)
        try:
            yield use
            use.growth, use.extra = self.counter.current - held, self.counter.peak - held
        finally:
            self.counter.peak, self.peak_before = max(peak, self.counter.peak), before


class RepeatedForwards:
    """The forwards of a program that were seen, by what they were called with."""

    def __init__(self, counters: AllocatorCounters, is_known: Callable[[torch.Tensor], bool]) -> None:
        self._allocated, self._requested = _Held(counters.allocated), _Held(counters.requested)
        self._is_known = is_known
        self._known: dict[Any, _Known] = {}
        self._growing: dict[Any, GrowingForwards] = {}
        self.num_left_out = 0

    def run(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a module, or make its outputs if they are known."""
        if torch.is_grad_enabled():
            return call(module, *args, **kwargs)
        inputs, settings = _describe((args, kwargs)), _describe_settings(module)
        if settings is None:
            return call(module, *args, **kwargs)
        autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        # The module itself, so that another one does not get its place.
        state = module, autocast, torch.is_inference_mode_enabled(), settings
        known = self._known.get((*state, inputs))
        if known is not None and known.num_alike >= _FOLLOWED and self._can_hold(known.extra):
            self.num_left_out += 1
            return self._make(known.outputs)
        growing, given = self._growing.setdefault(state, GrowingForwards()), Parts.of((args, kwargs))
        predicted = growing.predict(given)
        if given is not None and predicted is not None and self._can_hold(predicted.extra):
            self.num_left_out += 1
            return growing.leave_out(predicted, given)
        with self._allocated.measured() as allocated, self._requested.measured() as requested:
            outputs = call(module, *args, **kwargs)
        are_known = any(isinstance(leaf, torch.Tensor) and self._is_known(leaf) for leaf in tree_iter(outputs))
        growing.learn(given, Parts.of((args, kwargs)), None if are_known else outputs, requested)
        if inputs is None:
            return outputs
        seen = _describe_outputs(outputs, (args, kwargs))
        if seen is None or are_known:
            self._known.pop((*state, inputs), None)
        elif known is not None and (known.outputs, known.growth) == (seen, allocated.growth):
            known.num_alike += 1
            known.extra = max(known.extra, allocated.extra)
        else:
            self._known[*state, inputs] = _Known(seen, allocated.growth, allocated.extra)
        return outputs

    def _can_hold(self, extra: int) -> bool:
        """Hold so much for a moment, unless as much was held before; return whether the card has it."""
        counter = self._allocated.counter
        peak = counter.current + extra
        if peak > max(counter.peak, self._allocated.peak_before):
            try:
                torch.empty(extra, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError:
                return False
        counter.peak = max(counter.peak, peak)
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
