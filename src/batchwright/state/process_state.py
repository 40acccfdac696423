"""What belongs to the whole process, and so to the user: put back after something of theirs has run.

Promises:
- exception hooks, the garbage collector, signal handlers, the working directory, the grad mode, default
  dtype, number of threads and global hooks of torch are as they were;
- random numbers come again as if no probe had drawn any; numpy is looked up, never imported;
- each is put back only where it differs.

Environment variables and filters of warnings are left: a library that is imported meanwhile sets some, and needs them.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules import module as torch_modules
from torch.optim import optimizer as torch_optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    PutBack = Callable[[], object]
    Setting = tuple[Callable[[], Any], Callable[[Any], object]]


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
            _thaw()
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


def _thaw() -> None:
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
            _thaw()


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
