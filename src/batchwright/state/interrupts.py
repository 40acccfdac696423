"""Ctrl-C never falls between a change and its undoing.

Python delivers a signal between any two instructions, also on the way into a `with` block or out of it, where no
`finally` has begun yet. So while something of the user's is borrowed, an interrupt that arrives there waits.

Promises:
- an interrupt in the user's code or in torch's is delivered at once, by the handler that was there before; in an
  operator that is traced, right after it, for torch aborts the process where it is raised in the middle of one;
- one that arrives while things are put back, or a context is entered or left, is delivered right after;
- one that Python drops, as it does with what is raised in a destructor or in a callback of a weak reference, comes
  again;
- at the fifth one waiting ends, whatever is going on;
- handlers are put back.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_HERE = os.path.dirname(__file__) + os.sep
# Files of which nothing may be cut short: this folder puts things back, and the simulated device answers torch's own
# code, where what is raised aborts the process.
UNCUT_FILES = (
    _HERE,
    os.path.join(os.path.dirname(os.path.dirname(__file__)), "simulated", "torch_patches", "backend.py"),
)
UNCUT_FUNCTIONS = frozenset(
    {
        *("__enter__", "__exit__", "__del__"),
        # These end the life of a block: half of it leaves an allocator that contradicts itself.
        *("_storage_died", "_forget"),
        # torch calls these from its own code, some of which may not raise: the process would be aborted.
        *("__torch_dispatch__", "__torch_function__", "type_"),
    }
)
# Python that torch's dispatcher calls before it calls a mode; it aborts the process where one of these raises.
_DISPATCHERS_OWN = os.path.join("torch", "_library") + os.sep
_RETRY_SECONDS = 0.01
_MOST_WAITING = 5


class Interrupts:
    """Handlers of SIGINT and SIGTERM that wait where they must."""

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._depth = 0
        self._pending: int | None = None
        self._num_waiting = 0
        self._outermost: FrameType | None = None

    @contextmanager
    def waiting_where_needed(self, outermost: FrameType | None) -> Iterator[None]:
        """Have interrupts wait on ways in and out of contexts that were entered below the frame `outermost`."""
        if self._handlers or threading.current_thread() is not threading.main_thread():
            yield
            return
        own: dict[int, Any] = {number: now for number in _SIGNALS if callable(now := signal.getsignal(number))}
        try:
            self._outermost = outermost
            self._handlers = own
            for number in own:
                signal.signal(number, self._handle)
            yield
        finally:
            try:
                self._put_back(own)
            finally:
                # Again: an interrupt that falls between two of them ends the loop at the first.
                self._put_back(own)
                self._outermost = None
                try:
                    self.deliver()
                finally:
                    self._handlers = {}

    @contextmanager
    def coming_again(self) -> Iterator[None]:
        """Have an interrupt come again that was raised where Python only prints exceptions."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = sys.unraisablehook

        def hook(dropped: Any) -> None:
            if not issubclass(dropped.exc_type, KeyboardInterrupt):
                before(dropped)
            elif self._pending is None:
                self._pending = signal.SIGINT
                _thread.start_new_thread(self._try_again, ())

        try:
            sys.unraisablehook = hook
            yield
        finally:
            sys.unraisablehook = before

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have interrupts wait until this ends."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0 and self._handlers:
                self.deliver()

    @staticmethod
    def _put_back(handlers: dict[int, Any]) -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def deliver(self) -> None:
        """Hand on an interrupt that waits, in the thread that it is for."""
        if threading.current_thread() is not threading.main_thread():
            return
        number, self._pending, self._num_waiting = self._pending, None, 0
        if number is not None:
            self._handlers[number](number, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._num_waiting < _MOST_WAITING and (self._depth or self._is_uncut(frame)):
            if self._pending is None and not self._depth:
                # Nothing may come by that would deliver it. Not a Timer: it takes a lock that may be held right here.
                _thread.start_new_thread(self._try_again, ())
            else:
                self._num_waiting += 1
            self._pending = number
            return
        self._pending, self._num_waiting = None, 0
        self._handlers[number](number, frame)

    def _try_again(self) -> None:
        time.sleep(_RETRY_SECONDS)
        number, self._pending = self._pending, None
        if number is None:
            return
        if hasattr(signal, "pthread_kill"):
            # A real one: it ends a sleep and a wait for a child, too.
            signal.pthread_kill(threading.main_thread().ident or 0, number)
        else:
            _thread.interrupt_main(signal.Signals(number))

    def _is_uncut(self, frame: FrameType | None) -> bool:
        while frame is not None and frame is not self._outermost:
            code = frame.f_code
            file = code.co_filename
            if code.co_name in UNCUT_FUNCTIONS or file.startswith(UNCUT_FILES) or _DISPATCHERS_OWN in file:
                return True
            frame = frame.f_back
        return False


INTERRUPTS = Interrupts()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Have Ctrl-C wait until this ends; it is delivered on the way out, so what must be undone stands in a `try`.

    >>> process = None
    >>> try:
    ...     with uninterrupted():
    ...         process = "a child process"
    ... finally:
    ...     ended = process
    """
    with INTERRUPTS.waiting_where_needed(sys._getframe(2)), INTERRUPTS.held():
        yield


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder that is gone afterwards, whenever Ctrl-C falls.

    >>> with temporary_folder() as folder:
    ...     _ = (folder / "file").write_text("gone")
    >>> folder.exists()
    False
    """
    folder: tempfile.TemporaryDirectory[str] | None = None
    try:
        with uninterrupted():
            folder = tempfile.TemporaryDirectory(prefix="batchwright-")
        yield Path(folder.name)
    finally:
        if folder is not None:
            with uninterrupted():
                folder.cleanup()
