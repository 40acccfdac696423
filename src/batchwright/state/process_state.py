"""What belongs to the whole process, and so to the user: put back after something of theirs has run.

Promises:
- exception hooks, the garbage collector, signal handlers, the working directory, the grad mode, default
  dtype, number of threads and global hooks of torch are as they were;
- each is put back only where it differs.

Environment variables and filters of warnings are left: a library that is imported meanwhile sets some, and needs them.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules import module as torch_modules
from torch.optim import optimizer as torch_optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Setting = tuple[Callable[[], Any], Callable[[Any], object]]

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
        self._is_collecting, self._num_frozen = gc.isenabled(), gc.get_freeze_count()
        self._hooks = [
            (hooks, dict(hooks)) for place, name in _GLOBAL_HOOKS if (hooks := getattr(place, name, None)) is not None
        ]
        self._signals = {number: signal.getsignal(number) for number in _handled_signals()}

    def restore(self) -> None:
        """Put back what differs."""
        for read, write, before in self._before:
            if read() != before:
                write(before)
        for hooks, entries in self._hooks:
            if list(hooks) != list(entries):
                hooks.clear()
                hooks.update(entries)
        if gc.isenabled() != self._is_collecting:
            (gc.enable if self._is_collecting else gc.disable)()
        # Somebody who has frozen objects does not want them thawed.
        if self._num_frozen == 0 and gc.get_freeze_count():
            gc.unfreeze()
        for number, handler in self._signals.items():
            # One that was not installed from Python cannot be installed again.
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


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
