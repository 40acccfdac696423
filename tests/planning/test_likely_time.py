"""The answer for a critical batch that is likely, against drawing many of them and counting every batch."""

from __future__ import annotations

import numpy as np
import pytest

from batchwright.planning.likely_time import CHANCE, LikelyTime
from batchwright.planning.time_to_loss import StepSeconds, TimeToLoss
from batchwright.planning.times import TimeModel

FIXED, PER_SAMPLE = 0.08, 0.0025
BATCHES = np.arange(1, 3001)


def over_best(critical: float, spread: float, micro_batch: int | None, draws: int = 2000) -> np.ndarray:
    """The time at every batch over the best, for critical batches that are drawn."""
    rng = np.random.default_rng(0)
    critical_batches = critical * np.exp(spread * rng.standard_normal(draws))[:, None]
    passes = 1 if micro_batch is None else -(-BATCHES // micro_batch)
    times: np.ndarray = (1 + critical_batches / BATCHES) * (FIXED * passes + PER_SAMPLE * BATCHES)
    ratios: np.ndarray = times / times.min(axis=1, keepdims=True)
    return ratios


@pytest.mark.parametrize("micro_batch", [None, 48])
@pytest.mark.parametrize("spread", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("critical", [40.0, 400.0])
def test_the_answer_loses_least_time_and_the_range_has_its_chance(
    critical: float, spread: float, micro_batch: int | None
) -> None:
    step = StepSeconds(TimeModel(FIXED, PER_SAMPLE, 0.0), micro_batch=micro_batch)
    likely = LikelyTime(TimeToLoss(critical, step, most=3000), spread)
    ratios = over_best(critical, spread, micro_batch)
    mean = ratios.mean(axis=0)
    assert mean[likely.soonest - 1] <= 1.003 * mean.min()
    chances = (ratios <= 1.05).mean(axis=0)
    assert likely.chance(likely.soonest) == pytest.approx(chances[likely.soonest - 1], abs=0.06)
    if likely.as_good is None:
        assert chances[likely.soonest - 1] < CHANCE + 0.06
    else:
        first, last = likely.as_good
        assert first <= likely.soonest <= last
        assert min(chances[first - 1], chances[last - 1]) >= CHANCE - 0.06
    low, high = likely.between(2 * likely.soonest)
    at_twice = ratios[:, 2 * likely.soonest - 1]
    assert (low, high) == pytest.approx(tuple(np.quantile(at_twice, [0.1, 0.9])), rel=0.05)


def test_a_known_critical_batch_gives_the_soonest_and_what_is_within_five_percent() -> None:
    curve = TimeToLoss(400.0, StepSeconds(TimeModel(FIXED, PER_SAMPLE, 0.0)))
    known = LikelyTime(curve)
    assert (known.soonest, known.as_good, known.chance(known.soonest)) == (curve.soonest, curve.as_good, 1.0)
    assert known.over_soonest(2 * known.soonest) == pytest.approx(curve.over_soonest(2 * known.soonest))
    assert known.longest == 1.0
