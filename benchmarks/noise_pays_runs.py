"""How benchmarks/noise_pays.py trains to a target, times steps and tunes learning rates.

Promises:
- steps to the target depend on task, batch, learning rate and seed alone, never on how busy the machine is, unless a
  training runs into its limit of CPU time;
- step times of all batches come from the same rounds, each of which goes through all of them in turn.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
from noise_pays_tasks import loss_of

from batchwright.accumulate.accumulator import Accumulator
from batchwright.noise.noise_scale import NoiseScale

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from noise_pays_tasks import Task

FIRST_EVALUATION, EVALUATION_SPACING, SMOOTHED = 16, 1.06, 5
TUNING_SEEDS = (100, 101)
ROUNDS, SECONDS_PER_VISIT = 40, 0.1
ACCUMULATION = 4


class Cache:
    """What is finished, one JSON object per line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self._known: dict[str, Any] = dict(map(json.loads, lines))

    def get(self, key: str, make: Callable[[], Any]) -> Any:
        """Return what is known under the key, or make it and keep it."""
        if key not in self._known:
            self._known[key] = make()
            with self._path.open("a") as file:
                file.write(json.dumps([key, self._known[key]]) + "\n")
            print(f"{self._path.stem}: {key}: {str(self._known[key])[:100]}", file=sys.stderr, flush=True)
        return self._known[key]


def stepper(task: Task, batch: int, rate: float, seed: int) -> tuple[torch.nn.Module, Callable[[], object]]:
    """Return a fresh model and one training step of it."""
    data, generator = task.data(False), torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = task.model()
    optimizer = task.optimizer(list(model.parameters()), rate)

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model, data.draw(generator, batch)))
        optimizer.step()

    return model, step


def measured_stepper(
    task: Task, batch: int, rate: float, seed: int
) -> tuple[torch.nn.Module, Callable[[], object], NoiseScale]:
    """Return the same in micro-batches, with what measures them."""
    data, generator = task.data(False), torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = task.model()
    accumulator = Accumulator(model, task.optimizer(list(model.parameters()), rate), ACCUMULATION)
    noise = NoiseScale(accumulator, window=math.inf)

    def step() -> None:
        for _ in range(ACCUMULATION):
            micro = data.draw(generator, batch // ACCUMULATION)
            accumulator.backward(loss_of(model, micro), len(micro[0]), samples=len(micro[0]))

    return model, step, noise


def steps_to_target(task: Task, model: torch.nn.Module, step: Callable[[], object], most: float) -> float | None:
    """Train until the smoothed loss crosses the target; None where that does not happen in time."""
    evaluation = task.data(True).draw(torch.Generator().manual_seed(0), task.evaluation_samples)
    begin, done = time.process_time(), 0
    at: list[float] = []
    losses: list[float] = []
    smoothed_before = math.inf
    for stop in evaluation_steps():
        while done < stop:
            step()
            done += 1
            if time.process_time() - begin > task.training_seconds:
                return None
        with torch.no_grad():
            losses.append(loss_of(model, evaluation).item())
        at.append(math.log(stop))
        if not math.isfinite(losses[-1]):
            return None
        smoothed = statistics.fmean(losses[-SMOOTHED:])
        if len(losses) >= SMOOTHED and smoothed <= task.target:
            after, before = at[-1 - SMOOTHED // 2], at[-2 - SMOOTHED // 2]
            share = (smoothed_before - task.target) / (smoothed_before - smoothed)
            return math.exp(before + (after - before) * share)
        smoothed_before = smoothed
        # The average stands for its middle.
        if len(at) > SMOOTHED and math.exp(at[-1 - SMOOTHED // 2]) > most:
            return None
    raise AssertionError("there are always further steps")


def evaluation_steps() -> Iterator[int]:
    place, last = float(FIRST_EVALUATION), 0
    while True:
        if round(place) > last:
            last = round(place)
            yield last
        place *= EVALUATION_SPACING


def step_times(task: Task, batches: Sequence[int], in_wall_time: bool = False) -> dict[str, list[float]]:
    """Return the median step of each round, by batch."""
    now = time.perf_counter if in_wall_time else time.process_time
    steps = {batch: stepper(task, batch, task.first_rate / 16, 0)[1] for batch in batches}
    times: dict[str, list[float]] = {str(batch): [] for batch in batches}
    for number in range(ROUNDS + 1):
        for batch in batches:
            visit: list[float] = []
            while len(visit) < 3 or sum(visit) < SECONDS_PER_VISIT:
                begin = now()
                steps[batch]()
                visit.append(now() - begin)
            # The first round warms up.
            if number:
                times[str(batch)].append(statistics.median(visit))
    return times


# --- learning rates


def tuned(task: Task, batch: int, start: int, cache: Cache) -> tuple[int, float]:
    """Return the best exponent of sqrt(2) and its steps; the rate is first_rate x sqrt(2)^exponent."""
    found: dict[int, float] = {}

    def score(exponent: int) -> float:
        best = min(found.values(), default=math.inf)
        total: list[float] = []
        for seed in TUNING_SEEDS:
            if total and total[0] > 1.25 * best:
                return math.inf
            steps = trained(task, batch, exponent, seed, cache, most=1.5 * best)
            if steps is None:
                return math.inf
            total.append(steps)
        return statistics.median(total)

    def best_of() -> int:
        return min(found, key=lambda exponent: found[exponent])

    for exponent in (start, start + 2, start - 2):
        found[exponent] = score(exponent)
    while math.isfinite(found[best_of()]) and best_of() in (min(found), max(found)):
        further = best_of() + (2 if best_of() == max(found) else -2)
        found[further] = score(further)
    for exponent in (best_of() - 1, best_of() + 1):
        found[exponent] = score(exponent)
    return best_of(), found[best_of()]


def rate_of(task: Task, exponent: int) -> float:
    return float(task.first_rate * 2 ** (exponent / 2))


def trained(task: Task, batch: int, exponent: int, seed: int, cache: Cache, *, most: float = math.inf) -> float | None:
    """Return the steps to the target at this seed; None where it was given up."""

    def run() -> float | None:
        return steps_to_target(task, *stepper(task, batch, rate_of(task, exponent), seed), most)

    steps: float | None = cache.get(f"steps at {batch}, rate {exponent}, seed {seed}", run)
    return steps
