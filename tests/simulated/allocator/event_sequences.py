"""Random calls on the simulated allocator and on the plain one, compared byte for byte after every call."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batchwright.simulated.allocator.caching_allocator import CachingAllocator, SimulatedOutOfMemory
from batchwright.simulated.allocator.settings import AllocatorSettings
from tests.oracle.caching_allocator import NoRoom, PlainAllocator, Rules

if TYPE_CHECKING:
    from batchwright.simulated.allocator.segments import Block
    from tests.oracle.caching_allocator import Piece

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True)
class Case:
    """Settings as text, and again in the oracle's own words; is reserved memory capped?"""

    text: str
    rules: Rules = field(default_factory=Rules)
    capped: bool = False

    @property
    def name(self) -> str:
        return (self.text or "defaults") + (" (capped)" if self.capped else "")


TABLE = (1, 1, 4, 2, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8)
CASES = (
    Case(""),
    Case("", capped=True),
    Case("max_split_size_mb:20", Rules(max_split=20 * MIB)),
    Case("max_split_size_mb:32", Rules(max_split=32 * MIB)),
    Case("max_split_size_mb:33,max_non_split_rounding_mb:40", Rules(max_split=33 * MIB, slack=40 * MIB)),
    Case("large_segment_size_mb:33", Rules(large_segment=33 * MIB, slack=33 * MIB)),
    Case(
        "large_segment_size_mb:12,max_split_size_mb:12",
        Rules(large_segment=12 * MIB, slack=12 * MIB, max_split=12 * MIB),
    ),
    Case("roundup_power2_divisions:4", Rules(divisions=(4,) * 16)),
    Case("roundup_power2_divisions:[2:1,4:4,8:2,>:8]", Rules(divisions=TABLE)),
    Case("garbage_collection_threshold:0.5", Rules(collect_from=0.5)),
    Case("garbage_collection_threshold:0.5", Rules(collect_from=0.5), capped=True),
    Case(
        "garbage_collection_threshold:0.25,max_split_size_mb:20",
        Rules(collect_from=0.25, max_split=20 * MIB),
        capped=True,
    ),
    Case("throw_on_cudamalloc_oom:True", Rules(rejects=True), capped=True),
    Case("expandable_segments:True", Rules(expandable=True)),
    Case("expandable_segments:True", Rules(expandable=True), capped=True),
    Case("expandable_segments:True,max_split_size_mb:20", Rules(expandable=True, max_split=20 * MIB)),
    Case(
        "expandable_segments:True,large_segment_size_mb:12",
        Rules(expandable=True, large_segment=12 * MIB, slack=12 * MIB),
    ),
    Case(
        "expandable_segments:True,roundup_power2_divisions:2,garbage_collection_threshold:0.5",
        Rules(expandable=True, divisions=(2,) * 16, collect_from=0.5),
        capped=True,
    ),
)

EDGES = (512, 256 * KIB, 512 * KIB, MIB, 2 * MIB, 5 * MIB, 10 * MIB, 12 * MIB, 19 * MIB, 20 * MIB, 32 * MIB, 40 * MIB)


@dataclass
class Outcome:
    """What came of one sequence."""

    events: int = 0
    ooms: int = 0
    helped: int = 0
    """Requests that were served only after everything cached was given back."""
    mismatch: str = ""


def run_sequence(case: Case, seed: int, *, events: int) -> Outcome:
    """Run one sequence on both; the outcome tells the first difference, or none."""
    rng = random.Random(f"{case.name} {seed}")
    pair = Pair(case, rng)
    for number in range(events):
        call = pair.step()
        pair.outcome.events += 1
        difference = pair.difference(layout=number % 8 == 0 or number == events - 1)
        if difference:
            pair.outcome.mismatch = f"{case.name}, seed {seed}, event {number}, {call}: {difference}"
            break
    return pair.outcome


