"""Faults that a step of the state table meets; their counters live here, where nothing looks from the step.

A fault is set for one cell and fires at one place from the n-th time on that the place is passed.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

NONE = "none"
PLACES: dict[str, tuple[str, type[BaseException] | None]] = {
    NONE: ("", None),
    "an error in the loss": ("loss", KeyError),
    "an error in a backward hook": ("backward", ValueError),
    "an error in the optimizer's step": ("step", RuntimeError),
    "an error in a later batch": ("batch", IndexError),
    "out of memory": ("loss", torch.OutOfMemoryError),
    "an interrupt": ("loss", KeyboardInterrupt),
    "a loss that is no scalar": ("value", None),
    "an exit": ("loss", SystemExit),
}


class Fault:
    """The fault of this cell."""

    def __init__(self, name: str, first: int, at_call: Callable[[], object] | None) -> None:
        self.place, self.error = PLACES[name]
        self.first, self.at_call = first, at_call
        self.passed = self.fired = 0


def set_fault(name: str, *, first: int = 1, at_call: Callable[[], object] | None = None) -> None:
    """Have a fault fire from the `first` time on that its place is passed; `at_call` looks at calls as they begin."""
    # In a place that no function of the step leads to: what a step changes is put back, and this must not be.
    sys.state_table_fault = Fault(name, first, at_call)  # type: ignore[attr-defined]


def times_fired() -> int:
    """Return how often it did."""
    return int(sys.state_table_fault.fired)  # type: ignore[attr-defined]


def begin_call() -> None:
    """Begin a call of a training function."""
    look = sys.state_table_fault.at_call  # type: ignore[attr-defined]
    if look is not None:
        look()


def _is_due(place: str) -> bool:
    fault = sys.state_table_fault  # type: ignore[attr-defined]
    if place != fault.place:
        return False
    fault.passed += 1
    fault.fired += fault.passed >= fault.first
    return bool(fault.passed >= fault.first)


def at(place: str) -> None:
    """Pass a place, and fail if the fault is there and due."""
    if _is_due(place):
        raise sys.state_table_fault.error(f"planted: {place}")  # type: ignore[attr-defined]


def returned(value: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Return the loss, or, if that is the fault, something that is none."""
    at("loss")
    if output.requires_grad:
        output.register_hook(_in_backward)
    return output if _is_due("value") else value


def _in_backward(gradient: torch.Tensor) -> None:
    at("backward")


def in_step(*_: object) -> None:
    """Pass the optimizer's step; registered as its hook."""
    at("step")
