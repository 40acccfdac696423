"""The work of each published step: traced at one or two sizes, kept in a file, and put together for a row.

    python -m step_cases.traces FILE        from benchmarks/; adds what is missing, and may be stopped

A step with accumulation is its micro-batches and one update; a row between two traced sizes lies on their line.
"""

from __future__ import annotations

import pickle
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from batchwright.catalogue.cards import find_card
from batchwright.device.step import StepSettings
from batchwright.simulated.card import SimulatedCard
from batchwright.timing.collectives import COLLECTIVES
from batchwright.trace.run import trace_workload
from batchwright.trace.work import StepWork, Work
from step_cases.language import language_model, replicated, tf32
from step_cases.published import Row, rows
from step_cases.vision import classifier, detector

# Cards whose kernels are those of a generation.
_STANDS_FOR = {"old": "p100-16gb", "volta": "v100-32gb", "new": "a100-80gb"}
_OLD = ("p100", "p4", "titan-xp", "gtx-1080")
_VOLTA = ("v100", "titan-v", "t4", "rtx-2080", "titan-rtx", "quadro")


@dataclass(frozen=True)
class Trace:
    """The work of a step at a size, and what tracing it took."""

    step: StepWork
    seconds: float


def generation(card: str) -> str:
    """Return which kernels a card runs."""
    return "old" if card.startswith(_OLD) else "volta" if card.startswith(_VOLTA) else "new"


def trace_key(row: Row) -> tuple[Any, ...]:
    """Return what a row's trace depends on, besides its size."""
    return (*row.key, generation(row.card))


def sizes_to_trace(sizes: Iterable[int]) -> tuple[int, ...]:
    """Return the sizes at which a workload is traced: the ends of a line, and 1 by itself: it broadcasts."""
    chosen = sorted(set(sizes))
    alone, line = [size for size in chosen if size == 1], [size for size in chosen if size > 1]
    return tuple(alone + sorted({*line[:1], *line[-1:]}))


def groups() -> dict[tuple[Any, ...], list[Row]]:
    """Return the rows by trace."""
    by_key: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows():
        by_key[trace_key(row)].append(row)
    return by_key


def trace(row: Row, size: int) -> Trace:
    """Trace the workload of a row at a size."""
    start = time.process_time()
    vision = row.source in ("timm", "ryujaehun") or row.model.startswith(("ResNet50", "SSD300"))
    make = detector if row.model.startswith("SSD300") else classifier if vision else language_model
    workload = make(row)
    devices = row.devices if row.settings.startswith("FSDP") else 2
    if workload.wrap is None:
        workload = replace(workload, wrap=replicated)
    card = SimulatedCard(find_card(_STANDS_FOR[generation(row.card)]), is_roomy=True)
    allowed = row.precision in ("tf32", "amp-fp16") or "bf16" in row.precision
    with tf32(allowed=allowed):
        # Where the update is the same in the first step as later, or a small part, one step will do.
        steps = 1 if row.source in ("neusight", "llm-foundry") else 2
        traced = trace_workload(workload, size, StepSettings(devices=devices), card=card, steps=steps)
    assert traced.work is not None
    return Trace(_compacted(traced.work), time.process_time() - start)


def _compacted(step: StepWork) -> StepWork:
    """Share equal entries, and forget names of modules: the file is smaller by ten."""
    met: dict[Work, Work] = {}
    entries = tuple(met.setdefault(entry, entry) for entry in step.entries)
    return StepWork(entries, ("",) * len(entries), step.num_views)


class Traces:
    """A file of traces."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.known: dict[tuple[Any, ...], Trace | str] = {}
        if file.exists():
            plain = pickle.loads(zlib.decompress(file.read_bytes()))
            self.known = {key: value if isinstance(value, str) else _read(value) for key, value in plain.items()}

    def step_of(self, row: Row, group: list[Row]) -> StepWork | None:
        """Return the work of a row's whole step, all its micro-batches; None where it could not be traced."""
        sizes = sizes_to_trace(r.micro_batch for r in group)
        traced = {size: self.known.get((*trace_key(row), size)) for size in sizes}
        step: StepWork | None = None
        exact = traced.get(row.micro_batch)
        if isinstance(exact, Trace):
            step = exact.step
        elif row.micro_batch not in traced and len(sizes) > 1:
            small, large = traced[sizes[-2]], traced[sizes[-1]]
            if isinstance(small, Trace) and isinstance(large, Trace):
                step = small.step.scaled(large.step, sizes[-2], sizes[-1], row.micro_batch)
        if step is not None and row.devices == 1:
            kept = tuple(entry for entry in step.entries if entry.kind not in COLLECTIVES)
            step = StepWork(kept, ("",) * len(kept), step.num_views)
        return None if step is None else accumulated(step, row.accumulation)

    def write(self) -> None:
        """Write all traces, as plain numbers."""
        plain = {key: value if isinstance(value, str) else _plain(value) for key, value in self.known.items()}
        self.file.write_bytes(zlib.compress(pickle.dumps(plain), 6))

    def fill(self) -> None:
        """Trace what is missing, the small first."""
        missing = [
            (group[0], size)
            for key, group in groups().items()
            for size in sizes_to_trace(row.micro_batch for row in group)
            if (*key, size) not in self.known
        ]
        for number, (row, size) in enumerate(sorted(missing, key=lambda m: zlib.crc32(repr(m).encode()))):
            try:
                self.known[*trace_key(row), size] = trace(row, size)
            except (Exception, SystemExit) as error:
                self.known[*trace_key(row), size] = f"{type(error).__name__}: {str(error)[:200]}"
            if number % 20 == 19 or number == len(missing) - 1:
                self.write()
                print(f"{number + 1} of {len(missing)}", file=sys.stderr, flush=True)


def _plain(traced: Trace) -> tuple[Any, ...]:
    numbers: dict[Work, int] = {}
    order = [numbers.setdefault(entry, len(numbers)) for entry in traced.step.entries]
    return [tuple(entry) for entry in numbers], order, traced.step.num_views, traced.seconds


def _read(plain: tuple[Any, ...]) -> Trace:
    entries, order, num_views, seconds = plain
    work = [Work(*entry) for entry in entries]
    return Trace(StepWork(tuple(work[number] for number in order), ("",) * len(order), num_views), seconds)


def accumulated(step: StepWork, times: int) -> StepWork:
    """Return a step of so many micro-batches."""
    if times == 1:
        return step
    once = [entry for entry in step.entries if entry.phase == "optimizer"]
    each = [entry for entry in step.entries if entry.phase != "optimizer"]
    entries = (*each * times, *once)
    return StepWork(entries, ("",) * len(entries), step.num_views * times)


if __name__ == "__main__":
    torch.set_num_threads(1)
    Traces(Path(sys.argv[1])).fill()
