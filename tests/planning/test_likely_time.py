"""The answer for a critical batch that is likely, against drawing many of them and counting every batch."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from batchwright.planning.likely_time import CHANCE, LikelyTime, RacedSteps
from batchwright.planning.time_to_loss import StepSeconds, TimeToLoss
from batchwright.planning.times import TimeModel

FIXED, PER_SAMPLE = 0.08, 0.0025
BATCHES = np.arange(1, 3001)


def over_best(
    critical: float, spread: float, micro_batch: int | None, bends: tuple[float, ...], draws: int = 2000
) -> np.ndarray:
    """The time at every batch over the best, for critical batches and bends that are drawn."""
    rng = np.random.default_rng(0)
    critical_batches = critical * np.exp(spread * rng.standard_normal(draws))[:, None]
    passes = 1 if micro_batch is None else -(-BATCHES // micro_batch)
    bend = rng.choice(bends, draws)[:, None]
    steps = (1 + (critical_batches / BATCHES) ** bend) ** (1 / bend)
    times: np.ndarray = steps * (FIXED * passes + PER_SAMPLE * BATCHES)
    ratios: np.ndarray = times / times.min(axis=1, keepdims=True)
    return ratios


@pytest.mark.parametrize("bends", [(1.0,), (1.0, 1.5, 2.0)])
@pytest.mark.parametrize("micro_batch", [None, 48])
@pytest.mark.parametrize("spread", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("critical", [40.0, 400.0])
def test_the_answer_loses_least_time_and_the_range_has_its_chance(
    critical: float, spread: float, micro_batch: int | None, bends: tuple[float, ...]
) -> None:
    step = StepSeconds(TimeModel(FIXED, PER_SAMPLE, 0.0), micro_batch=micro_batch)
    likely = LikelyTime(TimeToLoss(critical, step, most=3000), spread, bends)
    ratios = over_best(critical, spread, micro_batch, bends)
    mean = ratios.mean(axis=0)
    assert mean[likely.soonest - 1] <= 1.003 * mean.min()
    chances = (ratios <= 1.05).mean(axis=0)
    assert likely.chance(likely.soonest) == pytest.approx(chances[likely.soonest - 1], abs=0.06)
    if likely.as_good is None:
        assert chances[likely.soonest - 1] < CHANCE + 0.06
    else:
        first, last = likely.as_good
        assert first <= likely.soonest <= last
        assert (ratios[:, [first - 1, last - 1]] <= 1.05).all(axis=1).mean() >= CHANCE - 0.06
    low, high = likely.between(2 * likely.soonest)
    at_twice = ratios[:, 2 * likely.soonest - 1]
    assert (low, high) == pytest.approx(tuple(np.quantile(at_twice, [0.1, 0.9])), rel=0.05)


def test_a_known_critical_batch_gives_the_soonest_and_what_is_within_five_percent() -> None:
    curve = TimeToLoss(400.0, StepSeconds(TimeModel(FIXED, PER_SAMPLE, 0.0)))
    known = LikelyTime(curve)
    assert (known.soonest, known.as_good, known.chance(known.soonest)) == (curve.soonest, curve.as_good, 1.0)
    assert known.over_soonest(2 * known.soonest) == pytest.approx(curve.over_soonest(2 * known.soonest))
    assert known.longest == 1.0


def test_a_race_moves_the_answer_towards_what_it_shows_by_how_sure_it_is() -> None:
    step = StepSeconds(TimeModel(FIXED, PER_SAMPLE, 0.0))
    truth = TimeToLoss(1600.0, step, bend=1.5)
    likely = LikelyTime(TimeToLoss(400.0, step), 0.8, (1.0, 1.5, 2.0))
    shown = math.log(truth.steps_at(2 * likely.soonest) / truth.steps_at(likely.soonest))
    over_best = [
        truth.over_soonest(
            replace(likely, raced=(RacedSteps(2 * likely.soonest, likely.soonest, shown, error),)).soonest
        )
        for error in (10.0, 0.1, 0.02)
    ]
    assert over_best[0] == pytest.approx(truth.over_soonest(likely.soonest), abs=0.005)
    assert over_best[0] > over_best[1] > over_best[2]
    assert over_best[2] < 1.02


@pytest.mark.parametrize("bend", [1.0, 1.5, 2.0])
@pytest.mark.parametrize("micro_batch", [None, 48])
def test_the_soonest_batch_of_a_bend_is_that_of_counting_every_batch(bend: float, micro_batch: int | None) -> None:
    curve = TimeToLoss(300.0, StepSeconds(TimeModel(FIXED, PER_SAMPLE, 0.1), micro_batch=micro_batch), 1, 3000, bend)
    times = {batch: curve.at(batch) for batch in range(1, 3001)}
    assert times[curve.soonest] == min(times.values())
    first, last = curve.as_good
    assert max(times[first], times[last]) <= 1.05 * times[curve.soonest] < min(times[first - 1], times[last + 1])
