"""Does a run whose batch rises with the critical batch get there sooner than the best fixed batch?

    python benchmarks/ramp_pays.py --cache FOLDER        by the grids of benchmarks/recommendation.py

A run begins at the best batch of the grid for the early loss, rounded to micro-batches, with its tuned learning rate;
`BatchRamp` doubles it as it sees fit, up to twice the best batch for the late loss, and scales the rate. Judged is the
counted time (a step costs its samples and `--cost` more) until the late loss, averaged over seeds, over that of the
best fixed batch of the grid with its own tuned rate.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from recommendation import GRID, Cache, Grid, make_grid, rate_of, read_grids
from recommendation_grid import SEEDS, SMOOTHED, SPACING, torch_optimizers
from recommendation_tasks import FOR_CONSTANTS, HELD_OUT, JUDGED, loss_of

from batchwright.accumulate.accumulator import Accumulator
from batchwright.noise.noise_scale import NoiseScale
from batchwright.noise.ramp import BatchRamp

if TYPE_CHECKING:
    from recommendation_tasks import Task

PARTS = 4
# Given up beyond so many times the time of the best fixed batch.
PATIENCE = 4
# Steps of the first batch that the noise scale is averaged over: the runs are short.
WINDOW = 40


def best_fixed(grid: Grid, name: str, cost: int) -> tuple[int, float]:
    """Return the batch that reaches a loss soonest, and its counted time."""
    times = {batch: grid.best(name, batch)[1] * (cost + batch) for batch in GRID}
    best = min(times, key=lambda batch: times[batch])
    return best, times[best]


def ramped(task: Task, grid: Grid, cost: int, seed: int, *, by_model: bool) -> tuple[float | None, list[int]]:
    """Return the counted time of a run that ramps until the late loss, None if given up, and its batches."""
    start, _ = best_fixed(grid, "early", cost)
    best, limit = best_fixed(grid, "late", cost)
    start = max(min(start, best), PARTS)
    torch.manual_seed(seed)
    model, data = task.model(), task.data()
    optimizers = torch_optimizers(task, model, rate_of(task, grid.best("late", start)[0]))
    accumulator = Accumulator(model, optimizers, PARTS)
    micro_batch = start // PARTS
    noise = NoiseScale(accumulator, window=WINDOW * start)
    times = {size: float(cost + size) for size in (GRID[0], GRID[-1])}
    ramp = BatchRamp(
        noise, max_accumulation=max(2 * best // micro_batch, PARTS), step_times=times if by_model else None
    )
    generator = torch.Generator().manual_seed(1000 + seed)
    seconds, next_look, losses, batches = 0.0, limit / 50, list[float](), [start]
    while seconds < PATIENCE * limit:
        drawn = torch.randint(data.num_training, (micro_batch,), generator=generator)
        loss = loss_of(model(data.inputs[drawn]), data.targets[drawn])
        step = accumulator.backward(loss, micro_batch, samples=micro_batch)
        if step is None:
            continue
        seconds += cost + batches[-1]
        decision = ramp.update(step)
        if decision is not None:
            batches.append(decision.accumulation * micro_batch)
        if seconds >= next_look:
            next_look = max(next_look * SPACING, seconds)
            with torch.no_grad():
                losses.append(float(loss_of(model(data.inputs[-HELD_OUT:]), data.targets[-HELD_OUT:])))
            if len(losses) >= SMOOTHED and statistics.fmean(losses[-SMOOTHED:]) <= grid.losses["late"]:
                # The average stands for its middle, two looks ago.
                return seconds / SPACING ** (SMOOTHED // 2), batches
    return None, batches


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tasks", nargs="+", default=["kinds-adamw", "kinds-momentum", "denoise-adamw", "teacher-adamw"]
    )
    parser.add_argument("--cost", type=int, default=128)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir(), "batchwright-recommendation"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| task | best fixed batch | with step times (first seed) | time over the best fixed | without | time |")
    print("|---|---|---|---|---|---|")
    known = read_grids()
    named = {task.name: task for task in (*JUDGED, *FOR_CONSTANTS)}
    for task in (named[name] for name in options.tasks):
        grid = make_grid(task, Cache(options.cache / f"{task.name}.jsonl", known.get(task.name)))
        best, limit = best_fixed(grid, "late", options.cost)
        cells = []
        for by_model in (True, False):
            runs = [ramped(task, grid, options.cost, seed, by_model=by_model) for seed in range(SEEDS)]
            times = [seconds for seconds, _ in runs if seconds is not None]
            ratio = f"{statistics.fmean(times) / limit:.2f}" if len(times) == SEEDS else "not reached on every seed"
            cells += [", ".join(map(str, runs[0][1])), ratio]
        print(f"| {task.name} | {best} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
