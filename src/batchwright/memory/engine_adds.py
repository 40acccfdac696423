"""Which additions of a backward are the autograd engine's own, and which of those a real run makes in place.

Where gradients of one tensor meet, the engine adds them up. In a real run it adds into the gradient that came first if
nobody else holds it (torch's input_buffer.cpp); under a dispatch mode, which it takes for a tensor subclass, it always
makes a new one. A trace that took the latter for the truth would be too high by one gradient.

Promises:
- an addition counts as the engine's only if the engine itself called it, and the node that is running hands a gradient
  to a place that receives several;
- whether the first gradient is held by anybody else is asked of its reference counts, compared with those of one that
  is known to be alone: counted once in each process, so no number here depends on the version of torch or Python.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import FrameType

    Place = tuple[int, int]
    """One input of one autograd node: the node's number, and which of its inputs."""

ADD = torch.ops.aten.add.Tensor
_ENGINE: Any = getattr(getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None)
# What stands between an operator and the `__torch_dispatch__` of a mode.
_BETWEEN = ("torch/_dynamo/eval_frame.py", "torch/_compile.py", "memory/trace.py", "memory/engine_adds.py")


class EngineAdds:
    """Recognises, in one trace, additions that a real backward makes in place."""

    def __init__(self) -> None:
        self._alone = counts_when_alone()
        self._roots: tuple[int, ...] = ()
        self._meeting_places: set[Place] = set()
        # The storages that the node which is running has made so far.
        self._node = -1
        self._of_node: set[int] = set()

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take note of what an operator of a backward has made."""
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return
        number = node._sequence_nr()
        if number != self._node:
            self._node = number
            self._of_node.clear()
        self._of_node.update(_storage_key(tensor) for tensor in tensors)

    def is_in_place(self, args: Sequence[Any], counts: tuple[int, ...] | None) -> bool:
        """Whether a real run would add into `args[0]`, whose `counts` were taken where the mode was entered."""
        if counts is None or counts != self._alone or torch.is_grad_enabled():
            return False
        first, second = args[0], args[1]
        if not isinstance(second, torch.Tensor) or first.shape != second.shape or first.dtype != second.dtype:
            return False
        frame = engine_frame()
        node: Any = torch._C._current_autograd_node()
        if frame is None or node is None or not _is_dense(first):
            return False
        places = list(_places_after(node))
        if not self._meeting_places_of(frame).intersection(places):
            return False
        # A formula may add tensors that it has made itself, and does that out of place. Only a node that hands two
        # gradients to one place (x * x) has the engine add such.
        return not self.is_of_the_node(first) or len(set(places)) < len(places)

    def is_of_the_node(self, tensor: torch.Tensor) -> bool:
        """Whether the node that is running has made this tensor."""
        node: Any = torch._C._current_autograd_node()
        return node is not None and node._sequence_nr() == self._node and _storage_key(tensor) in self._of_node

    def _meeting_places_of(self, frame: FrameType) -> set[Place]:
        """The places that receive more than one gradient in the backward that this frame runs."""
        nodes = [_node_of(root) for root in frame.f_locals.get("t_outputs", ())]
        roots = tuple(node._sequence_nr() for node in nodes if node is not None)
        if roots != self._roots:
            self._roots = roots
            self._meeting_places = _meeting_places(nodes)
        return self._meeting_places


def engine_frame() -> FrameType | None:
    """The frame that runs a backward, if the engine called this operator and no Python in between."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.replace("\\", "/").endswith(_BETWEEN):
        frame = frame.f_back
    return frame if frame is not None and frame.f_code is _ENGINE else None


def counts_of(args: Sequence[Any]) -> tuple[int, ...]:
    """How many hold the first of an operator's arguments: in C++, in Python, and its storage."""
    storage = args[0].untyped_storage()
    return args[0]._use_count(), sys.getrefcount(args[0]), torch._C._storage_Use_Count(storage._cdata)


@cache
def counts_when_alone() -> tuple[int, ...] | None:
    """The counts of a gradient that only the engine holds; None if this torch does not show them."""
    seen: list[tuple[int, ...]] = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            counts = counts_of(args) if func is ADD else None
            if counts is not None and engine_frame() is not None:
                seen.append(counts)
            return func(*args, **(kwargs or {}))

    look: Any = Look()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad(), FakeTensorMode(), look:
            leaf = torch.ones(2, 2, requires_grad=True)
            # Two gradients that are fresh results meet at `twice`.
            twice = leaf * 2
            (twice.sin().sum() + (twice.cos() * 2).sum()).backward()
    except (AttributeError, RuntimeError):
        return None
    return seen[0] if len(seen) == 1 else None


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements lie side by side, each in a place of its own, in whatever order."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _meeting_places(roots: Iterable[Any]) -> set[Place]:
    received: Counter[Place] = Counter()
    waiting = [node for node in roots if node is not None]
    seen = {node._sequence_nr() for node in waiting}
    while waiting:
        for node, position in waiting.pop().next_functions:
            if node is None:
                continue
            received[_number(node), position] += 1
            if _number(node) not in seen:
                seen.add(_number(node))
                waiting.append(node)
    return {place for place, count in received.items() if count > 1}


def _places_after(node: Any) -> Iterable[Place]:
    return ((_number(after), position) for after, position in node.next_functions if after is not None)


def _number(node: Any) -> int:
    """The number of a node. Those that write into `.grad` all have the same one; their tensor tells them apart."""
    variable = getattr(node, "variable", None) if node.name() == "torch::autograd::AccumulateGrad" else None
    return node._sequence_nr() if variable is None else -id(variable)


def _node_of(root: Any) -> Any:
    return getattr(root, "node", None) if not isinstance(root, torch.Tensor) else root.grad_fn


def _storage_key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
