"""The sweep of learning rates at the recommended batch: what it finds, what it may cost, and where it is left out."""

import math

import pytest
import torch

from batchwright import Workload, tune
from batchwright.planning.time_to_loss import StepSeconds
from batchwright.tuning.rate_sweep import climb, train_at_rates
from batchwright.tuning.run_file import Measured


def least_squares(rate: float) -> Workload:
    """A quadratic whose curvature is 2: a rate of 0.5 gets to its bottom in one step, 1 and more diverges."""
    return Workload(
        model=lambda: torch.nn.Linear(4, 1, bias=False),
        batch=lambda n: torch.randn(n, 4),
        loss=lambda model, batch: (model(batch) - batch.sum(1, keepdim=True)).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate),
        name="least squares",
    )


@pytest.mark.parametrize("rate", [0.15, 0.35])
def test_the_sweep_finds_the_rate_of_a_quadratic(rate: float) -> None:
    swept = train_at_rates(least_squares(rate), 256, steps=10, trainings=6)
    assert swept.best is not None
    assert 0.25 < rate * swept.best < 0.8
    assert swept.open_sides == (False, False)


def test_a_side_that_was_not_tried_is_named() -> None:
    swept = train_at_rates(least_squares(0.01), 64, steps=10, trainings=3)
    assert swept.open_sides == (False, True)
    assert swept.to_dict()["is_highest_tried"] is True


def test_where_every_rate_diverges_none_is_recommended() -> None:
    swept = train_at_rates(least_squares(1e6), 64, steps=10, trainings=3)
    assert swept.best is None
    tuned = tune(
        least_squares(60.0), effective_batch=64, limit=64, steps=60, noise_batch=64, skip=("estimate", "audit", "noise")
    )
    assert tuned.learning_rate is None


def test_a_loss_that_grows_and_stays_finite_is_no_answer() -> None:
    swept = train_at_rates(least_squares(1.5), 256, steps=8, trainings=4)
    assert swept.best is not None
    assert 1.5 * swept.best < 1
    assert math.isinf(swept.losses[1.0])


def test_a_climb_away_from_infinity_goes_down() -> None:
    tried = climb(8.0, 4, lambda factor: factor if factor < 7 else math.inf)
    assert min(tried, key=lambda factor: tried[factor]) < 7


def test_tune_sweeps_for_no_longer_than_the_noise_was_trained() -> None:
    tuned = tune(least_squares(0.02), limit=256, steps=60, noise_batch=64, samples=30_000, skip=("estimate", "audit"))
    swept, times = tuned.run["rate"], Measured.read(tuned.run).times
    assert times is not None
    step = StepSeconds(times, devices=1, micro_batch=256)
    counted = len(swept["losses"]) * swept["steps"] * step.at(swept["batch"])
    assert counted <= 60 * step.at(64) * 1.001
    assert tuned.learning_rate["factor"] > 1
    assert f"short trainings at batch {swept['batch']}" in tuned.learning_rate["rule"]


def test_a_run_too_short_for_a_sweep_says_so() -> None:
    tuned = tune(least_squares(0.02), limit=64, steps=20, samples=1_000, skip=("estimate", "audit"))
    assert "too few to tell rates apart" in tuned.run["rate"]["skipped"]
    assert tuned.learning_rate is None or tuned.learning_rate["source"] == "formula"
