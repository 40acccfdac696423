"""The recommended batch against half and double of it, by training: from the same weights, for the same time.

Time is counted, not clocked: the steps that the measured step times allow. So a busy machine decides nothing.

Promises:
- all batches of a seed begin at the same weights and are judged on the same samples;
- the learning rate of each batch is tuned on the first two seeds, from the rule's on;
- all go to the loss that the first batch comes down to in that time; how much sooner one was is read off the curves;
- seeds are added until it is clear: until every rival is ahead, behind or within 5 % with a chance of 80 %, or there
  are no more seeds;
- only a rival that is clearly ahead replaces the middle batch; then the race is run around that one, twice at most;
- what was raced joins the model of soonest by how sure it is, so that a race that is noise changes nothing; one that
  ends before the horizon counts for the critical batch there, carried on;
- a race that nobody wins says so.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from batchwright.device.device import open_device
from batchwright.errors import BatchwrightError, InvalidInputError
from batchwright.noise.branch_training import BranchRequest, SeedBranches, smoothed, steps_to
from batchwright.noise.interval import student_t
from batchwright.noise.measure_critical_batch import steps_or_more, tune_factor
from batchwright.planning.critical_batch import Range
from batchwright.planning.likely_time import CHANCE, RacedSteps
from batchwright.planning.plan import plan
from batchwright.planning.time_to_loss import StepSeconds
from batchwright.state.untouched import untouched
from batchwright.tuning.choice import (
    Choice,
    choose,
    pick_critical,
    plan_horizon,
    recommend_rate,
    seconds_to_horizon,
)
from batchwright.units import LARGEST_COUNT, counted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from batchwright.planning.horizon import Horizon
    from batchwright.tuning.run_file import Measured, Section
    from batchwright.tuning.tune import TuneRequest
    from batchwright.workload import Workload

_SEEDS, _LEAST_SEEDS = 5, 3
_AHEAD = 0.97
_MOST_MOVES = 2
# A training goes to the horizon, or takes so many times as long as what was trained to measure.
_LONGEST = 4
_LOOKS = 3
"""That are averaged: a lucky one favours high rates."""
_TUNED_ON = 2
# Of the way to the horizon: as far as a race must go to speak for the run.
_NEARLY = 0.8
# Of the logarithm of steps: what differs from seed to seed until seeds tell, which counts as two of them, and what the
# rates of two batches, each the best of a few on one seed, leave of a difference.
_USUAL_SPREAD, _USUAL_COUNT, _RATES_APART = 0.15, 2, 0.12
# As long as a batch takes that is as good.
_AS_GOOD = math.log(1.05)
_EVALUATE_SAMPLES = 512
# A batch that makes no progress counts as so many times slower.
_NO_PROGRESS = math.log(100)


@dataclass(frozen=True)
class Rival:
    """A batch that was raced against the middle one."""

    batch: int
    learning_rate_factor: float
    """Of the workload's own rate."""
    time_ratio: Range
    """Its time to the same loss over that of the middle batch, and what it lies within with a chance of 80 %."""

    @property
    def position(self) -> str:
        """Whether it is clearly ahead, clearly behind, as good, or none of these."""
        # Looked at after every seed, so that being ahead by a little at one look would often be luck.
        if self.time_ratio.high < 1 and self.time_ratio.value < _AHEAD:
            return "ahead"
        if self.time_ratio.low > 1:
            return "behind"
        is_close = max(-math.log(self.time_ratio.low), math.log(self.time_ratio.high)) < _AS_GOOD
        return "as good" if is_close else "open"


