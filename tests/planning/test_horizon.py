"""The course of the noise scale carried on to a horizon, against sums over every step of simulated runs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.errors import InvalidInputError
from batchwright.planning.critical_batch import CriticalBatch
from batchwright.planning.horizon import Course, Stretch, find_horizon

BATCH = 32.0
NOISE = CriticalBatch(100.0, 80.0, 130.0, "samples", 100)


def course_of(
    noise_at: Callable[[int], float],
    steps: int,
    *,
    error: float = 0.0,
    seed: int = 0,
    loss: Callable[[int], float] = lambda n: 1.0,
) -> Course:
    """A run whose noise scale is known at every step, seen with normal errors, in 25 stretches."""
    draws, each = random.Random(seed), steps // 25
    stretches = []
    for last in range(each, steps + 1, each):
        seen = [1 / noise_at(n) + draws.gauss(0, error) for n in range(last - each + 1, last + 1)]
        stretches.append(Stretch(last, each, each * BATCH, each * BATCH, float(each), sum(seen), loss(last)))
    return Course(BATCH, NOISE, tuple(stretches))


def average_over_progress(noise_at: Callable[[int], float], steps: int) -> float:
    """Step by step: a step goes as far as 1 / (1 + N/B) of one without noise."""
    far = [1 / (1 + noise_at(n) / BATCH) for n in range(1, steps + 1)]
    return sum(f * noise_at(n) for n, f in enumerate(far, 1)) / sum(far)


@pytest.mark.parametrize("horizon", [100, 500, 5000])
def test_the_average_is_that_of_every_step(horizon: int) -> None:
    def noise_at(step: int) -> float:
        return 5.0 * math.pow(step, 0.6)

    found = course_of(noise_at, 500, error=1e-4).until(horizon)
    assert found.value == pytest.approx(average_over_progress(noise_at, horizon), rel=0.06)
    assert found.low < found.value < found.high


def test_the_interval_covers_the_truth_as_it_claims() -> None:
    covered, wide, number = 0, [], 200
    for seed in range(number):
        power = random.Random(seed).gauss(0.6, 0.15)

        def noise_at(step: int, power: float = power) -> float:
            return 60.0 * math.pow(step / 250, power)

        found = course_of(noise_at, 250, error=0.06, seed=seed).until(2500)
        covered += found.low <= average_over_progress(noise_at, 2500) <= found.high
        wide.append(math.log(found.high / found.low))
    assert covered / number >= 0.9
    assert sorted(wide)[number // 2] < math.log(20)


def test_the_farther_the_horizon_the_wider() -> None:
    course = course_of(lambda n: 60.0 * (n / 250) ** 0.3, 250, error=0.03)
    spreads = [course.until(steps).spread for steps in (250, 2500, 25_000)]
    assert spreads == sorted(spreads)
    assert spreads[-1] > 1.2 * spreads[0]


def test_a_signal_that_is_not_seen_has_no_upper_end() -> None:
    found = course_of(lambda n: 1e6, 250, error=0.05, seed=1).until(2500)
    assert found.high == math.inf
    assert 0 < found.low < math.inf


@given(st.lists(st.floats(-1, 1), min_size=0, max_size=40), st.floats(1, 1e6))
def test_whatever_was_seen_there_is_an_answer_in_order(signals: list[float], horizon: float) -> None:
    stretches = [Stretch(n, 1, BATCH, BATCH, 1.0, signal) for n, signal in enumerate(signals, 1)]
    course = Course(BATCH, NOISE, tuple(stretches))
    found = course.until(horizon)
    assert 0 <= found.low <= found.value <= found.high
    growth, error = course.growth(1.0, horizon)
    assert growth > 0
    assert error >= 0
    assert course.progress(horizon) > 0


def test_stretches_add_up() -> None:
    one, other = Stretch(2, 2, 8.0, 4.0, 3.0, 1.0), Stretch(5, 3, 12.0, 6.0, 5.0, 2.0)
    both = one + other
    assert (both.step, both.observations, both.units, both.samples) == (5, 5, 20.0, 10.0)
    assert both.signal_over_noise == pytest.approx(3 / 8 * 2)  # a sample has two units


class TestHorizons:
    course = course_of(lambda n: 50.0, 500, loss=lambda n: 4.0 * n**-0.25)

    def test_samples_are_counted_at_the_batch_that_was_trained(self) -> None:
        found = find_horizon(self.course, samples=64_000)
        assert (found.steps, found.times_trained) == (2000, 4)
        assert found.words == "as far as 64,000 samples go at 32 per step"

    def test_without_a_word_the_data_is_seen_once_or_ten_times_what_was_trained(self) -> None:
        assert find_horizon(self.course, data=100_000).samples == 100_000
        assert "no horizon was given" in find_horizon(self.course, data=100_000).words
        assert find_horizon(self.course).times_trained == 10
        assert find_horizon(self.course, data=1000).times_trained == 10  # smaller than what was trained

    def test_hours_are_those_of_the_soonest_batch(self) -> None:
        found = find_horizon(self.course, hours=2, seconds_to=lambda critical, progress: 3.0 * progress)
        assert self.course.progress(found.steps) * 3.0 == pytest.approx(7200, rel=1e-3)
        with pytest.raises(InvalidInputError, match="hours need the time of a step"):
            find_horizon(self.course, hours=2)

    def test_a_loss_ahead_is_carried_on_by_the_trend(self) -> None:
        found = find_horizon(self.course, until_loss=0.6)
        assert found.steps == pytest.approx((4.0 / 0.6) ** 4, rel=0.1)
        assert "by the trend about" in found.words

    def test_a_loss_that_was_reached_ends_there(self) -> None:
        found = find_horizon(self.course, until_loss=1.2)
        assert found.steps == pytest.approx((4.0 / 1.2) ** 4, rel=0.2)
        assert "was reached by step" in found.words

    def test_a_loss_out_of_sight_and_one_that_rises_are_refused_with_the_numbers(self) -> None:
        with pytest.raises(InvalidInputError, match=r"a loss of 0.01 is not in sight: 500 steps came to 0.8459"):
            find_horizon(self.course, until_loss=0.01)
        rising = course_of(lambda n: 50.0, 500, loss=lambda n: 1.0 + n / 500)
        with pytest.raises(
            InvalidInputError, match=r"does not fall towards 0\.5: it was 1\.04 at first and 2 at the end"
        ):
            find_horizon(rising, until_loss=0.5)
        unseen = course_of(lambda n: 50.0, 500, loss=lambda n: math.nan)
        with pytest.raises(InvalidInputError, match="the run showed none"):
            find_horizon(unseen, until_loss=0.5)
