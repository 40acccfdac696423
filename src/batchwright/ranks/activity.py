"""Does a thread do anything? Told by its stack, and by the processor time of this process and of those it started.

Promises:
- a thread whose stack stays the same while no processor time is used stands still: asleep, or waiting for something;
- one that stands in a collective, or in a backward, which holds collectives, waits for other ranks.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

# Of one core. Threads of gloo and a poll now and then take less; work beside many other processes takes more.
_BUSY_SHARE = 0.02
_DEEPEST = 60


@dataclass
class Activity:
    """Looks at one thread again and again."""

    thread: int
    counts_children: bool = True
    place: str = "nowhere"
    is_in_collective: bool = False
    _stack: tuple[tuple[int, int], ...] = ()
    _same_since: float = field(default_factory=time.monotonic)
    _still_since: float = field(default_factory=time.monotonic)
    _looked: float = field(default_factory=time.monotonic)
    _used: float = 0.0

    def look(self) -> None:
        """Look once."""
        now = time.monotonic()
        frame = sys._current_frames().get(self.thread)
        stack = _stack(frame)
        used = _processor_seconds(with_children=self.counts_children)
        if stack != self._stack:
            self._stack, self._same_since, self._still_since = stack, now, now
        if used - self._used > _BUSY_SHARE * (now - self._looked):
            self._still_since = now
        self._looked, self._used = now, used
        self.place, self.is_in_collective = _place(frame), _is_in_collective(frame)
        del frame  # it holds the locals of user code

    @property
    def same_seconds(self) -> float:
        """How long the stack has been the same."""
        return self._looked - self._same_since

    @property
    def still_seconds(self) -> float:
        """How long nothing at all has happened."""
        return self._looked - self._still_since


def _stack(frame: FrameType | None) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    while frame is not None and len(found) < _DEEPEST:
        found.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def _place(frame: FrameType | None) -> str:
    """Name the innermost line of the user's, else the innermost line."""
    from batchwright.users_code import is_installed_or_ours

    first = frame
    while frame is not None and is_installed_or_ours(frame.f_code.co_filename):
        frame = frame.f_back
    shown = frame or first
    return "nowhere" if shown is None else f'File "{shown.f_code.co_filename}", line {shown.f_lineno}'


def _is_in_collective(frame: FrameType | None) -> bool:
    """Whether the innermost frames are torch's, and one of them waits for other ranks."""
    while frame is not None:
        file = frame.f_code.co_filename.replace(os.sep, "/")
        if "/torch/" not in file:
            return False
        if "/torch/distributed/" in file or file.endswith("/nn/parallel/distributed.py"):
            return True
        if frame.f_code.co_name == "_engine_run_backward":
            return True
        frame = frame.f_back
    return False


def _processor_seconds(*, with_children: bool) -> float:
    """Seconds of this process without those of the calling thread, and of what it started that still runs."""
    used = time.process_time() - time.thread_time()
    if not with_children:
        return used
    pids, seen = [os.getpid()], set[int]()
    while pids and len(seen) < 200:
        pid = pids.pop()
        seen.add(pid)
        # A system without these files (or a process that just ended) counts nothing.
        with suppress(OSError, ValueError, IndexError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                children = {int(word) for word in (task / "children").read_text().split()} - seen
                pids += children
            if pid != os.getpid():
                numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                used += (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")
    return used