class Pair:
    """The two allocators, and what is alive in both."""

    def __init__(self, case: Case, rng: random.Random) -> None:
        capacity = rng.choice([rng.randrange(24, 260) * MIB, rng.randrange(30 * MIB, 120 * MIB), 4096 * MIB])
        # Round numbers too, so that what is reserved can be just what is allowed.
        share = rng.uniform(0.4, 1.05)
        allowed = int(capacity * share) // (unit := rng.choice([1, 4 * MIB])) * unit if case.capped else None
        self.rng = rng
        self.outcome = Outcome()
        self.heard: list[tuple[str, int, int]] = []
        self.real = CachingAllocator(
            capacity, AllocatorSettings.parse(case.text), allowed, listener=lambda *entry: self.heard.append(entry)
        )
        self.plain = PlainAllocator(capacity, Rules(**{**vars(case.rules), "allowed": allowed}))
        self.alive: list[tuple[Block, Piece | None]] = []
        self.sizes = [self._size() for _ in range(rng.randrange(2, 12))]
        self.freeing = rng.uniform(0.25, 0.55)
        self.emptying = rng.choice([0.01, 0.02, 0.15])
        self.said = ""

    def step(self) -> str:
        """Make one call on both."""
        rng = self.rng
        kind = rng.random()
        if kind < self.emptying:
            self.real.empty_cache()
            self.plain.empty_cache()
            return "empty_cache"
        if kind > 0.99:
            self.real.stats.reset_peaks()
            self.plain.peaks = self.plain.now()
            return "reset_peaks"
        if self.alive and rng.random() < self.freeing:
            block, piece = self.alive.pop(rng.choice([0, -1, rng.randrange(len(self.alive))]))
            said = f"free({block!r})"
            self.real.free(block)
            self.plain.free(piece)
            return said
        return self._malloc(rng.choice(self.sizes) if rng.random() < 0.7 else self._size())

    def difference(self, *, layout: bool) -> str:
        """Say in what the two differ, if in anything."""
        if self.said:
            return self.said
        real, plain = self.real.stats, self.plain
        now = plain.now()
        for name, value in now.items():
            counter = getattr(real, name)
            if (counter.current, counter.peak) != (value, plain.peaks[name]):
                return f"{name} is {counter}, the oracle has {value}, peak {plain.peaks[name]}"
        counts = real.num_alloc_retries, real.num_ooms, real.num_oom_rejections
        if counts != (plain.retries, plain.ooms, plain.rejections):
            return f"retries, ooms and rejections {counts}, oracle {plain.retries, plain.ooms, plain.rejections}"
        if self.heard != plain.history:
            return f"history {self.heard}, oracle {plain.history}"
        self.outcome.helped = plain.retries - plain.ooms
        self.heard.clear()
        plain.history.clear()
        return self._difference_of_layouts() if layout else ""

    def _difference_of_layouts(self) -> str:
        mine = [
            (s["address"], s["segment_type"], s["is_expandable"], tuple(tuple(b.values())[:4] for b in s["blocks"]))
            for s in self.real.segments()
        ]
        theirs = self.plain.layout()
        return "" if mine == theirs else f"segments {mine}, oracle {theirs}"

    def _malloc(self, size: int) -> str:
        block: Block | None = None
        piece: Piece | None = None
        mine: tuple[int, ...] = ()
        theirs: tuple[int, ...] = ()
        try:
            block = self.real.malloc(size)
        except SimulatedOutOfMemory as full:
            mine = full.requested, full.allocated, full.reserved, full.free, full.capacity
        try:
            piece = self.plain.malloc(size)
        except NoRoom as full:
            theirs = full.numbers
        self.outcome.ooms += bool(theirs)
        if mine != theirs:
            self.said = f"out of memory {mine or 'not'}, oracle {theirs or 'not'}"
        elif block is not None:
            place = (block.address, block.size), (piece.start, piece.size) if piece else (0, 0)
            if place[0] != place[1]:
                self.said = f"block {place[0]}, oracle {place[1]}"
            self.alive.append((block, piece))
        return f"malloc({size})"

    def _size(self) -> int:
        rng = self.rng
        kind = rng.random()
        if kind < 0.35:
            return int(2 ** rng.uniform(0, 20.5))
        if kind < 0.7:
            return int(2 ** rng.uniform(19, 25.5))
        if kind < 0.98:
            return max(rng.choice(EDGES) + rng.choice([-MIB, -512, -1, 0, 0, 1, 512, MIB]), 0)
        return rng.choice([0, 2**60, 2**33])
