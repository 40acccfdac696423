"""How large whole numbers on a simulated card can be, of which nothing else is known: counts, sizes, numbers of graphs.

A mask that is not known is taken to keep every element, so what counts it has to say so too: a program that splits,
allocates or loops by such a number would otherwise disagree with itself.

Promises:
- a bound follows from shapes and from what is known: a mask has as many set entries as elements at most, and what is
  picked out of known numbers is no larger than the largest of them;
- numbers that are drawn or chosen by a model (labels, actions, tokens) have none;
- nothing has to stay below its bound for a run to go on: it is what is read in place of a number that is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter

from batchwright.trace.known_values import KnownValues, storage_key

_aten = torch.ops.aten
# What gives back some of the numbers that it is given: among all its first arguments, or in the one at this place.
_PICKS: dict[Any, int] = {
    **dict.fromkeys((_aten.index.Tensor, _aten.gather.default, _aten.index_select.default, _aten.take.default), 0),
    **dict.fromkeys((_aten.masked_select.default, _aten.sort.default, _aten.sort.stable, _aten.topk.default), 0),
    **dict.fromkeys((_aten.max.default, _aten.max.dim, _aten.amax.default, _aten.cummax.default), 0),
    **dict.fromkeys((_aten.min.default, _aten.min.dim, _aten.amin.default), 0),
    **dict.fromkeys((_aten._unique2.default, _aten.unique_consecutive.default, _aten.clamp.default), 0),
    **dict.fromkeys((_aten.clone.default, _aten._to_copy.default, _aten.flip.default, _aten.roll.default), 0),
    **dict.fromkeys((_aten.repeat.default, _aten.repeat_interleave.self_int, _aten.index_put.default), 0),
}
_JOINS = (_aten.cat.default, _aten.stack.default)
_SUMS = (_aten.sum.default, _aten.sum.dim_IntList)
_RUNNING_SUM = _aten.cumsum.default
_COUNTS = (_aten.count_nonzero.default, _aten.count_nonzero.dim_IntList)
_ADDS: dict[Any, int] = {
    **dict.fromkeys((_aten.add.Tensor, _aten.add.Scalar, _aten.add_.Tensor), 1),
    **dict.fromkeys((_aten.sub.Tensor, _aten.sub.Scalar, _aten.sub_.Tensor), -1),
}
_MULTIPLIES = (_aten.mul.Tensor, _aten.mul.Scalar)
# Conditions that hold of a number as large as it can be.
_LARGE: dict[Any, Callable[[float, float], bool]] = {
    **dict.fromkeys((_aten.gt.Scalar, _aten.gt.Tensor), lambda bound, other: bound > other),
    **dict.fromkeys((_aten.ge.Scalar, _aten.ge.Tensor), lambda bound, other: bound >= other),
    **dict.fromkeys((_aten.lt.Scalar, _aten.lt.Tensor), lambda bound, other: bound < other),
    **dict.fromkeys((_aten.le.Scalar, _aten.le.Tensor), lambda bound, other: bound <= other),
    **dict.fromkeys((_aten.eq.Scalar, _aten.eq.Tensor), lambda bound, other: bound == other),
    **dict.fromkeys((_aten.ne.Scalar, _aten.ne.Tensor), lambda bound, other: bound != other),
}


class UpperBounds:
    """By storage: how large its numbers can be, or what a condition on such a number says."""

    def __init__(self, values: KnownValues) -> None:
        self._values = values
        self._bounds: dict[int, int] = {}
        self._conditions: dict[int, bool] = {}

    def forget(self, key: int) -> None:
        """Drop a storage that died."""
        self._bounds.pop(key, None)
        self._conditions.pop(key, None)

    def of(self, value: Any) -> int | None:
        """Return how large the numbers of a tensor can be, if it is known or follows."""
        if isinstance(value, bool | int):
            return int(value)
        if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex():
            return None
        if isinstance(value, FakeTensor) and (bound := self._bounds.get(storage_key(value))) is not None:
            return bound
        known = self._values.real(value) if isinstance(value, FakeTensor) else value
        if known is None or not known.numel():
            return 1 if value.dtype is torch.bool else None
        with _disable_current_modes():
            return int(known.max())

    def condition(self, tensor: torch.Tensor) -> bool | None:
        """Return what a condition says of a number as large as it can be; None if it is about something else."""
        return self._conditions.get(storage_key(tensor))

    def follow(self, func: Callable[..., Any], args: Sequence[Any], outputs: Any) -> None:
        """Take note of what an operator's result can be at most, if its values are not known."""
        if func in _LARGE:
            return self._follow_condition(func, args, outputs)
        first = next((leaf for leaf in tree_iter(outputs) if isinstance(leaf, torch.Tensor)), None)
        if not isinstance(first, FakeTensor) or first.is_floating_point() or first.is_complex():
            return None
        if first.dtype is torch.bool or self._values.real(first) is not None:
            return None
        bound = self._bound(func, args, first)
        if bound is not None:
            self._bounds[storage_key(first)] = bound
        return None

    def _bound(self, func: Any, args: Sequence[Any], output: torch.Tensor) -> int | None:
        if func in _PICKS:
            return self.of(args[_PICKS[func]])
        if func in _JOINS:
            return _largest([self.of(part) for part in args[0]])
        if func is _aten.where.self:
            return _largest([self.of(part) for part in args[1:3]])
        if func in _SUMS or func in _COUNTS:
            factor = 1 if func in _COUNTS else self.of(args[0])
            return None if factor is None or not output.numel() else factor * (args[0].numel() // output.numel())
        if func is _RUNNING_SUM:
            factor = self.of(args[0])
            return None if factor is None else factor * (args[0].shape[args[1]] if args[0].dim() else 1)
        if func in _ADDS or func in _MULTIPLIES:
            first, second = self.of(args[0]), self.of(args[1])
            if first is None or second is None:
                return None
            if func in _MULTIPLIES:
                return first * second if min(first, second) >= 0 else None
            # What is taken away is known, or may be nothing.
            is_known = _ADDS[func] == 1 or not isinstance(args[1], torch.Tensor)
            return first + _ADDS[func] * second if is_known else first
        return None

    def _follow_condition(self, func: Any, args: Sequence[Any], outputs: torch.Tensor) -> None:
        if outputs.numel() != 1 or not isinstance(args[0], FakeTensor) or storage_key(args[0]) not in self._bounds:
            return
        other = args[1] if isinstance(args[1], int | float) else self.of(args[1])
        if other is not None:
            self._conditions[storage_key(outputs)] = _LARGE[func](self._bounds[storage_key(args[0])], other)


def _largest(bounds: Sequence[int | None]) -> int | None:
    known = [bound for bound in bounds if bound is not None]
    return max(known) if known and len(known) == len(bounds) else None
