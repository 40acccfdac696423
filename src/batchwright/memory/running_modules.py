"""Which module is running: in forward by its call, in backward by the number of the node that a forward left behind."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from batchwright.simulated.torch_patches import Patch

if TYPE_CHECKING:
    from collections.abc import Iterator


class RunningModules:
    """The names of a model's modules, and the stack of those that run."""

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        # Which module ran when an autograd node was made, so that its backward can be laid at the same door.
        self._of_node: dict[int, str] = {}

    def learn(self, model: nn.Module) -> None:
        """Learn the names of a model's modules."""
        self._names.update({module: name for name, module in model.named_modules()})

    def seeing_calls(self) -> Iterator[Patch]:
        """See modules begin and end."""
        # Not by hooks: torch's global ones are every thread's, and a module with hooks of its own leaves fast paths.
        call: Any = nn.Module._call_impl

        def call_and_note(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._stack.append(self._names.get(module, self._stack[-1] if self._stack else ""))
            try:
                return call(module, *args, **kwargs)
            finally:
                if self._stack:
                    self._stack.pop()

        yield Patch(nn.Module, "_call_impl", call_and_note)

    @property
    def are_running(self) -> bool:
        """Whether any module is running its forward."""
        return bool(self._stack)

    def clear(self) -> None:
        """Begin a phase in which none is running."""
        self._stack.clear()

    def note_node(self) -> None:
        """Note whose operator has just been numbered: its backward will carry the same number."""
        if self._stack:
            self._of_node[torch._C._autograd._get_sequence_nr() - 1] = self._stack[-1]

    def now(self, *, in_backward: bool) -> str:
        """Return the name of the module that is running, or whose backward is."""
        if self._stack:
            return self._stack[-1]
        node = torch._C._current_autograd_node() if in_backward else None
        return self._of_node.get(node._sequence_nr(), "") if node is not None else ""
