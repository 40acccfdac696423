"""Is the batch that `tune` recommends the one that gets there soonest? Judged blind on tasks with a tuned grid each.

    python benchmarks/recommendation.py grid --tasks JUDGED        steps to two losses at every batch, rates tuned
    python benchmarks/recommendation.py judge --tasks JUDGED       what tune says of them, and the tables
    python benchmarks/recommendation.py pack                       the grids in --cache become those of the repository

Grids that are in the repository (data/recommendation_grids.jsonl.gz) are not trained again, unless with --anew. Every
finished piece is kept in --cache, and a second run goes on from there. `--tasks CONSTANTS` does the same for the tasks
by which constants were chosen; names of tasks do too.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import platform
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from recommendation_grid import RATES, SEEDS, curve_of, mean_of, smoothed_loss, steps_to, torch_optimizers
from recommendation_tasks import FOR_CONSTANTS, JUDGED, loss_of

from batchwright.noise.noise_result import judge
from batchwright.planning.critical_batch import CriticalBatch
from batchwright.planning.times import TimeModel
from batchwright.tuning.race import race_batches
from batchwright.tuning.rate_sweep import sweep_rates
from batchwright.tuning.recommendation import advise_run
from batchwright.tuning.run_file import Measured, is_done
from batchwright.tuning.stages import train_branches
from batchwright.tuning.tune import TuneRequest, tune
from batchwright.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from recommendation_tasks import Task

GRID = (8, 16, 32, 64, 128, 256, 512, 1024)
DEFAULT = 32
EARLY = 8
"""The early loss is that of the default batch after such a part of its steps."""
PATIENCE = 24
"""Beyond so many times the samples of the late loss at the default batch, a batch is given up."""
MOST_TURNS = 5


GRIDS = Path(__file__).parent / "data" / "recommendation_grids.jsonl.gz"
"""One line per piece: task, key, what was found."""


class Cache:
    """What is finished, one JSON object per line, and what was known before."""

    def __init__(self, path: Path, before: dict[str, Any] | None = None) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        self._known: dict[str, Any] = {**(before or {}), **dict(map(json.loads, lines))}

    def get(self, key: str, make: Callable[[], Any]) -> Any:
        """Return what is known under the key, or make it and keep it."""
        if key not in self._known:
            begin = time.process_time()
            self._known[key] = make()
            with self._path.open("a") as file:
                file.write(json.dumps([key, self._known[key]]) + "\n")
            print(f"{self._path.stem}: {key} ({time.process_time() - begin:.0f} s)", file=sys.stderr, flush=True)
        return self._known[key]


def read_grids() -> dict[str, dict[str, Any]]:
    """Return the grids of the repository, by task."""
    grids: dict[str, dict[str, Any]] = {}
    with gzip.open(GRIDS, "rt") as file:
        for line in file:
            task, key, found = json.loads(line)
            grids.setdefault(task, {})[key] = found
    return grids


def pack_grids(folder: Path) -> None:
    """Write the grids of a cache, as far as they are finished, into the repository."""
    with gzip.GzipFile(GRIDS, "wb", mtime=0) as file:
        for path in sorted(folder.glob("*.jsonl")):
            if path.stem.endswith(".asked"):
                continue
            for key, found in map(json.loads, path.read_text().splitlines()):
                rounded = [[[x and float(f"{x:.4g}") for x in seed] for seed in rate] for rate in found["losses"]]
                line = [path.stem, key, {"steps": found["steps"], "losses": rounded}]
                file.write((json.dumps(line, separators=(",", ":")) + "\n").encode())
    print(f"{GRIDS}: {GRIDS.stat().st_size:,} bytes")


# --- the grid


def rate_of(task: Task, exponent: int) -> float:
    return float(task.first_rate * 2 ** (exponent / 2))


Curves = dict[int, tuple[list[int], list[list[float]]]]
"""By exponent of the rate: the steps of the looks, and the losses there of every seed."""


@dataclass
class Tuning:
    """The curves of one batch at the rates that were tried."""

    task: Task
    batch: int
    cache: Cache
    curves: Curves = field(default_factory=dict)

    def try_rates(self, name: str, first: int, until: Callable[[list[int], torch.Tensor], bool]) -> None:
        """Train at some rates from an exponent on, until a loss is reached."""
        exponents = range(first, first + RATES)

        def train() -> Any:
            steps, losses = curve_of(self.task, self.batch, [rate_of(self.task, e) for e in exponents], until)
            finite = [[[round(x, 5) if math.isfinite(x) else None for x in seed] for seed in rate] for rate in losses]
            return {"steps": steps, "losses": finite}

        found = self.cache.get(f"{name} at {self.batch} from {first}", train)
        for exponent, losses in zip(exponents, found["losses"], strict=True):
            whole = [[math.inf if loss is None else loss for loss in seed] for seed in losses]
            if exponent not in self.curves or len(found["steps"]) > len(self.curves[exponent][0]):
                self.curves[exponent] = (found["steps"], whole)

    def lowest(self, at: float) -> tuple[float, int]:
        """Return the least loss after so many steps, averaged over seeds, and the exponent of its rate."""

        def loss(exponent: int) -> float:
            steps, losses = self.curves[exponent]
            last = max(place for place, step in enumerate(steps) if step <= at)
            return smoothed_loss(mean_of(losses)[: last + 1])

        return min((loss(exponent), exponent) for exponent in self.curves)

    def best(self, target: float, seeds: Sequence[int] = range(SEEDS)) -> tuple[int, float]:
        """Return the exponent of the rate that takes fewest steps to a loss, and these."""

        def steps_at(exponent: int) -> float:
            steps, losses = self.curves[exponent]
            return steps_to(target, steps, mean_of([losses[seed] for seed in seeds])) or math.inf

        return min(((exponent, steps_at(exponent)) for exponent in self.curves), key=lambda pair: (pair[1], pair[0]))

    def next_first(self, best: int) -> int | None:
        """Return where to go on if the best rate is at an end of those tried; None if it is not."""
        if best == max(self.curves):
            return best - 1
        return best - RATES + 2 if best == min(self.curves) else None


@dataclass
class Grid:
    """Everything that is known of a task: its tuned batches, and the two losses."""

    losses: dict[str, float]
    tunings: dict[int, Tuning]

    def steps_at(self, name: str, batch: int, exponent: int) -> float | None:
        """Return the steps at one rate, infinite if it did not get there; None if it was not tried."""
        curve = self.tunings[batch].curves.get(exponent)
        if curve is None:
            return None
        return steps_to(self.losses[name], curve[0], mean_of(curve[1])) or math.inf

    def best(self, name: str, batch: int, seeds: Sequence[int] = range(SEEDS)) -> tuple[int, float]:
        """Return the exponent of the best rate, and the steps, to the late or the early loss."""
        return self.tunings[batch].best(self.losses[name], seeds)


def tune_reference(task: Task, cache: Cache) -> tuple[Tuning, dict[str, float]]:
    """Train the default batch a little longer than the task's steps; return its curves, and the two losses."""
    reference, first = Tuning(task, DEFAULT, cache), 1 - RATES // 2
    for _ in range(MOST_TURNS):
        reference.try_rates("reference", first, lambda steps, losses: steps[-1] >= 1.2 * task.steps)
        following = reference.next_first(reference.lowest(task.steps)[1])
        if following is None:
            break
        first = following
    return reference, {"late": reference.lowest(task.steps)[0], "early": reference.lowest(task.steps / EARLY)[0]}


