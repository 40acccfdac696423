"""Be told of a backward pass before it begins: hooks on weights come too late, when the graph behind them is gone.

Promises:
- `torch.autograd.backward` is replaced only while somebody listens, and is as it was after the last has left;
- what a listener does cannot fail the user's backward; passes within a pass are not told of.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    Listener = Callable[[Any, Any], None]

_lock = threading.Lock()
_listeners: list[Listening] = []
_original: Callable[..., Any] = torch.autograd.backward
_within = threading.local()


class Listening:
    """A listener, until it is removed."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener

    def remove(self) -> None:
        """Listen no more."""
        with _lock:
            if self in _listeners:
                _listeners.remove(self)
            if not _listeners and torch.autograd.backward is _told:
                torch.autograd.backward = _original


def listen(listener: Listener) -> Listening:
    """Call `listener(tensors, their gradients)` before every backward of this process."""
    global _original
    mine = Listening(listener)
    with _lock:
        _listeners.append(mine)
        if torch.autograd.backward is not _told:
            _original = torch.autograd.backward
            functools.update_wrapper(_told, _original)
            torch.autograd.backward = _told
    return mine


def _told(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
    if getattr(_within, "is_on", False):
        return _original(tensors, grad_tensors, *args, **kwargs)
    _within.is_on = True
    try:
        for each in tuple(_listeners):
            each.listener(tensors, grad_tensors)
        return _original(tensors, grad_tensors, *args, **kwargs)
    finally:
        _within.is_on = False
