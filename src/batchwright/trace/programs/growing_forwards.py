"""A generation grows: each forward gets a token more than the one before, and leaves so much more behind.

What is handed to a model and what comes out are taken apart: what stays the same from call to call, in whatever lists
and objects it lies, and the numbers that change, which are sizes and positions.

Promises:
- a call is predicted only if three in a row, of the same kind, differed by the same, and no number of theirs fell;
- what they left behind was memory of their outputs alone, so that nothing else of the program grew;
- every so often a call is followed again, and has to be what was predicted; otherwise all begins anew.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

if TYPE_CHECKING:
    from collections.abc import Iterator

# So many calls in a row show how they grow, and after so many more the next one is followed again.
_FOLLOWED, _LEFT_OUT = 3, 64
# Objects in objects are taken apart so far.
_DEEPEST = 8


class _NotAlikeError(Exception):
    """What a call was given or left is of no kind that can be made again."""


@dataclass
class Parts:
    """Values taken apart: `kind` is what must be the same, `numbers` are what may grow."""

    numbers: list[int] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    kind: Any = None

    @staticmethod
    def of(values: Any) -> Parts | None:
        """Take apart what a call is given; None if it cannot be.

        >>> Parts.of([torch.zeros(2, 3), 7, "a"]).numbers
        [7, 24, 2, 3, 3, 1, 0]
        """
        try:
            return _take_apart(values)
        except _NotAlikeError:
            return None


@dataclass
class Use:
    """Bytes that a call left behind, and the most that it held while it ran."""

    growth: int = 0
    extra: int = 0


@dataclass(frozen=True)
class Call:
    """The numbers that a call was given and that it left, and the most that it held while it ran."""

    given: tuple[int, ...]
    left: tuple[int, ...]
    extra: int


class GrowingForwards:
    """Calls of one module in one state, in order."""

    def __init__(self) -> None:
        self._kinds: tuple[Any, Any] | None = None
        self._calls: deque[Call] = deque(maxlen=_FOLLOWED)
        self._num_left_out = 0

    def predict(self, given: Parts | None) -> Call | None:
        """Return what a call would do if it goes on as those before; None if it has to be followed."""
        if given is None or self._kinds is None or given.kind != self._kinds[0] or self._num_left_out >= _LEFT_OUT:
            return None
        return self._go_on(tuple(given.numbers))

    def leave_out(self, call: Call, given: Parts) -> Any:
        """Make the outputs that were predicted, and go on from them."""
        assert self._kinds is not None
        self._calls.append(call)
        self._num_left_out += 1
        return _put_together(self._kinds[1], call.left, given)

    def learn(self, given: Parts | None, given_after: Parts | None, outputs: Any, use: Use) -> None:
        """See what a call that was followed left behind, and whether what it was given is as it was."""
        left = (
            None
            if given is None or _is_changed(given, given_after)
            else _take_apart_outputs(outputs, given, use.growth)
        )
        if given is None or left is None:
            self._kinds = None
            self._calls.clear()
            return
        call, kinds = Call(tuple(given.numbers), tuple(left.numbers), use.extra), (given.kind, left.kind)
        predicted = self._go_on(call.given) if kinds == self._kinds else None
        if kinds != self._kinds or (self._num_left_out and (predicted is None or predicted.left != call.left)):
            self._calls.clear()
        self._kinds, self._num_left_out = kinds, 0
        self._calls.append(call)

    def _go_on(self, given: tuple[int, ...]) -> Call | None:
        if len(self._calls) < _FOLLOWED:
            return None
        first, second, third = self._calls
        step, left_step = _difference(first.given, second.given), _difference(second.left, third.left)
        is_growing = min(step, default=0) >= 0 and max(step, default=0) > 0 and min(left_step, default=0) >= 0
        is_steady = step == _difference(second.given, third.given) == _difference(third.given, given)
        if not is_growing or not is_steady or left_step != _difference(first.left, second.left):
            return None
        left = tuple(number + more for number, more in zip(third.left, left_step, strict=True))
        return Call(given, left, third.extra + max(0, third.extra - first.extra) // 2)


def _difference(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(b - a for a, b in zip(before, after, strict=True))


def _is_changed(before: Parts, after: Parts | None) -> bool:
    return after is None or (before.kind, before.numbers, [*map(id, before.tensors)]) != (
        *(after.kind, after.numbers),
        [*map(id, after.tensors)],
    )


def _take_apart_outputs(outputs: Any, given: Parts, growth: int) -> Parts | None:
    """Take apart what a call left; None if that is not all that it left, or lies elsewhere than on the card."""
    try:
        left = _take_apart(outputs, given.tensors)
    except _NotAlikeError:
        return None
    with torch._C.DisableTorchFunction():
        if any(not isinstance(tensor, FakeTensor) or tensor.requires_grad for tensor in left.tensors):
            return None
        sizes = {_key(tensor): tensor.untyped_storage().nbytes() for tensor in left.tensors}
        if sizes.keys() & {_key(tensor) for tensor in given.tensors}:
            return None
    return left if left.tensors and growth == sum(sizes.values()) else None


def _key(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _take_apart(values: Any, given: list[torch.Tensor] | None = None) -> Parts:
    """Take values apart; a tensor that was `given` is no part of them, but the one in its place."""
    parts = Parts()
    structure = _take(values, parts, given or [], 0)
    layouts = []
    with torch._C.DisableTorchFunction():
        storages: dict[int, int] = {}
        for tensor in parts.tensors:
            place = storages.setdefault(_key(tensor), len(storages))
            parts.numbers.append(tensor.untyped_storage().nbytes())
            parts.numbers += map(int, (*tensor.shape, *tensor.stride(), tensor.storage_offset()))
            layouts.append((tensor.dtype, tensor.device, tensor.dim(), place))
    parts.kind = structure, tuple(layouts)
    try:
        hash(parts.kind)
    except TypeError:
        raise _NotAlikeError from None
    return parts


# Functions of a module, not of each other: a cycle of references would hold tensors until Python looks for cycles.
def _take(value: Any, parts: Parts, given: list[torch.Tensor], depth: int) -> Any:
    leaves, structure = tree_flatten(value)
    return structure, tuple([_take_leaf(leaf, parts, given, depth) for leaf in leaves])


def _take_leaf(leaf: Any, parts: Parts, given: list[torch.Tensor], depth: int) -> Any:
    if isinstance(leaf, torch.Tensor):
        for source, tensors in (("given", given), ("tensor", parts.tensors)):
            for place, known in enumerate(tensors):
                if known is leaf:
                    return source, place
        parts.tensors.append(leaf)
        return "tensor", len(parts.tensors) - 1
    if type(leaf) is int:
        parts.numbers.append(leaf)
        return "number", None
    if not hasattr(leaf, "__dict__") or isinstance(leaf, nn.Module | type) or callable(leaf):
        return "same", leaf
    if depth == _DEEPEST or hasattr(leaf, "__slots__"):
        raise _NotAlikeError
    return "object", (type(leaf), tuple(vars(leaf)), _take([*vars(leaf).values()], parts, given, depth + 1))


def _put_together(kind: Any, numbers: tuple[int, ...], given: Parts) -> Any:
    """Make values of a kind, with other numbers: their tensors have memory of their own, and no values."""
    structure, layouts = kind
    num_sizes = sum(2 + 2 * dim for _, _, dim, _ in layouts)
    plain, sizes = iter(numbers[: len(numbers) - num_sizes]), iter(numbers[len(numbers) - num_sizes :])
    storages: dict[int, torch.Tensor] = {}
    tensors = []
    for dtype, device, dim, place in layouts:
        num_bytes = next(sizes)
        shape, stride, offset = tuple(islice(sizes, dim)), tuple(islice(sizes, dim)), next(sizes)
        if place not in storages:
            storages[place] = torch.empty(num_bytes // dtype.itemsize, dtype=dtype, device=device)
        tensors.append(storages[place].view(dtype).as_strided(shape, stride, offset))
    return _put(structure, {"given": given.tensors, "tensor": tensors}, plain)


def _put(structure: Any, tensors: dict[str, list[torch.Tensor]], numbers: Iterator[int]) -> Any:
    described, leaves = structure
    return tree_unflatten([_put_leaf(what, value, tensors, numbers) for what, value in leaves], described)


def _put_leaf(what: str, value: Any, tensors: dict[str, list[torch.Tensor]], numbers: Iterator[int]) -> Any:
    if what == "number":
        return next(numbers)
    if what == "same":
        return value
    if what != "object":
        return tensors[what][value]
    cls, names, held = value
    instance = cls.__new__(cls)
    vars(instance).update(zip(names, _put(held, tensors, numbers), strict=True))
    return instance