def make_grid(task: Task, cache: Cache) -> Grid:
    """Tune every batch, outwards from the default, to the late and the early loss."""
    reference, losses = tune_reference(task, cache)
    grid = Grid(losses, {DEFAULT: reference})
    for batch in sorted(GRID, key=lambda size: abs(math.log2(size / DEFAULT))):
        near = min(grid.tunings, key=lambda known: abs(math.log(known / batch)))
        tuning = grid.tunings.setdefault(batch, Tuning(task, batch, cache))
        most = max(PATIENCE * task.steps * DEFAULT / batch, task.steps / 2)
        for name, target in losses.items():

            def until(steps: list[int], seen: torch.Tensor, target: float = target, most: float = most) -> bool:
                return steps[-1] > most or bool((seen <= target).any()) or not bool(torch.isfinite(seen).any())

            first: int | None = None
            if not tuning.curves:
                first = grid.best(name, near)[0] - RATES // 2 + (batch > near)
            for _ in range(MOST_TURNS):
                if first is not None:
                    tuning.try_rates(name, first, until)
                best, steps = tuning.best(target)
                first = tuning.next_first(best)
                if first is None or not math.isfinite(steps):
                    break
    return grid


def print_grid(task: Task, grid: Grid) -> None:
    for name, loss in grid.losses.items():
        found = {batch: grid.best(name, batch) for batch in GRID}
        steps = ", ".join(
            f"{batch}: {steps:.0f} at {rate_of(task, rate):.2g}" for batch, (rate, steps) in found.items()
        )
        print(f"{task.name}, {name} loss {loss:.4f}: {steps}", flush=True)


