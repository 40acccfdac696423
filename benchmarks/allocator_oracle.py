"""The simulated caching allocator against a plain one, byte for byte, on many random sequences of calls.

    python benchmarks/allocator_oracle.py                     10,000 sequences, about two minutes of one core
    python benchmarks/allocator_oracle.py --sequences 500     fewer
    python benchmarks/allocator_oracle.py --seed 1            others

The plain one (tests/oracle/caching_allocator.py) is written from the same source in another way: it keeps nothing that
it can count. After every call the two are compared: the address of each block, allocated, active, reserved, requested
and split bytes with their peaks, segments, retries, out-of-memory with its numbers, and the memory history. Then the
time of 200,000 calls on the simulated one, as millions of calls in a second.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from batchwright.simulated.allocator.caching_allocator import CachingAllocator
from batchwright.simulated.allocator.settings import AllocatorSettings

sys.path.append(str(Path(__file__).resolve().parents[1]))

from tests.simulated.allocator.event_sequences import CASES, run_sequence

if TYPE_CHECKING:
    from batchwright.simulated.allocator.segments import Block

EVENTS = 80
CALLS = 200_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()

    table = Table("settings", "sequences", "events", "OOMs", "retries that helped", "mismatches")
    totals = [0] * 5
    mismatches: list[str] = []
    for number, case in enumerate(CASES):
        # Seeds of one run are not those of the next, nor those of the tests.
        count = len(range(number, asked.sequences, len(CASES)))
        first = (asked.seed + 1) * 1_000_000
        outcomes = [run_sequence(case, first + each, events=EVENTS) for each in range(count)]
        found = [outcome.mismatch for outcome in outcomes if outcome.mismatch]
        row = [
            count,
            sum(outcome.events for outcome in outcomes),
            sum(outcome.ooms for outcome in outcomes),
            sum(outcome.helped for outcome in outcomes),
            len(found),
        ]
        totals = [total + value for total, value in zip(totals, row, strict=True)]
        mismatches += found
        table.add_row(case.name, *(f"{value:,}" for value in row))
    table.add_section()
    table.add_row("all", *(f"{total:,}" for total in totals))

    console = Console(width=140)
    console.print(table)
    for mismatch in mismatches[:10]:
        console.print(mismatch, markup=False)
    for text in ("", "expandable_segments:True"):
        console.print(f"{text or 'defaults'}: {CALLS / seconds_of_calls(text) / 1e6:.2f} million calls a second")
    return bool(mismatches)


def seconds_of_calls(text: str) -> float:
    """Return the time of many calls with some 1,500 blocks alive at a time, of 64 bytes to 16 MiB."""
    rng = random.Random(0)
    allocator = CachingAllocator(80 << 30, AllocatorSettings.parse(text))
    sizes = [int(2 ** rng.uniform(6, 24)) for _ in range(CALLS)]
    chances = [rng.random() for _ in range(CALLS)]
    alive: list[Block] = []
    start = time.perf_counter()
    for size, chance in zip(sizes, chances, strict=True):
        if chance < len(alive) / 3000:
            at = size % len(alive)
            alive[at], alive[-1] = alive[-1], alive[at]
            allocator.free(alive.pop())
        else:
            alive.append(allocator.malloc(size))
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
