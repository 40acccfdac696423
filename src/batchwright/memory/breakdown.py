"""Read a log of blocks: the peak, what it is made of, when it came and who owns it.

Promises:
- every byte alive at the peak is in exactly one part;
- activations are what forward left for backward; what was gone before its phase ended is a temporary.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchwright.memory.estimate_result import Owner, PeakMoment, PhasePeak
from batchwright.trace.storages import Block, Log, Peak, alive_at, find_peak, peaks_of_phases

if TYPE_CHECKING:
    from collections.abc import Callable


_OF_PHASE = {"build": "weights", "batch": "inputs"}
_RUNS_THE_MODEL = ("forward", "generate", "evaluate")


@dataclass(frozen=True)
class Breakdown:
    """The peak of one log, taken apart."""

    peak_bytes: int
    parts: dict[str, int]
    moment: PeakMoment
    largest: tuple[Owner, ...]
    phases: tuple[PhasePeak, ...]


def break_down(log: Log, scale: Callable[[Block], float] | None = None) -> Breakdown:
    """Find the peak of a log and take it apart."""
    peak = find_peak(log, scale)
    return Breakdown(
        peak.num_bytes,
        _parts(peak.alive, scale),
        _moment(log, peak),
        _largest_owners(peak),
        _phases(log),
    )


def parts_at_the_same_moment(log: Log, other: Log) -> dict[str, int]:
    """Take `other`, a run of the same step at another size, apart at the moment where `log` has its peak.

    Its own peak may lie elsewhere: with more samples it moves from the optimizer step to backward.
    """
    moment = find_peak(log).position
    if len(log.changes) != len(other.changes):
        # Some kernel took another path at the other size, so moments do not pair up; phases still do.
        number = sum(start <= moment for _, start in log.phases)
        ends = [start for _, start in other.phases[number:]]
        moment = find_peak(other, until=ends[0] if ends else None, since=other.phases[number - 1][1]).position
    return _parts(alive_at(other, moment))


def _parts(alive: dict[Block, int], scale: Callable[[Block], float] | None = None) -> dict[str, int]:
    parts: dict[str, float] = defaultdict(float)
    for block, num_bytes in alive.items():
        parts[part_of(block)] += num_bytes if scale is None else num_bytes * scale(block)
    return {part: round(num_bytes) for part, num_bytes in parts.items()}


def part_of(block: Block) -> str:
    """Say what a block turned out to be."""
    if block.part is not None:
        return block.part
    if block.phase in _OF_PHASE:
        return _OF_PHASE[block.phase]
    if block.is_recomputed or (block.phase in _RUNS_THE_MODEL and block.died_in != block.phase):
        return "activations"
    return "temporaries"


def _moment(log: Log, peak: Peak) -> PeakMoment:
    started = [phase for phase, start in log.phases if start <= peak.position]
    block = log.changes[peak.position][0] if log.changes else Block(0, "", "", "")
    return PeakMoment(started[-1] if started else "build", block.module, block.operator)


def _largest_owners(peak: Peak, count: int = 10) -> tuple[Owner, ...]:
    grouped: dict[tuple[str, str, str, str], list[int]] = defaultdict(list)
    for block, num_bytes in peak.alive.items():
        grouped[(part_of(block), block.module, block.operator, block.phase)].append(num_bytes)
    owners = [Owner(sum(sizes), len(sizes), *place) for place, sizes in grouped.items()]
    return tuple(sorted(owners, key=lambda owner: -owner.num_bytes)[:count])


def _phases(log: Log) -> tuple[PhasePeak, ...]:
    highest: dict[str, int] = {}
    for phase, num_bytes in peaks_of_phases(log):
        if phase != "done":
            highest[phase] = max(num_bytes, highest.get(phase, 0))
    return tuple(PhasePeak(phase, num_bytes) for phase, num_bytes in highest.items())
