"""Errors of Python's that pass through torch's own code while tensors are on the simulated device.

On its way out of torch's engine an error meets guards that ask the device for its type, in Python, with the error still
pending; Python then objects, in a place where nothing may be raised, and the process is ended. So the one who is asked
takes the pending error aside. What comes out of torch is then an error about a missing error, and the one that was
taken is raised in its place.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch

from batchwright.simulated.torch_patches import Patch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_taken: list[BaseException] = []


def make_guard() -> Any:
    """Return the guard of the device: it does nothing, and takes pending errors aside when it is asked for its type."""

    class Guard(torch._C._acc.DeviceGuard):
        # All it needs is bound here: with an error pending, looking up a name may fail for that reason alone.
        def type_(
            self,
            # A call into Python's own library raises whatever is pending.
            raise_pending: Callable[[], int] = ctypes.pythonapi.PyErr_CheckSignals,
            take: Callable[[BaseException], None] = _taken.append,
            kind: Any = torch._C._autograd.DeviceType.PrivateUse1,
        ) -> Any:
            try:
                raise_pending()
            except BaseException as error:
                take(error)
            return kind

    return Guard()


def raising_what_was_taken(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call into torch; where its error is only that there is none, raise the one that was taken aside."""
    try:
        return work(*args, **kwargs)
    except SystemError:
        if not _taken:
            raise
        error = _taken[0]
        _taken.clear()
        raise error from None


def forget_taken() -> None:
    """Forget errors that were taken aside and never raised again."""
    _taken.clear()


def errors_put_back() -> Iterator[Patch]:
    """Have every backward pass raise what was raised in it."""
    engine: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        return raising_what_was_taken(engine, *args, **kwargs)

    yield Patch(torch.autograd, "_engine_run_backward", run_backward)
