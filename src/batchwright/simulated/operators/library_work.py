"""Kernels of libraries that stand-ins leave out, told to whoever counts the work of a step.

A stand-in for cuDNN's recurrent layers or bitsandbytes' products makes what the kernel makes and computes nothing, so
no operator shows what the real one does. It says so here; a trace listens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class LibraryWork(NamedTuple):
    """What a library's kernel does."""

    operator: str
    kind: str
    flops: int
    read_bytes: int
    written_bytes: int
    kernels: int
    dtype: torch.dtype


class Listening(threading.local):
    """Who listens on this thread."""

    listener: Callable[[LibraryWork], None] | None = None


_listening = Listening()


def listen(listener: Callable[[LibraryWork], None] | None) -> Callable[[LibraryWork], None] | None:
    """Have somebody listen on this thread, and return who did before."""
    before, _listening.listener = _listening.listener, listener
    return before


def report(work: LibraryWork) -> None:
    """Tell of work, if anybody listens."""
    if _listening.listener is not None:
        _listening.listener(work)
