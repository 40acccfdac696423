"""How many bytes a probe may take.

Promises:
- never more than was asked for, and never so much that the kernel would kill a process for it;
- what an earlier step in this process has paid once is charged to every probe.
"""

from __future__ import annotations

import gc
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from batchwright.device.device import open_device
from batchwright.device.host import HostDevice, clear_kernel_buffers
from batchwright.device.process_memory import can_limit, holes_filled, read_memory, room_under_the_limit
from batchwright.errors import InvalidInputError
from batchwright.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator


_DEFAULT_STACK_BYTES = 8 * 2**20


class FirstCosts:
    """Bytes that a process takes once, with its first step: stacks of threads, tables that kernels keep.

    A fresh process pays them inside its budget. One that has run before has paid already, and would find a larger size
    than a fresh one can run. So they are charged to every probe: stacks that exist when the search begins, and what
    the first probe leaves behind.
    """

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


# Left to everything else on the machine, of what is free.
_KEPT_SHARE, _KEPT_BYTES = 0.05, 256 * 2**20


@dataclass(frozen=True)
class Budget:
    """Bytes there are, and the fewer that a probe may take so that the margin stays free."""

    limit_bytes: int | None
    margin: float = 0.0
    notes: tuple[str, ...] = ()
    was_asked: bool = False
    is_tight: bool = True
    """Somebody set it, or a card has it: it is meant to be filled. Not so the free memory of a whole machine."""
    is_host: bool = False
    """It is main memory, of which two runs of one step never take quite the same."""

    @property
    def probe_bytes(self) -> int | None:
        """What a probe is held to."""
        return None if self.limit_bytes is None else int(self.limit_bytes * (1 - self.margin))


def open_budget(
    on: str, memory: str | int | None, *, margin: float = 0.0, held_bytes: int = 0, sharers: int = 1
) -> Budget:
    """Settle the bytes for a device: the amount asked for, or what is free.

    `held_bytes` are those of a live model: they belong to a budget, and so add to what is free. `sharers` ranks on
    one machine share what is free in its memory.

    >>> open_budget("cpu", "64MiB", margin=0.05).probe_bytes // 2**10
    62259
    """
    if not 0 <= margin < 1:
        raise InvalidInputError(f"margin must be at least 0 and below 1, such as 0.05; received {margin!r}.")
    wanted = None if memory is None else parse_bytes(memory)
    if wanted is not None and wanted < 1:
        raise InvalidInputError(f"memory must be at least 1 byte; received {memory!r}.", remedy='memory="16GiB"')
    was_asked = wanted is not None
    device = open_device(on)
    free = device.free_bytes
    notes: list[str] = []
    if isinstance(device, HostDevice):
        # The machine's memory is shared by its ranks; a limit that somebody set (ulimit -d, a batch system) is on each.
        free, room = _safe_bytes(free), room_under_the_limit()
        free = None if free is None else free // sharers
        is_limited = room is not None and (free is None or room < free)
        free = room if is_limited else free
        free = None if free is None else free + held_bytes
        if is_limited and free is not None and (wanted is None or wanted > free):
            notes.append(f"the memory of this process is limited (ulimit -d), which leaves {format_bytes(free)}")
        if not can_limit():
            notes.append("this system keeps no limit on memory: the bytes of tensors were counted instead")
    if wanted is not None and free is not None and wanted > free:
        notes.append(f"{format_bytes(wanted)} were requested, but only {format_bytes(free)} are available here")
        wanted = free
        was_asked = False
    is_tight = wanted is not None or on != "cpu" or room_under_the_limit() is not None
    limit = free if wanted is None else wanted
    return Budget(limit, margin, tuple(notes), was_asked, is_tight, is_host=isinstance(device, HostDevice))


def _safe_bytes(free: int | None) -> int | None:
    return None if free is None else max(1, free - max(int(free * _KEPT_SHARE), _KEPT_BYTES))
