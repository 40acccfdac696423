"""What a process takes once, with its first step: stacks of threads, tables that kernels keep.

A fresh process pays this inside its budget. One that has run before has paid already, and would find a larger size than
a fresh one can run. So it is charged to every probe: stacks that exist when the search begins, and what the first probe
leaves behind.
"""

from __future__ import annotations

import gc
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from batchwright.device.limited_host import clear_kernel_buffers
from batchwright.device.process_memory import holes_filled, read_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

_DEFAULT_STACK_BYTES = 8 * 2**20


class FirstCosts:
    """Bytes that later probes do not take because an earlier one did."""

    def __init__(self) -> None:
        self.charged_bytes = _stacks_of_torchs_threads()
        self._is_known = False

    @contextmanager
    def learnt(self) -> Iterator[None]:
        """Run the first probe in here: what it leaves behind is charged to the next ones."""
        if self._is_known:
            yield
            return
        before = _held_bytes()
        yield
        self.charged_bytes += max(0, _held_bytes() - before)
        self._is_known = True


def _held_bytes() -> int:
    gc.collect()
    clear_kernel_buffers()
    with holes_filled() as free_bytes:
        reading = read_memory()
    return 0 if reading is None else reading.data - free_bytes


def _stacks_of_torchs_threads() -> int:
    """Stacks of threads that torch has started already; one of somebody else's has nothing to do with a step."""
    tasks = Path("/proc/self/task")
    if sys.platform != "linux" or not tasks.is_dir():
        return 0
    import resource

    size = resource.getrlimit(resource.RLIMIT_STACK)[0]
    size = _DEFAULT_STACK_BYTES if size == resource.RLIM_INFINITY else size
    return min(len(os.listdir(tasks)) - 1, torch.get_num_threads() - 1) * size
