"""How many bytes a probe may take: what was asked for, but never what would wake the kernel's killer."""

from __future__ import annotations

from dataclasses import dataclass

from batchwright.device.device import open_device
from batchwright.device.host import HostDevice
from batchwright.device.process_memory import can_limit, room_under_the_limit
from batchwright.errors import InvalidInputError
from batchwright.units import format_bytes, parse_bytes

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
    asked = None if memory is None else parse_bytes(memory)
    if asked is not None and asked < 1:
        raise InvalidInputError(f"memory must be at least 1 byte; received {memory!r}.", remedy="--memory 16GiB")
    was_asked = asked is not None
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
        if is_limited and free is not None and (asked is None or asked > free):
            notes.append(f"the memory of this process is limited (ulimit -d), which leaves {format_bytes(free)}")
        if not can_limit():
            notes.append("this system keeps no limit on memory: the bytes of tensors were counted instead")
    if asked is not None and free is not None and asked > free:
        notes.append(f"{format_bytes(asked)} were asked for, but only {format_bytes(free)} can be taken here")
        asked = free
        was_asked = False
    is_tight = asked is not None or on != "cpu" or room_under_the_limit() is not None
    limit = free if asked is None else asked
    return Budget(limit, margin, tuple(notes), was_asked, is_tight, is_host=isinstance(device, HostDevice))


def _safe_bytes(free: int | None) -> int | None:
    return None if free is None else max(1, free - max(int(free * _KEPT_SHARE), _KEPT_BYTES))
