"""How the tokens of a mixture of experts are taken to be shared: an assumption, as a traced router computes no values.

A mask that comes from a one-hot choice has no values, but the share of its set entries is known: one in each row.
"balanced" spreads them evenly over the choices; "worst" lets every token fall to the one at hand. Either way each
choice is taken by some token, so which choices were taken is known. Where choices are counted (`histc`, `bincount`),
the counts are learnt: even ones, or all of them the first expert's. Counts that ranks send each other are those of
ranks alike.

Promises:
- only masks made by a one-hot choice, and counts of choices, are answered by an assumption, and the result says which.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily

from batchwright.trace.known_values import KnownValues, storage_key
from batchwright.units import one_of

_aten = torch.ops.aten

ASSUMPTIONS = ("balanced", "worst")

_KEEPS_SHARE = {_aten._to_copy.default, _aten.clone.default, _aten.ne.Scalar}
_KEEPS_COUNTS = {_aten._to_copy.default, _aten.clone.default}
_ABOVE_ZERO: dict[Any, int] = {_aten.gt.Scalar: 0, _aten.ne.Scalar: 0, _aten.ge.Scalar: 1}
# Operators that choose among the entries of one dimension: where their indices come out.
_CHOOSES: dict[Any, int] = {
    **dict.fromkeys((_aten.topk.default, _aten.sort.default, _aten.max.dim, _aten.min.dim), 1),
    **dict.fromkeys((_aten.argmax.default, _aten.argmin.default), 0),
}
# How ranks send each other counts of tokens: the first makes its result, the second is handed it.
_EXCHANGES = (torch.ops._c10d_functional.all_to_all_single.default, torch.ops.c10d.alltoall_base_.default)

_c10d: Any = dist.distributed_c10d


def _group_named(name: str) -> Any:
    return _c10d._resolve_process_group(name)


class Routing:
    """Remembers which storages hold one-hot choices, and answers `nonzero` on them."""

    def __init__(self, assumption: str, values: KnownValues) -> None:
        self.assumption = one_of("routing", assumption, ASSUMPTIONS)
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
        if self.assumption == "balanced":
            return "routing balanced: choices (of experts, or classes that are counted) spread evenly"
        return f"routing {self.assumption}: tokens all sent to one expert"

    def follow(self, func: Callable[..., Any], args: Sequence[Any], outputs: Any) -> None:
        """Notice a choice being made, one-hot rows made of it, counts of those, and copies."""
        if func in _CHOOSES:
            self._notice_range(func, args, outputs)
        elif func is _aten.histc.default:
            self._learn_counts(outputs, args[0])
        elif func in _EXCHANGES:
            self._learn_exchanged(func, args, outputs)
        elif func is _aten.scatter_.value and args[3] == 1:
            # A one-hot may have more classes than there are to choose from: a class for padding, say.
            classes = outputs.shape[args[1]]
            self._choices[storage_key(outputs)] = min(classes, self._ranges.get(storage_key(args[2]), classes))
        elif func is _aten.eq.Tensor and self._is_one_hot(args[0], args[1]):
            # How torch makes a one-hot of a tensor that has no values.
            classes = args[1].numel()
            self._choices[storage_key(outputs)] = min(classes, self._ranges.get(storage_key(args[0]), classes))
        elif args and isinstance(args[0], torch.Tensor) and storage_key(args[0]) in self._choices:
            choices = self._choices[storage_key(args[0])]
            if func in _KEEPS_SHARE:
                self._choices[storage_key(outputs)] = choices
            elif func is _aten.sum.dim_IntList and outputs.dim() == 1 and outputs.numel() >= choices:
                self._counts[storage_key(outputs)] = choices
        elif args and isinstance(args[0], torch.Tensor) and storage_key(args[0]) in self._counts:
            if func in _KEEPS_COUNTS or (func in _ABOVE_ZERO and args[1] == _ABOVE_ZERO[func]):
                self._counts[storage_key(outputs)] = self._counts[storage_key(args[0])]
        elif func in _KEEPS_COUNTS and storage_key(args[0]) in self._ranges:
            self._ranges[storage_key(outputs)] = self._ranges[storage_key(args[0])]

    def _is_one_hot(self, indices: torch.Tensor, classes: torch.Tensor) -> bool:
        """Whether indices are compared each with all the classes, in their order."""
        if classes.dim() != 1 or indices.dim() == 0 or indices.shape[-1] != 1:
            return False
        return self._values.holds(classes, lambda: torch.arange(classes.numel()))

    def _notice_range(self, func: Callable[..., Any], args: Sequence[Any], outputs: Any) -> None:
        position = _CHOOSES[func]
        at = 2 if func is _aten.topk.default else 1
        # Of argmax without a dimension the range is that of all elements.
        dim = args[at] if len(args) > at else None if _CHOOSES[func] == 0 else -1
        if dim is not None:
            indices = outputs if isinstance(outputs, torch.Tensor) else outputs[position]
            self._ranges[storage_key(indices)] = args[0].shape[dim]

    def range_of(self, indices: torch.Tensor) -> int | None:
        """How many different values indices can take, if they were chosen."""
        return self._ranges.get(storage_key(indices))

    def _learn_counts(self, counts: torch.Tensor, chosen: torch.Tensor) -> None:
        """Learn how often each of the choices was made."""
        choices, total = self.range_of(chosen), chosen.numel()
        if choices is None or counts.numel() < choices:
            return
        self.was_assumed = True
        even = [total // choices + (number < total % choices) for number in range(choices)]
        by_choice = [total, *[0] * (choices - 1)] if self.assumption == "worst" else even
        padded = [*by_choice, *[0] * (counts.numel() - choices)]
        self._values.learn(counts, lambda: torch.tensor(padded, dtype=counts.dtype))

    def _learn_exchanged(self, func: Callable[..., Any], args: Sequence[Any], outputs: Any) -> None:
        """Learn what ranks alike send this one: each of them what this one sends to itself."""
        is_new = func is _EXCHANGES[0]
        sent, received = (args[0], outputs) if is_new else (args[1], args[0])
        known = self._values.real(sent)
        self._values.forget(storage_key(received))
        group = _group_named(args[3]) if is_new else dist.ProcessGroup.unbox(args[2])
        if known is None or sent.is_floating_point() or sent.shape[0] % group.size():
            return
        with unset_fake_temporarily():
            own = known.chunk(group.size())[group.rank()]
            twin = own.repeat(group.size(), *[1] * (own.dim() - 1))
        if twin.shape == received.shape:
            self._values.learn(received, lambda: twin)

    def answer(self, func: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Answer an operator whose shape depends on the choice; None for all others."""
        if func is _aten.bincount.default and (choices := self.range_of(args[0])) is not None:
            least = args[2] if len(args) > 2 else 0
            counts = args[0].new_empty(max(choices, least), dtype=torch.int64)
            self._learn_counts(counts, args[0])
            return counts
        if func is not _aten.nonzero.default:
            return None
        mask = args[0]
        taken, choices = self._counts.get(storage_key(mask)), self._choices.get(storage_key(mask))
        if taken is not None:
            self.was_assumed = True
            positions = mask.new_empty((taken, 1), dtype=torch.int64)
            self._values.learn(positions, lambda: torch.arange(taken).unsqueeze(1))
            return positions
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
