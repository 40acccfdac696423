"""What `NoiseScale` costs beside the same training without it: CPU time and memory; BackPACK and Opacus beside it.

    python benchmarks/noise_overhead.py                 about a quarter of an hour of one core
    python benchmarks/noise_overhead.py --quick         minutes, with wider intervals
    python benchmarks/noise_overhead.py --json FILE     the same, kept

    pip install --no-deps backpack-for-pytorch==1.7.1 unfoldNd opacus==1.6.0 scipy opt_einsum    for the peers

The model is a transformer of 1.05 million weights, a micro-batch 1,024 tokens (8 x 128), the optimizer AdamW. BackPACK
has no LayerNorm, so it runs a perceptron of 0.98 million weights on 128 rows, and ours and Opacus run it too. A peer's
step includes the squared norm of each example's gradient, which is what a noise scale is made of.

Time is CPU time of this process on one thread. The loop with and the one without train by turns, micro-batch by
micro-batch, two models over the same memory, of which one has hooks. A value is the ratio of a step with to a step
without, less 1; with every=10 of ten steps in a row to ten. Shown is the median, with the interval that holds it at
95 % (order statistics), and the ratio of all time to all time. The loop without against itself is what the machine
alone does. Memory is the bytes of tensors alive at the peak of a step.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from noise_overhead_loops import (
    ACCUMULATION,
    Pair,
    Transformer,
    own_loop,
    perceptron,
    with_accumulator,
    with_backpack,
    with_opacus,
    with_opacus_ghost,
)

from batchwright.device.host import ByteCounter

if TYPE_CHECKING:
    from collections.abc import Callable

WARM_UP = 10
BARS = {1: 0.05, 10: 0.01}
PEERS = {"backpack": "backpack-for-pytorch", "opacus": "opacus"}


@dataclass(frozen=True)
class Case:
    """A loop to be timed with and without."""

    name: str
    model: Callable[[], Any]
    loop: Callable[..., Any]
    every: int | None
    """None: the loop without, against itself."""
    accumulation: int
    pairs: int
    """Of steps; with every=10, of ten steps."""
    needs: str = ""

    @property
    def is_main(self) -> bool:
        """Whether the bar speaks of it: a transformer that accumulates."""
        return self.accumulation == ACCUMULATION and self.every is not None


CASES = [
    Case("Accumulator, against itself", Transformer, with_accumulator, None, ACCUMULATION, 60),
    Case("Accumulator", Transformer, with_accumulator, 1, ACCUMULATION, 60),
    Case("Accumulator", Transformer, with_accumulator, 10, ACCUMULATION, 8),
    Case("own loop", Transformer, own_loop, 1, ACCUMULATION, 60),
    Case("own loop", Transformer, own_loop, 10, ACCUMULATION, 8),
    Case("per example, against itself", Transformer, own_loop, None, 1, 100),
    Case("per example", Transformer, own_loop, 1, 1, 100),
    Case("per example", Transformer, own_loop, 10, 1, 12),
    Case("Opacus GradSampleModule", Transformer, with_opacus, 1, 1, 20, "opacus"),
    Case("Opacus ghost norms", Transformer, with_opacus_ghost, 1, 1, 20, "opacus"),
    Case("perceptron: per example, against itself", perceptron, own_loop, None, 1, 400),
    Case("perceptron: per example", perceptron, own_loop, 1, 1, 400),
    Case("perceptron: per example", perceptron, own_loop, 10, 1, 60),
    Case("perceptron: BackPACK BatchL2Grad", perceptron, with_backpack, 1, 1, 200, "backpack"),
    Case("perceptron: Opacus GradSampleModule", perceptron, with_opacus, 1, 1, 10, "opacus"),
    Case("perceptron: Opacus ghost norms", perceptron, with_opacus_ghost, 1, 1, 200, "opacus"),
]


def loops_of(case: Case) -> tuple[Callable[[], None], Callable[[], None], Pair]:
    """Return a micro-batch without and one with."""
    pair = Pair(case.model)
    (plain, of_plain), (hooked, of_hooked) = pair.sides()
    without = case.loop(plain, of_plain, pair.batches, None, case.accumulation)
    return without, case.loop(hooked, of_hooked, pair.batches, case.every, case.accumulation), pair


def seconds_of(step: Callable[[], None]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def timed(case: Case, pairs: int) -> dict[str, Any]:
    without, with_noise, _ = loops_of(case)
    together = case.accumulation * (case.every or 1)
    for _ in range(WARM_UP * case.accumulation):
        without()
        with_noise()
    taken = []
    for index in range(pairs * together):
        # Who begins changes from one to the next, and from step to step: the last micro-batch has the optimizer's work.
        if (index + index // case.accumulation) % 2:
            mine, base = seconds_of(with_noise), seconds_of(without)
        else:
            base, mine = seconds_of(without), seconds_of(with_noise)
        taken.append((mine, base))
    blocks = [taken[start : start + together] for start in range(0, len(taken), together)]
    ratios = [sum(m for m, _ in block) / sum(b for _, b in block) - 1 for block in blocks]
    median, low, high = with_interval(ratios)
    return {
        "micro_step_ms": statistics.median(base for _, base in taken) * 1e3,
        "overhead": median,
        "interval": [low, high],
        "of_all_time": sum(m for m, _ in taken) / sum(b for _, b in taken) - 1,
        "pairs": pairs,
    }


def with_interval(values: list[float]) -> tuple[float, float, float]:
    """Return the median, and the values between which it lies with 95 %: those of rank n/2 +- 0.98 sqrt(n)."""
    ranked, number = sorted(values), len(values)
    reach = 0.98 * math.sqrt(number)
    low, high = max(0, math.floor(number / 2 - reach)), min(number - 1, math.ceil(number / 2 + reach))
    return statistics.median(ranked), ranked[low], ranked[high]


def peaks(case: Case) -> dict[str, int]:
    """Return the bytes alive at the peak of a step, without and with, and those of a gradient."""
    without, with_noise, pair = loops_of(case)
    weights = list(pair.plain.parameters())
    found = {"gradient": sum(weight.numel() * weight.element_size() for weight in weights)}
    for name, step in {"without": without, "with": with_noise}.items():
        for _ in range(WARM_UP * case.accumulation):
            step()
        with ByteCounter() as counter:
            counter.count(weights)
            counter.count(value for state in pair.of_plain.state.values() for value in state.values())
            for _ in range(case.accumulation):
                step()
        found[name] = counter.peak_bytes
    return found


def installed(case: Case) -> bool:
    try:
        return not case.needs or bool(version(PEERS[case.needs]))
    except PackageNotFoundError:
        return False


def print_times(cases: list[Case], share: float) -> tuple[list[dict[str, Any]], list[str]]:
    """Print a row for each case; return the rows and what is above its bar."""
    rows, failures = [], []
    print("| loop | every | micro-batch without, ms | overhead | 95 % interval | of all time | pairs |")
    print("|---|---|---|---|---|---|---|")
    for case in cases:
        row = {"name": case.name, "every": case.every, **timed(case, max(8, round(case.pairs * share)))}
        rows.append(row)
        low, high = row["interval"]
        shown = f"{row['overhead']:+.2%} | {low:+.2%} .. {high:+.2%} | {row['of_all_time']:+.2%} | {row['pairs']}"
        print(f"| {case.name} | {case.every or '-'} | {row['micro_step_ms']:.0f} | {shown} |", flush=True)
        if case.is_main and not row["overhead"] <= BARS[case.every or 1]:
            failures.append(f"{case.name}, every={case.every}: {row['overhead']:+.2%}, bar {BARS[case.every or 1]:.0%}")
    return rows, failures


def print_memory(cases: list[Case]) -> tuple[list[dict[str, Any]], list[str]]:
    rows, failures = [], []
    print("\n| loop | peak without, bytes | with | more | bytes of a gradient |\n|---|---|---|---|---|")
    for case in cases:
        row = peaks(case)
        rows.append({"name": case.name, **row})
        more = row["with"] - row["without"]
        print(f"| {case.name} | {row['without']:,} | {row['with']:,} | {more:,} | {row['gradient']:,} |", flush=True)
        if case.is_main and not more < row["gradient"] / 10:
            failures.append(f"{case.name}: {more:,} bytes more, a gradient has {row['gradient']:,}")
    return rows, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--every", type=int, help="cases with this every=, and loops against themselves")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = [case for case in CASES if installed(case) and options.only in case.name]
    cases = [case for case in cases if options.every is None or case.every in (None, options.every)]
    peers = [name for name in PEERS.values() if any(case.needs and PEERS[case.needs] == name for case in cases)]
    print(", ".join(f"{name} {version(name)}" for name in ["torch", *peers]) + ", one thread\n")
    times, failures = print_times(cases, 0.2 if options.quick else 1.0)
    memory, more_failures = print_memory([case for case in cases if case.every == 1])
    failures += more_failures
    if options.json:
        options.json.write_text(json.dumps({"times": times, "memory": memory, "failures": failures}, indent=1) + "\n")
    print("\n" + ("\n".join(failures) if failures else "Every bar is kept."))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
