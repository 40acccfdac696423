"""What a traced step runs on: the kernels of a device, and its memory, as two small protocols.

A trace over fake tensors knows operators and storages. How a device runs an operator (the copies its kernels hold, the
layout of what they make, what its libraries keep) and what happens when memory is taken there, is asked of these two.
The host's are `trace/cpu_kernels.py` and `trace/storages.py`, a simulated card's `simulated/operators/cuda_kernels.py`
and `simulated/card.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    Operator = Callable[..., Any]
    Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]
    Owner = tuple[str, str, str]
    """Who takes memory: operator, module, phase."""


class Moment(NamedTuple):
    """One thing that happens inside an operator: a copy is made or dropped, or an output is made."""

    num_bytes: int = 0
    output: torch.Tensor | None = None


def around(copies: list[int], outputs: list[Moment]) -> list[Moment]:
    """Add copies that are made after the outputs, and dropped when the operator ends."""
    return [*outputs, *map(Moment, copies), *(Moment(-num_bytes) for num_bytes in reversed(copies))]


class Kernels(Protocol):
    """How a device runs operators."""

    def following(self) -> AbstractContextManager[Any]:
        """Return what must be entered while an operator is followed."""

    def take_arguments(
        self, func: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any], mode: FakeTensorMode
    ) -> Arguments:
        """Return an operator's arguments as the device takes them."""

    def library_bytes(self, func: Operator, phase: str) -> int:
        """Return the bytes that a library takes for itself at this operator, and keeps."""

    def shape_rule(self, func: Operator) -> Operator | None:
        """Return what tells shapes and layouts of an operator's results; None if it makes nothing."""

    def moments_of(
        self, func: Operator, args: Sequence[Any], outputs: Sequence[torch.Tensor], kwargs: Mapping[str, Any]
    ) -> list[Moment]:
        """Return what happens inside an operator, in order: each of its outputs once, and the copies around them."""


class TracedMemory(Protocol):
    """The memory whose storages are followed."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in this memory."""

    def malloc(self, num_bytes: int, owner: Owner) -> Any:
        """Take memory, and return a handle to give it back by."""

    def free(self, block: Any) -> None:
        """Give memory back."""
