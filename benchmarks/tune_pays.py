"""Does what `make demo` recommends reach the demo's loss as soon as anything else does?

    python benchmarks/tune_pays.py                       about a quarter of an hour of one core
    python benchmarks/tune_pays.py --cache FOLDER --threads 2

The demo's own command (examples/char_gpt.py, `DEMO` below) is run, and its recommendation trained as it stands: that
batch, that learning rate. Beside it a grid of batches, each with a learning rate tuned for it on two seeds of their own
(benchmarks/noise_pays_runs.py: factors of 2, then of sqrt(2), for the fewest steps). Then five other seeds, paired: the
same initial weights and the same order of samples at every batch. The target is 2.2 nats on held-out text, what a
batch of 32 reaches after 5 s; target and grid were fixed before anything was run.

Time is steps x median step time. Step times come from rounds that go through all batches in turn: CPU time with one
thread, wall time with more. Steps above what the budget holds run in one pass here, which is in favour of the grid.
Intervals are 95 %, from a bootstrap over seeds (paired) and rounds; where 1 is inside, the two are a tie.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from char_gpt import CONTEXT, CharGPT, Windows, topics
from noise_pays import ratio, told
from noise_pays_runs import Cache, rate_of, step_times, stepper, steps_to_target, trained, tuned
from noise_pays_tasks import BLOCK, Data, Task

ROOT = Path(__file__).parent.parent
DEMO = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("DEMO :=")).split()[2:]
GRID = (8, 16, 32, 64, 128, 256)
DEFAULT = 32
SEEDS = range(5)
SLOWER = 1.05


@cache
def text(is_held_out: bool) -> Data:
    """Return every window of the demo's text; every tenth block is held out."""
    codes = Windows(topics()).codes
    starts = torch.arange(len(codes) - CONTEXT)
    inside = starts % BLOCK < BLOCK - CONTEXT
    return Data(codes, starts[inside & ((starts // BLOCK % 10 == 9) == is_held_out)], CONTEXT + 1)


TASK = Task(
    name="demo",
    data=text,
    model=lambda: CharGPT(Windows(topics()).num_letters),
    optimizer=lambda weights, rate: torch.optim.AdamW(weights, lr=rate),
    first_rate=8e-3,
    target=2.2,
    evaluation_samples=256,
    training_seconds=120.0,
)


def recommended(threads: int, folder: Path) -> dict[str, Any]:
    """Run the demo's command, and return what it recommends."""
    file = folder / "run.json"
    command = [sys.executable, "-m", "batchwright", *DEMO, "--run-file", str(file)]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": str(threads)})
    found: dict[str, Any] = json.loads(file.read_text())["recommendation"]
    rate = found["learning_rate"]["recommended"]
    return {"batch": found["effective_batch"], "rate": rate, "range": found["range_within_5_percent"]}


def run(threads: int, kept: Cache, folder: Path) -> dict[str, Any]:
    """Train everything; return steps and times by batch, where 0 is the recommendation."""
    advice = kept.get(f"recommended with {threads} threads", partial(recommended, threads, folder))
    exponents = {DEFAULT: tuned(TASK, DEFAULT, 0, kept)[0]}
    for batch in sorted(GRID, key=lambda each: abs(math.log(each / DEFAULT))):
        if batch not in exponents:
            near = min(exponents, key=lambda known: abs(math.log(known / batch)))
            exponents[batch] = tuned(TASK, batch, exponents[near] + round(math.log2(batch / near)), kept)[0]
    steps: dict[int, Any] = {b: [trained(TASK, b, exponents[b], seed, kept) for seed in SEEDS] for b in GRID}

    def as_advised(seed: int) -> float | None:
        return steps_to_target(TASK, *stepper(TASK, advice["batch"], advice["rate"], seed), math.inf)

    steps[0] = [
        kept.get(f"steps at {advice['batch']}, rate {advice['rate']}, seed {seed}", partial(as_advised, seed))
        for seed in SEEDS
    ]
    sizes = sorted({*GRID, advice["batch"]})
    times = kept.get(f"times of {sizes} with {threads} threads", partial(step_times, TASK, sizes, threads > 1))
    times["0"] = times[str(advice["batch"])]
    return {"advice": advice, "exponents": exponents, "steps": steps, "times": times}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir(), "batchwright-tune-pays"))
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    found = run(options.threads, Cache(options.cache / "demo.jsonl"), options.cache)
    advice = found["advice"]
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {options.threads} threads")
    print(f"recommended: batch {advice['batch']}, learning rate {advice['rate']:.3g}; as good {advice['range']}")
    print("\n| batch | learning rate | steps | step, ms | time / recommended |\n|---|---|---|---|---|")
    ratios = {batch: ratio(found, batch, 0) for batch in found["steps"]}
    for batch in sorted(ratios, key=lambda each: each or advice["batch"]):
        steps = [math.inf if each is None else each for each in found["steps"][batch]]
        rate = rate_of(TASK, found["exponents"][batch]) if batch else advice["rate"]
        name = str(batch) if batch else f"**{advice['batch']} (recommended)**"
        step = 1e3 * statistics.median(found["times"][str(batch)])
        print(f"| {name} | {rate:.3g} | {statistics.fmean(steps):,.0f} | {step:.2f} | {told(ratios[batch])} |")
    best = min(GRID, key=lambda batch: ratios[batch][0])
    print()
    is_kept = True
    for name, batch in ((f"the best of the grid, {best}", best), (f"{DEFAULT} by default", DEFAULT)):
        value, low, high = ratios[batch]
        verdict = "tie" if low <= 1 <= high else "faster" if value > 1 else "slower"
        print(f"against {name}: {verdict} (time {told(ratios[batch])} of ours)")
        is_kept &= value * SLOWER >= 1 or high >= 1
    print(f"\nNever more than 5 % slower: {'yes' if is_kept else 'NO'}.")
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main())