@dataclass(frozen=True)
class Race:
    """Which batch won, and by how much."""

    winner: int
    """The middle batch of the last round, unless a rival was clearly ahead of it."""
    learning_rate_factor: float
    """The winner's, of the workload's own rate."""
    middle: int
    rivals: tuple[Rival, ...]
    """Those of the last round."""
    seeds: int
    seconds: float
    """Counted, that each batch was trained for."""
    steps: int
    """Of the middle batch in that time."""
    reaches_horizon: bool
    """Whether that is as long as the run is to be."""
    factors: Mapping[int, float]
    """Of the workload's own rate, for all batches of all rounds, in their order."""
    shown: tuple[RacedSteps, ...] = ()
    """The steps of each pair of batches: what joins the model."""

    @property
    def is_clear(self) -> bool:
        """Whether no rival may still be the better one by more than 5 %."""
        return all(rival.position != "open" for rival in self.rivals)

    @property
    def summary(self) -> str:
        """Who won, by how much and how sure."""
        ratios = ", ".join(f"{rival.batch:,} takes {rival.time_ratio} times as long" for rival in self.rivals)
        seeds = f"{self.seeds} seeds, each as long as {counted(self.steps, 'step')} of {self.middle:,} take"
        if len(self.factors) > len(self.rivals) + 1:
            seeds += f"; raced in turn: {', '.join(f'{batch:,}' for batch in self.factors)}"
        if self.winner != self.middle:
            return f"{self.winner:,} was ahead of {self.middle:,} in a race: {ratios} ({seeds})"
        if self.is_clear:
            return f"no batch was ahead of {self.middle:,} in a race: {ratios} ({seeds})"
        return f"nobody won the race around {self.middle:,}, which stays: {ratios} ({seeds}); a longer one may tell"

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data: the section `race` of a run."""
        rivals = [{**asdict(rival), "position": rival.position} for rival in self.rivals]
        clear = {"is_clear": self.is_clear, "summary": self.summary}
        factors = [{"batch": batch, "learning_rate_factor": factor} for batch, factor in self.factors.items()]
        return {"schema": 1, "source": "measured", **asdict(self), "rivals": rivals, "factors": factors, **clear}


def race(
    workload: Workload,
    middle: int,
    step: StepSeconds,
    *,
    seconds: float,
    reaches_horizon: bool,
    factor_of: Callable[[int], float],
    whole: Callable[[float], int],
    most: int,
    largest: int | None,
    on: str,
    growth: tuple[float, float] = (1.0, 0.0),
    shape: Mapping[str, Any] | None = None,
    first_seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> Race:
    """Race a batch against half and double of it, and the winner against its own, until the middle one stays.

    - `seconds`: how long each trains, by `step`; `reaches_horizon`: whether the run is to be no longer.
    - `factor_of`: the learning rate of a batch, in factors of the workload's own.
    - `whole`: the batch nearest to a size that can be run; `most`: the largest; `largest`: the largest micro-batch.
    - `growth`: how many times larger the critical batch is at the horizon, and the error of its logarithm.
    """
    device = open_device(on).torch_device
    with untouched(workload, accelerator=None if device.type == "cpu" else device):
        runs = [
            SeedBranches(workload, device, shape or {}, seed, _EVALUATE_SAMPLES, 0, largest)
            for seed in range(first_seed, first_seed + _SEEDS)
        ]

        factors: dict[int, float] = {}
        first = middle

        def train(
            run: SeedBranches, batch: int, factor: float, goal: float | None = None, least: float = math.inf
        ) -> Sequence[tuple[int, float]]:
            steps = max(round(seconds / step.at(batch)), 1)
            most = min(steps, math.ceil(least)) if least < steps else steps
            request = BranchRequest(batch, steps, most, factor, target=goal, looks=_LOOKS)
            if run.known(request) is None:
                to = "" if goal is None else f" to a loss of {goal:.4g}"
                progress(f"seed {run.seed}: batch {batch:,}, learning rate x {factor:.3g}, {steps:,} steps{to}")
            return smoothed(run.train(request, first_batch=first), _LOOKS)

        farthest = tune_factor(
            factor_of(first),
            lambda factor, least: sum(_lack_of_progress(train(run, first, factor)) for run in runs[:_TUNED_ON]),
        )

        def goal_of(run: SeedBranches) -> float:
            """What the first batch comes down to, at the rate that takes it farthest."""
            curve = train(run, first, farthest)
            if not curve[-1][1] < curve[0][1]:
                raise BatchwrightError(
                    f"the loss of batch {first:,} goes from {curve[0][1]:.4g} to {curve[-1][1]:.4g}: "
                    "there is nothing to race.",
                    remedy="a longer race (more steps), or a learning rate at which the loss falls",
                )
            return curve[-1][1]

        def tune_rate(batch: int) -> None:
            """Tune the rate of a batch, the first one too, for the steps to the goal: all must be treated alike."""
            guess = farthest * factor_of(batch) / factor_of(first)

            def steps_at(factor: float, least: float) -> float:
                total = 0.0
                for run in runs[:_TUNED_ON]:
                    goal = goal_of(run)
                    total += steps_or_more(goal, train(run, batch, factor, goal, least - total))
                    if total >= least:
                        break
                return total

            if batch not in factors:
                factors[batch] = tune_factor(guess, steps_at)

        def log_ratios(run: SeedBranches, centre: int, others: Sequence[int]) -> list[float]:
            goal = goal_of(run)
            own, *curves = (train(run, batch, factors[batch], goal) for batch in (centre, *others))
            return [
                _log_ratio(goal, own, step.at(centre), curve, step.at(other))
                for curve, other in zip(curves, others, strict=True)
            ]

        shown: dict[tuple[int, int], RacedSteps] = {}
        tune_rate(first)
        for _ in range(_MOST_MOVES + 1):
            others = sorted({min(whole(middle * 2), most), max(whole(middle / 2), 1)} - {middle})
            if not others:
                raise InvalidInputError(f"there is no other batch to race {middle:,} against: at most {most:,} can be.")
            for other in others:
                tune_rate(other)
            rows: list[list[float]] = []
            rivals: tuple[Rival, ...] = ()
            for run in runs:
                rows.append(log_ratios(run, middle, others))
                rivals = tuple(
                    Rival(other, factors[other], _range([row[place] for row in rows]))
                    for place, other in enumerate(others)
                )
                if len(rows) >= _LEAST_SEEDS and all(rival.position != "open" for rival in rivals):
                    break
            for place, other in enumerate(others):
                per_step = math.log(step.at(other) / step.at(middle))
                shown[other, middle] = _steps_shown(other, middle, [row[place] - per_step for row in rows], growth)
            ahead = [rival for rival in rivals if rival.position == "ahead"]
            winner = min(ahead, key=lambda rival: rival.time_ratio.value).batch if ahead else middle
            steps = max(round(seconds / step.at(middle)), 1)
            result = Race(
                winner,
                factors[winner],
                middle,
                rivals,
                len(rows),
                seconds,
                steps,
                reaches_horizon,
                dict(factors),
                tuple(shown.values()),
            )
            if winner == middle:
                break
            middle = winner
        return result


def race_batches(work: Workload, measured: Measured, request: TuneRequest, say: Callable[[str], None]) -> Section:
    """Race the batch that is recommended so far, as the stage `race` of a run."""
    times = measured.times
    if times is None:
        raise InvalidInputError("a race counts the time of steps, which was not measured.")
    horizon, _ = plan_horizon(measured, request)
    used = pick_critical(measured, horizon)
    choice = choose(measured, used, devices=request.devices, effective_batch=None)
    split, devices, samples = choice.plan, request.devices, measured.samples
    step = StepSeconds(times, devices, split.max_micro_batch)
    seconds, share = _seconds_to_race(measured, choice, horizon, request.steps, step)
    course, growth = None if measured.noise is None else measured.noise.course, (1.0, 0.0)
    if course is not None and horizon is not None and share < 1:
        growth = course.growth(share * horizon.steps, horizon.steps)

    def whole(size: float) -> int:
        wanted = max(round(size), 1)
        return plan(wanted, micro_batch=split.max_micro_batch, devices=devices, samples=samples).effective_batch

    def factor_of(batch: int) -> float:
        rate = recommend_rate(measured, choice, batch)
        return 1.0 if rate is None else rate.factor

    return race(
        work,
        split.effective_batch,
        step,
        seconds=seconds,
        reaches_horizon=share >= _NEARLY,
        growth=growth,
        factor_of=factor_of,
        whole=whole,
        most=LARGEST_COUNT if samples is None else (samples - held_out(samples)) // devices * devices,
        largest=measured.micro_batch,
        on=request.on,
        shape=request.shape or None,
        first_seed=request.seed,
        progress=say,
    ).to_dict()


def _seconds_to_race(
    measured: Measured, choice: Choice, horizon: Horizon | None, steps: int, step: StepSeconds
) -> tuple[float, float]:
    """Return how long each training of a race takes, and what share of the way to the horizon that is."""
    whole = seconds_to_horizon(measured, choice, horizon, step)
    if whole is None or measured.noise is None:
        return steps * step.at(choice.plan.effective_batch), 0.0
    longest = _LONGEST * steps * step.at(measured.noise.effective_batch)
    return min(whole, longest), min(longest / whole, 1.0)


def _lack_of_progress(curve: Sequence[tuple[int, float]]) -> float:
    """By where a curve ends: its least loss is luck."""
    decrease = curve[0][1] - curve[-1][1]
    return 1 / decrease if decrease > 0 else math.inf


def held_out(samples: int) -> int:
    """Return how many samples of a dataset a race is judged on."""
    return min(_EVALUATE_SAMPLES, samples // 5)


def _log_ratio(
    goal: float,
    own: Sequence[tuple[int, float]],
    own_step: float,
    other: Sequence[tuple[int, float]],
    other_step: float,
) -> float:
    """Return the log of the other's time to a loss over one's own; if one has not got there, to the loss both reached.

    >>> falls = [(step, 10.0 - step) for step in range(10)]
    >>> math.exp(_log_ratio(4.0, falls, 1.0, [(step, 10.0 - 2 * step) for step in range(5)], 1.0))
    0.5
    """
    lowest, others = (
        min((loss for _, loss in curve if math.isfinite(loss)), default=math.inf) for curve in (own, other)
    )
    goal = max(goal, lowest, others)
    mine, theirs = steps_to(goal, own), steps_to(goal, other)
    if not mine or not theirs:  # one of them has not come below its first loss
        return _NO_PROGRESS * ((others > lowest) - (others < lowest))
    return math.log(theirs * other_step / (mine * own_step))


def _steps_shown(batch: int, other: int, logs: Sequence[float], growth: tuple[float, float]) -> RacedSteps:
    """Return the steps of a pair with their error: that of the seeds, of the rates, and of the way to the horizon."""
    middle, number = statistics.fmean(logs), len(logs)
    squares = sum((log - middle) ** 2 for log in logs) + _USUAL_COUNT * _USUAL_SPREAD**2
    spread = math.sqrt(squares / (number - 1 + _USUAL_COUNT))
    times, off = growth
    # A critical batch that is twice as large moves the steps of a pair by a quarter of that at most.
    error = math.hypot(spread / math.sqrt(number), _RATES_APART, off / 4)
    return RacedSteps(batch, other, middle, error, times)


def _range(logs: Sequence[float]) -> Range:
    middle = statistics.fmean(logs)
    if len(logs) < _LEAST_SEEDS:
        return Range(math.exp(middle), 0.0, math.inf)
    reach = student_t((1 + CHANCE) / 2, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Range(math.exp(middle), math.exp(middle - reach), math.exp(middle + reach))
