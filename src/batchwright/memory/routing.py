"""How many entries of a mask are set, where no values are known: the routing of a mixture of experts.

A fake mask has no values, so `nonzero` has no length. For masks that come from a one-hot choice the share of set
entries is known all the same: one in each row. "balanced" spreads them evenly over the choices; "worst" lets every
token fall to the one at hand. Either way each choice is taken by some token, so which choices were taken is known.

Promises:
- only masks made by a one-hot choice, and counts of such, are answered; any other is an error that names the operator;
- the assumption that was made is said in the result.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from batchwright.errors import InvalidInputError
from batchwright.units import shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchwright.memory.known_values import KnownValues

ASSUMPTIONS = ("balanced", "worst")

_aten = torch.ops.aten
_KEEPS_SHARE = {_aten._to_copy.default, _aten.clone.default, _aten.ne.Scalar}
_KEEPS_COUNTS = {_aten._to_copy.default, _aten.clone.default}
_ABOVE_ZERO: dict[Any, int] = {_aten.gt.Scalar: 0, _aten.ne.Scalar: 0, _aten.ge.Scalar: 1}
# Operators that choose among the entries of one dimension: where their indices come out.
_CHOOSES: dict[Any, int] = {_aten.topk.default: 1, _aten.sort.default: 1, _aten.argmax.default: 0}


class Routing:
    """Remembers which storages hold one-hot choices, and answers `nonzero` on them."""

    def __init__(self, assumption: str, values: KnownValues) -> None:
        if assumption not in ASSUMPTIONS:
            raise InvalidInputError(
                f"routing must be one of {', '.join(ASSUMPTIONS)}; received {shortened(assumption)}."
            )
        self.assumption = assumption
        self._values = values
        # By storage: how many different values its indices take; how many choices its one-hot rows are spread over;
        # how many choices it counts, or says of which were taken.
        self._ranges: dict[int, int] = {}
        self._choices: dict[int, int] = {}
        self._counts: dict[int, int] = {}
        self.was_assumed = False

    @property
    def note(self) -> str:
        """What was assumed, in words."""
        spread = "spread evenly over the experts" if self.assumption == "balanced" else "all sent to one expert"
        return f"routing {self.assumption}: tokens {spread}"

    def follow(self, func: Callable[..., Any], args: Sequence[Any], outputs: Any) -> None:
        """Notice a choice being made, one-hot rows made of it, counts of those, and copies."""
        if func in _CHOOSES:
            self._notice_range(func, args, outputs)
        elif func is _aten.scatter_.value and args[3] == 1:
            # A one-hot may have more classes than there are to choose from: a class for padding, say.
            classes = outputs.shape[args[1]]
            self._choices[_key(outputs)] = min(classes, self._ranges.get(_key(args[2]), classes))
        elif func is _aten.eq.Tensor and self._is_one_hot(args[0], args[1]):
            # How torch makes a one-hot of a tensor that has no values.
            classes = args[1].numel()
            self._choices[_key(outputs)] = min(classes, self._ranges.get(_key(args[0]), classes))
        elif args and isinstance(args[0], torch.Tensor) and _key(args[0]) in self._choices:
            choices = self._choices[_key(args[0])]
            if func in _KEEPS_SHARE:
                self._choices[_key(outputs)] = choices
            elif func is _aten.sum.dim_IntList and outputs.dim() == 1 and outputs.numel() >= choices:
                self._counts[_key(outputs)] = choices
        elif args and isinstance(args[0], torch.Tensor) and _key(args[0]) in self._counts:
            if func in _KEEPS_COUNTS or (func in _ABOVE_ZERO and args[1] == _ABOVE_ZERO[func]):
                self._counts[_key(outputs)] = self._counts[_key(args[0])]
        elif func in _KEEPS_COUNTS and _key(args[0]) in self._ranges:
            self._ranges[_key(outputs)] = self._ranges[_key(args[0])]

    def _is_one_hot(self, indices: torch.Tensor, classes: torch.Tensor) -> bool:
        """Whether indices are compared each with all the classes, in their order."""
        if classes.dim() != 1 or indices.dim() == 0 or indices.shape[-1] != 1:
            return False
        return self._values.holds(classes, lambda: torch.arange(classes.numel()))

    def _notice_range(self, func: Callable[..., Any], args: Sequence[Any], outputs: Any) -> None:
        position = _CHOOSES[func]
        at = 2 if func is _aten.topk.default else 1
        # Of argmax without a dimension the range is that of all elements.
        dim = args[at] if len(args) > at else None if func is _aten.argmax.default else -1
        if dim is not None:
            indices = outputs if isinstance(outputs, torch.Tensor) else outputs[position]
            self._ranges[_key(indices)] = args[0].shape[dim]

    def answer(self, func: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Answer an operator whose shape depends on the choice; None for all others."""
        if func is not _aten.nonzero.default:
            return None
        mask = args[0]
        taken, choices = self._counts.get(_key(mask)), self._choices.get(_key(mask))
        if taken is not None:
            self.was_assumed = True
            found = mask.new_empty((taken, 1), dtype=torch.int64)
            self._values.learn(found, lambda: torch.arange(taken).unsqueeze(1))
            return found
        if choices is None:
            return None
        self.was_assumed = True
        # Of `choices` entries along one dimension one is set; a mask that lacks that dimension holds its share.
        count = mask.numel() if self.assumption == "worst" else math.ceil(mask.numel() / choices)
        return mask.new_empty((count, mask.dim()), dtype=torch.int64)

    def forget(self, storage_key: int) -> None:
        """Drop a storage that died."""
        for kept in (self._ranges, self._choices, self._counts):
            kept.pop(storage_key, None)


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
