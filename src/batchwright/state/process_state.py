"""What belongs to the whole process, and so to the user: put back after something of theirs has run.

Ctrl-C never falls between a change and its undoing. Python delivers a signal between any two instructions, also on the
way into a `with` block or out of it, where no `finally` has begun yet. So while something of the user's is borrowed, an
interrupt that arrives there waits.

Promises:
- exception hooks, the garbage collector, signal handlers, the working directory, the grad mode, default
  dtype, number of threads and global hooks of torch are as they were;
- random numbers come again as if no probe had drawn any; numpy is looked up, never imported;
- each is put back only where it differs;
- an interrupt in the user's code or in torch's is delivered at once, by the handler that was there before; in an
  operator that is traced, right after it, for torch aborts the process where it is raised in the middle of one;
- one that arrives while things are put back, or a context is entered or left, is delivered right after;
- one that Python drops, as it does with what is raised in a destructor or in a callback of a weak reference, comes
  again; at the fifth one waiting ends, whatever is going on.

Environment variables and filters of warnings are left: a library that is imported meanwhile sets some, and needs them.
"""

from __future__ import annotations

import _thread
import gc
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.nn.modules import module as torch_modules
from torch.optim import optimizer as torch_optimizer

PutBack = Callable[[], object]
Setting = tuple[Callable[[], Any], Callable[[Any], object]]

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


def random_sources(accelerator: torch.device | None) -> dict[str, PutBack]:
    """Return what the whole process draws from, by name, with what puts it back to where it is now.

    >>> list(random_sources(None))[:2]
    ['torch', 'Python']
    """
    sources: dict[str, PutBack] = {
        "torch": partial(torch.set_rng_state, torch.get_rng_state()),
        "Python": partial(random.setstate, random.getstate()),
    }
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        sources["numpy"] = partial(numpy_random.set_state, numpy_random.get_state(legacy=False))
    if accelerator is not None and accelerator.type != "cpu":
        module = torch.get_device_module(accelerator)
        # MPS is one device, and its functions took no argument in earlier versions.
        where = () if accelerator.type == "mps" else (accelerator,)
        sources[str(accelerator)] = partial(module.set_rng_state, module.get_rng_state(*where), *where)
    return sources


@contextmanager
def kept_random_state(accelerator: torch.device | None = None) -> Iterator[None]:
    """Put the generators of torch, numpy and Python back as they were, whatever happened inside."""
    sources = random_sources(accelerator)
    try:
        yield
    finally:
        for put_back in sources.values():
            put_back()


def put_back_of_generator(thing: Any) -> PutBack | None:
    """Return what puts a random generator back to where it is now; None for anything else."""
    if isinstance(thing, torch.Generator):
        return partial(thing.set_state, thing.get_state())
    # The system's randomness has no state.
    if isinstance(thing, random.Random) and not isinstance(thing, random.SystemRandom):
        return partial(thing.setstate, thing.getstate())
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None and isinstance(thing, numpy_random.Generator):
        return partial(setattr, thing.bit_generator, "state", thing.bit_generator.state)
    if numpy_random is not None and isinstance(thing, numpy_random.RandomState):
        return partial(thing.set_state, thing.get_state(legacy=False))
    return None


_GLOBAL_HOOKS = [
    *((torch_optimizer, name) for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")),
    *(
        (torch_modules, name)
        for name in (
            "_global_forward_pre_hooks",
            "_global_forward_hooks",
            "_global_forward_hooks_always_called",
            "_global_backward_pre_hooks",
            "_global_backward_hooks",
        )
    ),
]

# Whether objects that were there before a question are frozen now, by us.
_has_frozen = False
_num_frozen = 0
_QUESTIONS_PER_COLLECTION = 8


class ProcessState:
    """What a process is set to, read when this is made.

    >>> state = ProcessState()
    >>> sys.excepthook = print
    >>> torch.set_default_dtype(torch.float64)
    >>> state.restore()
    >>> sys.excepthook is print, torch.get_default_dtype()
    (False, torch.float32)
    """

    def __init__(self) -> None:
        self._before = [(read, write, read()) for read, write in _settings()]
        self._is_collecting, self._was_frozen = gc.isenabled(), _is_frozen()
        self._hooks = [
            (hooks, dict(hooks)) for place, name in _GLOBAL_HOOKS if (hooks := getattr(place, name, None)) is not None
        ]
        self._signals = {number: signal.getsignal(number) for number in _handled_signals()}

    def restore(self) -> None:
        """Put back what differs."""
        self.restore_settings()
        if gc.isenabled() != self._is_collecting:
            (gc.enable if self._is_collecting else gc.disable)()
        # Somebody who has frozen objects does not want them thawed.
        if not self._was_frozen:
            thaw_objects()
        for number, handler in self._signals.items():
            # One that was not installed from Python cannot be installed again.
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)

    def restore_settings(self) -> None:
        """Put back what a step computes with; the collector and the signals are ours while a question lasts."""
        for read, write, before in self._before:
            if read() != before:
                write(before)
        for hooks, entries in self._hooks:
            if list(hooks) != list(entries):
                hooks.clear()
                hooks.update(entries)


def freeze_old_objects(generation: int = 2) -> bool:
    """Collect garbage once, and from now on look only at what is new: probes collect often, and old objects are many.

    Returns whether to thaw them is ours: somebody who has frozen objects does not want them thawed.
    """
    global _has_frozen, _num_frozen
    if _is_frozen():
        return False
    _num_frozen += 1
    # Thawing puts all objects among the oldest, where Python hardly ever looks: what questions leave behind is
    # collected in groups, as a whole collection takes long in a process that has imported much.
    gc.collect(generation if _num_frozen % _QUESTIONS_PER_COLLECTION else 2)
    gc.freeze()
    _has_frozen = True
    return True


def thaw_objects() -> None:
    """Undo `freeze_old_objects`."""
    global _has_frozen
    gc.unfreeze()
    _has_frozen = False


def _is_frozen() -> bool:
    # To count them takes as long as they are many.
    return _has_frozen or gc.get_freeze_count() > 0


@contextmanager
def cheap_collections() -> Iterator[None]:
    """Look for garbage among new objects only, until this ends; `untouched` does so by itself."""
    is_ours = freeze_old_objects()
    try:
        yield
    finally:
        if is_ours:
            thaw_objects()


def _settings() -> Iterator[Setting]:
    for place, name in ((sys, "excepthook"), (sys, "unraisablehook"), (threading, "excepthook")):
        yield partial(getattr, place, name), partial(setattr, place, name)
    yield torch.is_grad_enabled, torch.set_grad_enabled
    yield torch.get_default_dtype, torch.set_default_dtype
    yield torch.get_num_threads, torch.set_num_threads
    yield torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    yield torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
    yield torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly
    yield _folder, _change_folder


def _folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # removed meanwhile
        return None


def _change_folder(folder: str | None) -> None:
    if folder is not None:
        os.chdir(folder)


def _handled_signals() -> list[signal.Signals]:
    """Signals whose handlers can be set from here: in the main thread all, in any other none."""
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in signal.valid_signals() if isinstance(number, signal.Signals)]