# --- what tune says


COSTS = (16, 128, 1024)
"""What a step costs whatever its batch, in samples."""
BRANCHES = (32, 128, 512)
WAYS = ("noise scale", "branches", "race", "the grid's own", "always 32")
SHARE = 4
"""tune trains such a part of the run to measure the noise scale."""


def workload_of(task: Task, rate: float) -> Workload:
    """Return the task as a user would hand it in."""
    data = task.data()

    def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = torch.randint(data.num_training, (size,))
        return data.inputs[drawn], data.targets[drawn]

    return Workload(
        model=task.model,
        batch=batch,
        loss=lambda model, batch: loss_of(model(batch[0]), batch[1]),
        optimizer=lambda model: torch_optimizers(task, model, rate),
        name=task.name,
    )


def horizon_steps(task: Task, name: str) -> int:
    """Return how many steps of the default batch a loss takes."""
    return task.steps // (EARLY if name == "early" else 1)


def request_of(task: Task, name: str, *, with_branches: bool, with_race: bool) -> TuneRequest:
    steps = horizon_steps(task, name)
    return TuneRequest(
        on="cpu",
        steps=max(steps // SHARE, min(steps, 100)),
        noise_batch=DEFAULT,
        branch_batches=BRANCHES if with_branches else (),
        race=with_race,
        samples=steps * DEFAULT,
        seed=7,
    )


def counted_cost(run: dict[str, Any], cost: int) -> dict[str, Any]:
    """Return the run as if a step took so many samples' time more than its samples."""
    model = TimeModel(0.0, 1e-6, cost * 1e-6)
    points = [
        {"micro_batch": size, "seconds": model.alpha + model.beta * size + model.sigma, "accumulation": 1}
        for size in (GRID[0], GRID[2], GRID[-1])
    ]
    throughput = {"devices": 1, "fastest_micro_batch": GRID[-1], "times": {"points": points}}
    fit: dict[str, Any] = {
        "micro_batch": GRID[-1],
        "limit": GRID[-1],
        "limit_bytes": None,
        "line": None,
        "peak_bytes": {},
    }
    return {**run, "throughput": throughput, "fit": fit}


def measure(task: Task, name: str, grid: Grid, cache: Cache, *, with_branches: bool) -> dict[str, Any]:
    """Return the run of tune, without times: they are counted afterwards."""
    rate = rate_of(task, grid.best(name, DEFAULT)[0])
    workload = workload_of(task, rate)

    def begin() -> Any:
        request = request_of(task, name, with_branches=False, with_race=False)
        skip = ("fit", "estimate", "throughput", "audit", "rate")
        horizon = {"steps": request.steps, "noise_batch": DEFAULT, "samples": request.samples, "seed": request.seed}
        return tune(workload, on="cpu", skip=skip, **horizon).run  # type: ignore[arg-type]  # one by one

    run = {"rate": {"skipped": "not reached"}, **cache.get(f"tune to the {name} loss", begin)}
    if not with_branches:
        return {**run, "branches": {"skipped": "not asked for"}}
    request = request_of(task, name, with_branches=True, with_race=False)

    def branch() -> Any:
        return train_branches(workload, Measured.read(run), request, lambda text: None)

    return {**run, "branches": cache.get(f"branches to the {name} loss", branch)}


def advise(run: dict[str, Any], task: Task, name: str, cost: int, grid: Grid, cache: Cache) -> dict[str, Any]:
    """Return the recommendation at a cost of steps, with the sweep of rates that tune makes without branches."""
    told = counted_cost(run, cost)
    request = request_of(task, name, with_branches=is_done(run["branches"]), with_race=False)
    workload = workload_of(task, rate_of(task, grid.best(name, DEFAULT)[0]))

    def sweep() -> Any:
        return sweep_rates(workload, Measured.read(told), request, lambda text: None)

    if not is_done(run["branches"]):
        told["rate"] = cache.get(f"rate to the {name} loss, cost {cost}", sweep)
    advise_run(told, request)
    recommendation: dict[str, Any] = told["recommendation"]
    return recommendation


# --- the judgement


def seconds_over_best(grid: Grid, name: str, batch: float, cost: int, seeds: Sequence[int] = range(SEEDS)) -> float:
    """Return the counted time of a batch over that of the best of the grid; steps in between are read off its curve."""
    steps = {size: grid.best(name, size, seeds)[1] for size in GRID}
    best = min(steps[size] * (cost + size) for size in GRID)
    inside = min(max(batch, GRID[0]), GRID[-1])
    below = max(size for size in GRID if size <= inside)
    above = min(size for size in GRID if size >= inside)
    share = 0.0 if above == below else math.log(inside / below) / math.log(above / below)
    logs = [math.log(steps[size]) if math.isfinite(steps[size]) else math.inf for size in (below, above)]
    between = logs[0] if share == 0 else (1 - share) * logs[0] + share * logs[1]
    return math.exp(between) * (cost + inside) / best


def error_of(grid: Grid, name: str, batch: float, cost: int) -> float:
    """Return how far the ratio of a batch goes if seeds are drawn anew: half of what the middle 68 % span."""
    draws = random.Random(0)
    drawn = (seconds_over_best(grid, name, batch, cost, draws.choices(range(SEEDS), k=SEEDS)) for _ in range(60))
    ratios = sorted(ratio for ratio in drawn if math.isfinite(ratio))
    return (ratios[len(ratios) * 21 // 25] - ratios[len(ratios) * 4 // 25]) / 2 if ratios else 0.0


def fitted_critical(grid: Grid, name: str) -> float:
    """Return the critical batch that the grid itself shows."""
    steps = {size: found for size in GRID if math.isfinite(found := grid.best(name, size)[1])}

    def error(critical: float) -> float:
        off = [math.log(found) - math.log1p(critical / size) for size, found in steps.items()]
        return statistics.pvariance(off)

    return min((10 ** (place / 100) for place in range(500)), key=error)


def tuned_rate(task: Task, grid: Grid, name: str, batch: float) -> float:
    """Return the best rate at a batch: the lowest point of a parabola through three rates, read off between batches."""

    def exponent_at(size: int) -> float:
        best, steps = grid.best(name, size)
        sides = [grid.steps_at(name, size, best + side) for side in (-1, 1)]
        if None in sides or not all(math.isfinite(side or math.inf) for side in sides):
            return best
        left, middle, right = math.log(sides[0] or 1), math.log(steps), math.log(sides[1] or 1)
        bend = left - 2 * middle + right
        return best + min(max((left - right) / (2 * bend), -0.5), 0.5) if bend > 0 else best

    inside = min(max(batch, GRID[0]), GRID[-1])
    below, above = max(size for size in GRID if size <= inside), min(size for size in GRID if size >= inside)
    share = 0.0 if above == below else math.log(inside / below) / math.log(above / below)
    exponent = (1 - share) * exponent_at(below) + share * exponent_at(above)
    return float(task.first_rate * 2 ** (exponent / 2))


def race_at(task: Task, name: str, cost: int, grid: Grid, cache: Cache) -> dict[str, Any]:
    """Return the recommendation of tune with --race at a cost of steps."""
    told = counted_cost(measure(task, name, grid, cache, with_branches=False), cost)
    request = request_of(task, name, with_branches=False, with_race=True)
    workload = workload_of(task, rate_of(task, grid.best(name, DEFAULT)[0]))

    def run() -> Any:
        return race_batches(workload, Measured.read(told), request, lambda text: None)

    told["race"] = cache.get(f"race to the {name} loss, cost {cost}", run)
    advise_run(told, request)
    recommendation: dict[str, Any] = told["recommendation"]
    return recommendation


def judge_task(
    task: Task, grid: Grid, asked: Cache, ways: Sequence[str], costs: Sequence[int] = COSTS
) -> list[dict[str, Any]]:
    rows = []
    for name in grid.losses:
        own = fitted_critical(grid, name)
        for way in ways:
            for cost in costs:
                row: dict[str, Any] = {"task": task.name, "loss": name, "way": way, "cost": cost, "critical": own}
                if way == "the grid's own":
                    row["batch"] = math.sqrt(cost * own)
                elif way == "always 32":
                    row["batch"] = DEFAULT
                else:
                    if way == "race":
                        said = race_at(task, name, cost, grid, asked)
                    else:
                        run = measure(task, name, grid, asked, with_branches=way == "branches")
                        said = advise(run, task, name, cost, grid, asked)
                    row["batch"] = said["effective_batch"]
                    row["said"] = (
                        said["critical_batch"] and CriticalBatch.from_dict(said["critical_batch"]).likely().value
                    )
                    row["raw"] = said["critical_batch"] and said["critical_batch"]["value"]
                    if said["learning_rate"]:
                        row["rate"] = said["learning_rate"]["recommended"] / tuned_rate(task, grid, name, row["batch"])
                    if said["critical_batch"] and cost == costs[0]:
                        verdict = judge(CriticalBatch.from_dict(said["critical_batch"]), DEFAULT)
                        saved = 1 - grid.best(name, 2 * DEFAULT)[1] / grid.best(name, DEFAULT)[1]
                        saves = verdict.doubling_saves
                        row["saves"] = [saved, saves.low, saves.high]
                    row["range"] = said["range_within_5_percent"]
                    if row["range"]:
                        row["ends"] = [
                            seconds_over_best(grid, name, end, cost) - error_of(grid, name, end, cost)
                            for end in row["range"]
                        ]
                row["ratio"] = seconds_over_best(grid, name, row["batch"], cost)
                rows.append(row)
    return rows


def print_judgement(rows: Sequence[dict[str, Any]]) -> None:
    print(
        "\n| to the | way | settings | within 5 % | within 10 % | worst | ranges | both ends within 5 % "
        "| rate within 1.5 | a doubling saves |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in ("late", "early"):
        for way in dict.fromkeys(row["way"] for row in rows):
            of = [row for row in rows if row["loss"] == name and row["way"] == way]
            within = [sum(row["ratio"] <= limit for row in of) / len(of) for limit in (1.05, 1.1)]
            ranges = [row["ends"] for row in of if row.get("range")]
            rates = [abs(math.log(row["rate"])) for row in of if "rate" in row]
            rate = f"{sum(off <= math.log(1.5) for off in rates) / len(rates):.0%}" if rates else "-"
            saves = [row["saves"] for row in of if "saves" in row]
            inside = f"{sum(low <= saved <= high for saved, low, high in saves) / len(saves):.0%}" if saves else "-"
            good = f"{sum(max(ends) <= 1.05 for ends in ranges) / len(ranges):.0%}" if ranges else "-"
            worst = max(row["ratio"] for row in of)
            told = f"{within[0]:.0%} | {within[1]:.0%} | {worst:.2f} | {len(ranges)} | {good} | {rate} | {inside}"
            print(f"| {name} | {way} | {len(of)} | {told} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("grid", "judge", "rows", "pack"))
    parser.add_argument("--tasks", nargs="+", default=["JUDGED"])
    parser.add_argument("--ways", nargs="+", default=[way for way in WAYS if way != "race"], choices=WAYS)
    parser.add_argument("--costs", nargs="+", type=int, default=list(COSTS))
    parser.add_argument("--anew", action="store_true", help="train grids that are in the repository, too")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir(), "batchwright-recommendation"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"Python {platform.python_version()}, torch {torch.__version__}, one thread")
    if options.what == "pack":
        pack_grids(options.cache)
        return 0
    known = {} if options.anew or not GRIDS.exists() else read_grids()
    groups = {"JUDGED": JUDGED, "CONSTANTS": FOR_CONSTANTS}
    rows: list[dict[str, Any]] = []
    named = {task.name: (task,) for task in (*JUDGED, *FOR_CONSTANTS)}
    for task in [task for name in options.tasks for task in {**groups, **named}[name]]:
        cache = Cache(options.cache / f"{task.name}.jsonl", known.get(task.name))
        grid = make_grid(task, cache)
        print_grid(task, grid)
        if options.what != "grid":
            asked = Cache(options.cache / f"{task.name}.asked.jsonl")
            rows += judge_task(task, grid, asked, options.ways, options.costs)
    for row in rows if options.what == "rows" else ():
        print(json.dumps(row))
    if rows:
        print_judgement(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
