"""The memory that this process holds for itself, and a limit on it that the kernel keeps.

Promises:
- what is counted is private writable memory (`VmData`): tensors, heaps, thread stacks; files and imported code are not;
- a limit is soft, is never raised above one that was there before, and is taken back whatever happens;
- a peak is that of the time watched, whatever the process held before; it was within 0.3 MiB of the smallest limit
  under which the same step ran.

One change lasts: glibc is told to give blocks of 64 KiB and more back to the system as soon as they are freed.
Without that, freed memory stays in the process, and what fits depends on what ran before. What was freed inside the
heap before that stays there; `holes_filled` takes it, so that a step cannot use it.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


# From malloc.h of glibc.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_THRESHOLD = 65536
_LARGEST_HOLE = 2**28
# From malloc.c of glibc: a block that has a mapping of its own, in the word before it.
_IS_MMAPPED = 2
# The same for a process that is about to start.
PINNED_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(_THRESHOLD), "MALLOC_TRIM_THRESHOLD_": str(_THRESHOLD)}


@dataclass(frozen=True)
class Reading:
    """What the kernel says about this process, in bytes."""

    data: int
    size: int
    peak_size: int


def can_limit() -> bool:
    """Whether this system keeps a limit on private memory and tells how much there is: Linux does."""
    return sys.platform == "linux" and read_memory() is not None


def read_memory() -> Reading | None:
    """Ask the kernel; None where it does not say."""
    with suppress(OSError, ValueError, KeyError):
        lines = Path("/proc/self/status").read_text().splitlines()
        amounts = {name: value for name, _, value in (line.partition(":") for line in lines)}
        data, size, peak = (int(amounts[name].split()[0]) * 1024 for name in ("VmData", "VmSize", "VmPeak"))
        return Reading(data, size, peak)
    return None


class PeakWatch:
    """Reads the most private memory that this process held while it was on.

    >>> with PeakWatch() as watch:
    ...     block = bytearray(64 * 2**20)
    ...     del block
    ...     grown = watch.peak_bytes() - watch.bytes_before
    >>> 64 <= grown / 2**20 < 66
    True

    The kernel keeps a peak of the whole address space only, and never lowers it. So addresses without memory are
    taken until the space is as large as it ever was; from there on each new peak shows.
    """

    def __enter__(self) -> PeakWatch:
        before = read_memory()
        assert before is not None, "a PeakWatch needs a kernel that tells the memory of a process"
        self.bytes_before = before.data
        self._fillers = [_take_addresses(before.peak_size - before.size)]
        return self

    def __exit__(self, *_: object) -> None:
        for filler in self._fillers:
            if filler is not None:
                filler.close()

    def look_from_here(self) -> None:
        """Forget the peaks so far: a new thread takes twice the addresses of its heap for a moment, and no memory."""
        now = read_memory()
        assert now is not None
        self._fillers.append(_take_addresses(now.peak_size - now.size))

    def peak_bytes(self) -> int:
        """Return the peak so far."""
        now = read_memory()
        assert now is not None
        # What of the space is not private memory (files, bare addresses) hardly ever shrinks while a step runs, so its
        # size now is its size at the peak.
        return max(now.peak_size - (now.size - now.data), self.bytes_before)


def _take_addresses(num_bytes: int) -> mmap.mmap | None:
    if num_bytes <= 0:
        return None
    # Without access rights it is no memory, and no limit on memory counts it.
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)


def give_back() -> None:
    """Pin glibc's thresholds and hand free memory back to the system."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _THRESHOLD)
        libc.mallopt(_M_TRIM_THRESHOLD, _THRESHOLD)
        libc.malloc_trim(0)


@contextmanager
def holes_filled() -> Iterator[int]:
    """Take what is free inside the heap until this ends, and tell how many bytes that is.

    A tensor that fits into such a hole needs no new memory, and no limit sees it: a process that had freed 40 tensors
    of 1 MiB found 14 % more samples within 64 MiB than a fresh one. Above the pinned threshold glibc looks for a hole
    first and maps new memory otherwise, so that each size is asked for until it has a mapping of its own.
    """
    blocks: list[int] = []
    num_bytes = 0
    give_back()
    libc = _glibc()
    try:
        size = _LARGEST_HOLE
        while libc is not None and size >= _THRESHOLD:
            block = libc.malloc(size)
            if block and not ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t)).value & _IS_MMAPPED:
                blocks.append(block)
                num_bytes += libc.malloc_usable_size(block)
                continue
            libc.free(block)
            size //= 2
        yield num_bytes
    finally:
        for block in blocks:
            libc.free(block)


def _glibc() -> Any:
    """Return the C library if it is glibc, whose blocks can be told apart; None elsewhere."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        assert libc.gnu_get_libc_version
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
        libc.malloc_usable_size.restype, libc.malloc_usable_size.argtypes = ctypes.c_size_t, (ctypes.c_void_p,)
        libc.free.restype, libc.free.argtypes = None, (ctypes.c_void_p,)
        return libc
    return None


def room_under_the_limit() -> int | None:
    """Return what may still be taken under a limit that somebody has set; None where there is none."""
    reading = read_memory()
    if reading is None or sys.platform != "linux":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return None if soft == resource.RLIM_INFINITY else max(0, soft - reading.data)


@contextmanager
def limited_to(data_bytes: int) -> Iterator[None]:
    """Let this process hold no more than so many bytes of private memory, all that it holds already included."""
    import resource

    old = resource.getrlimit(resource.RLIMIT_DATA)
    tightest = [bound for bound in (*old, data_bytes) if bound != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(tightest), old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, old)
