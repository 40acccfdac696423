"""What a trace yields: blocks of memory with their birth and death, in the order things happened.

Promises:
- nothing is summed while tracing; the peak and its parts are read off the log afterwards, when it is known what
  each block turned out to be;
- the same log can be replayed with some blocks made smaller, which is how sharding is asked about.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(eq=False, slots=True)
class Block:
    """One storage, from birth to death."""

    num_bytes: int
    phase: str
    module: str
    operator: str
    shape: tuple[int, ...] = ()
    part: str | None = None
    is_recomputed: bool = False
    died_in: str | None = None
    # What the allocator of a simulated card handed out for it.
    handle: Any = None


@dataclass
class Log:
    """Births and deaths in order, with the phase each happened in."""

    # (block, change in bytes); a block that is resized changes by the difference.
    changes: list[tuple[Block, int]] = field(default_factory=list)
    phases: list[tuple[str, int]] = field(default_factory=list)

    def enter(self, phase: str) -> None:
        """Note that a phase begins here."""
        self.phases.append((phase, len(self.changes)))

    @property
    def phase(self) -> str:
        """The phase that is running."""
        return self.phases[-1][0] if self.phases else "build"


@dataclass(frozen=True)
class Peak:
    """The largest sum in a log: when it was reached, and which blocks were alive then."""

    num_bytes: int
    position: int
    alive: dict[Block, int]


def find_peak(
    log: Log, scale: Callable[[Block], float] | None = None, *, since: int = 0, until: int | None = None
) -> Peak:
    """Replay a log and find its peak; `scale` makes blocks smaller, as sharding them would.

    `since` and `until` are positions between which it is looked for.

    >>> log = Log()
    >>> a, b = Block(10, "forward", "", "mm"), Block(5, "forward", "", "add")
    >>> log.changes += [(a, 10), (b, 5), (a, -10)]
    >>> peak = find_peak(log)
    >>> peak.num_bytes, peak.position, [block.operator for block in peak.alive]
    (15, 1, ['mm', 'add'])
    """
    position, highest = -1, 0
    now = 0.0
    for index, (block, change) in enumerate(log.changes[:until]):
        now += change if scale is None else change * scale(block)
        if now > highest and index >= since:
            position, highest = index, round(now)
    return Peak(highest, position, alive_at(log, position))


def alive_at(log: Log, position: int) -> dict[Block, int]:
    """The blocks that are alive once the change at `position` has happened, with their bytes."""
    alive: dict[Block, int] = {}
    for block, change in log.changes[: position + 1]:
        amount = alive.get(block, 0) + change
        if amount:
            alive[block] = amount
        else:
            alive.pop(block, None)
    return alive


def peaks_of_phases(log: Log) -> list[tuple[str, int]]:
    """The largest memory held during each phase, in the order they ran."""
    found: list[tuple[str, int]] = []
    now = 0
    ends = [start for _, start in log.phases[1:]] + [len(log.changes)]
    for (phase, start), end in zip(log.phases, ends, strict=True):
        highest = now
        for _, change in log.changes[start:end]:
            now += change
            highest = max(highest, now)
        found.append((phase, highest))
    return found
