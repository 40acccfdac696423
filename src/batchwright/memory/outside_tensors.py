"""Real tensors that a step reads though the workload did not hand them in: a teacher, a constant in the loss.

They were allocated before anything was asked, so the trace cannot make them fake. They are counted from where they
are first read, named with the user's line, and left as they were found.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import batchwright
from batchwright.memory.known_values import largest_known_bytes

if TYPE_CHECKING:
    import traceback
    from collections.abc import Iterable, Iterator

_OURS = (str(Path(torch.__file__).parent), str(Path(batchwright.__file__).parent), "<")
# Making a batch reads the dataset's own samples, and literals are lifted into the trace: neither is from outside.
_READS_SAMPLES = ("build", "batch")
_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


class OutsideTensors:
    """Remembers each real tensor that was met, and the gradient it had."""

    def __init__(self) -> None:
        self._met: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def meet(self, func: Any, values: Iterable[Any], phase: str) -> Iterator[torch.Tensor]:
        """Yield the real tensors among an operator's arguments that are large and new."""
        for tensor in _real_tensors(values):
            key = tensor.untyped_storage()._cdata
            if key in self._met:
                continue
            self._met[key] = (tensor, tensor.grad if tensor.is_leaf else None)
            is_large = tensor.untyped_storage().nbytes() > largest_known_bytes(tensor)
            if is_large and phase not in _READS_SAMPLES and func not in _LIFTS:
                yield tensor

    def give_back(self) -> None:
        """Put back the gradients that the trace may have written."""
        for tensor, gradient in self._met.values():
            if tensor.is_leaf and tensor.requires_grad and tensor.grad is not gradient:
                tensor.grad = gradient


def _real_tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Tensors with memory among arguments. Asked at every operator, so it walks lists itself instead of a pytree."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _real_tensors(value)
        elif isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) and value.device.type != "meta":
            yield value


def part_of_outside(tensor: torch.Tensor) -> str:
    """A parameter is a weight, whoever owns it; anything else came in with the data."""
    return "weights" if isinstance(tensor, nn.Parameter) else "inputs"


def users_line(frames: Iterable[traceback.FrameSummary]) -> str:
    """The innermost line that is neither torch's nor ours."""
    theirs = [frame for frame in frames if not frame.filename.startswith(_OURS)]
    return f"{theirs[-1].filename}:{theirs[-1].lineno}: {theirs[-1].line}" if theirs else ""
