"""The best batch against a search over every batch, and what is said where the numbers cannot tell."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from batchwright.errors import InvalidInputError
from batchwright.planning.best_batch import best_batch
from batchwright.planning.critical_batch import CriticalBatch
from batchwright.planning.split import Split
from batchwright.planning.time_to_loss import StepSeconds, TimeToLoss, soonest_on_line, time_to_loss
from batchwright.planning.times import TimedPoint, TimeModel, fit_times
from batchwright.report.display import render_plain
from batchwright.report.text.training_text import summarize_best_batch
from batchwright.units import LARGEST_COUNT

if TYPE_CHECKING:
    from batchwright.planning.best_batch import BestBatch

TIMES = {16: 0.12, 64: 0.24, 256: 0.72}  # 0.08 s and 0.0025 s a sample
PASSES_AND_A_STEP: dict[int | tuple[int, int], float] = {8: 0.07, 16: 0.11, 32: 0.19, (8, 4): 0.5}
fixed_costs = st.floats(1e-4, 1)
sample_costs = st.floats(1e-4, 0.1)
noise_scales = st.floats(0.5, 500)
EVERY = range(1, 3001)


def measured(low: float, value: float, high: float, **more: Any) -> CriticalBatch:
    return CriticalBatch(value, low, high, **{"unit": "samples", "observations": 50, **more})


def mentions(best: BestBatch, words: str) -> bool:
    return any(words in line for line in best.words)


@settings(max_examples=100)
@given(fixed=fixed_costs, per_sample=sample_costs, noise=noise_scales)
def test_no_batch_is_sooner_than_the_best(fixed: float, per_sample: float, noise: float) -> None:
    found = soonest_on_line(noise, fixed, per_sample, least=1, most=3000)
    times = [time_to_loss(batch, noise, fixed, per_sample) for batch in EVERY]
    assert times[found - 1] == pytest.approx(min(times), rel=1e-12)
    for unit in (7, 32):
        whole = soonest_on_line(noise, fixed, per_sample, least=1, most=3000, unit=unit)
        assert whole % unit == 0
        assert times[whole - 1] == pytest.approx(min(times[unit - 1 :: unit]), rel=1e-12)


@settings(max_examples=40)
@given(
    fixed=fixed_costs | st.just(0.0),
    per_sample=sample_costs | st.just(0.0),
    noise=noise_scales,
    share=st.floats(0.9, 3),
)
def test_the_batches_within_a_time_are_those_that_a_search_finds(
    fixed: float, per_sample: float, noise: float, share: float
) -> None:
    assume(fixed or per_sample)
    times = [time_to_loss(batch, noise, fixed, per_sample) for batch in EVERY]
    limit = share * min(times)
    curve = TimeToLoss(noise, StepSeconds(TimeModel(fixed, per_sample, 0.0)), most=3000)
    first = curve.smallest_within(limit)
    kept = range(first, 3001) if first else range(0)
    inside = [batch for batch, time in zip(EVERY, times, strict=True) if time <= limit * (1 - 1e-9)]
    assert all(batch in kept for batch in inside)
    assert first is None or times[first - 1] <= limit * (1 + 1e-9)
    low, high = curve.as_good
    as_good = [batch for batch, time in zip(EVERY, times, strict=True) if time <= 1.05 * min(times)]
    assert (times[low - 1], times[high - 1]) == pytest.approx((times[as_good[0] - 1], times[as_good[-1] - 1]))
    assert abs(low - as_good[0]) + abs(high - as_good[-1]) <= 1  # a tie, rounded


def test_the_answer_is_the_geometric_mean_of_overhead_and_noise() -> None:
    best = best_batch(400, TIMES)
    assert best.value == round(math.sqrt(0.08 / 0.0025 * 400))
    assert best.range_within_5_percent is not None
    first, last = best.range_within_5_percent
    assert best.time_ratio(first) <= 1.05 < best.time_ratio(first - 1)
    assert best.time_ratio(last) <= 1.05 < best.time_ratio(last + 1)


@settings(max_examples=50)
@given(fixed=fixed_costs, per_sample=sample_costs, noise=noise_scales)
def test_a_factor_of_two_costs_at_most_an_eighth(fixed: float, per_sample: float, noise: float) -> None:
    ideal = math.sqrt(fixed / per_sample * noise)
    least = time_to_loss(ideal, noise, fixed, per_sample)
    for batch in (ideal / 2, ideal * 2):
        assert time_to_loss(batch, noise, fixed, per_sample) <= 1.125 * least * (1 + 1e-12)


def test_the_interval_of_the_critical_batch_is_halved_in_factors() -> None:
    best = best_batch(measured(100, 200, 400, evidence="given"), TIMES)
    assert (best.low, best.high) == (57, 113)
    assert best.value == pytest.approx(80, abs=2)


def test_a_noise_scale_is_widened_by_what_such_estimates_are_off_by() -> None:
    given, best = (
        best_batch(measured(190, 200, 210, evidence="given"), TIMES),
        best_batch(measured(190, 200, 210), TIMES),
    )
    assert best.high is not None
    assert given.high is not None
    assert best.low < given.low < given.high < best.high
    assert best.chance < given.chance
    assert mentions(best, "with what such estimates were off by elsewhere")


def test_without_a_range_it_says_how_likely_the_answer_is_as_good() -> None:
    best = best_batch(measured(2, 200, 20_000, evidence="given"), TIMES)
    assert best.range_within_5_percent is None
    assert best.chance < 0.8
    assert mentions(best, "no batch is within 5 % of the best with a chance of 80 %")
    assert "with a chance of" in summarize_best_batch(best)
    assert json.loads(json.dumps(best.to_dict()))["range_within_5_percent"] is None


def test_without_an_upper_end_there_is_none_for_the_answer() -> None:
    best = best_batch(measured(100, 400, math.inf, evidence="given"), TIMES)
    assert (best.low, best.high) == (57, None)
    assert best.value == pytest.approx(113, rel=0.15)
    assert best.range_within_5_percent is None  # nothing says how large it may be
    assert mentions(best, "no evidence that a larger batch is too large; the answer rests on the estimate")
    assert "[57 or more]" in summarize_best_batch(best)


def test_an_infinite_estimate_leaves_the_lower_end_as_a_least_value() -> None:
    best = best_batch(measured(100, math.inf, math.inf, evidence="given"), TIMES)
    assert (best.value, best.noise_scale, best.high) == (57, 100, None)
    assert mentions(best, "take it as a least value")


def test_without_any_end_there_is_no_answer() -> None:
    with pytest.raises(InvalidInputError, match="not known yet"):
        best_batch(measured(0, math.inf, math.inf), TIMES)


def test_a_critical_batch_in_tokens_is_converted_or_refused() -> None:
    tokens = measured(6400, 12800, 25600, unit="tokens", samples_per_unit=1 / 64)
    assert best_batch(tokens, TIMES).value == best_batch(measured(100, 200, 400), TIMES).value
    with pytest.raises(InvalidInputError, match="in tokens, and its samples were not counted"):
        best_batch(measured(100, 200, 400, unit="tokens"), TIMES)


def test_without_a_fixed_cost_the_smallest_batch_is_best() -> None:
    best = best_batch(400, {16: 0.16, 64: 0.64, 256: 2.56})
    assert best.value == 1
    assert mentions(best, "no fixed cost")
    assert mentions(best, "1 is extrapolated")


def test_where_time_does_not_grow_the_largest_that_was_timed_is_best() -> None:
    best = best_batch(400, {16: 0.2, 64: 0.2, 256: 0.2})
    assert best.range_within_5_percent is not None
    assert (best.value, best.range_within_5_percent[1]) == (256, 256)
    assert mentions(best, "do not grow with the batch")
    assert best_batch(400, {16: 0.2, 64: 0.2}, largest=1000).value == 1000
    assert best_batch(400, {16: 0.2, 64: 0.2}, micro_batch=128).in_micro_batches == 128
    with pytest.raises(InvalidInputError, match="same time whatever the batch"):
        best_batch(400, TimeModel(0.0, 0.0, 0.2))


def test_a_batch_that_was_not_timed_is_called_extrapolated() -> None:
    assert mentions(best_batch(40_000, TIMES), "is extrapolated")
    assert not mentions(best_batch(400, TIMES), "is extrapolated")


def test_the_answer_stays_within_the_largest() -> None:
    best = best_batch(400, TIMES, largest=50)
    assert best.range_within_5_percent is not None
    assert best.value == best.range_within_5_percent[1] == 50
    assert mentions(best, "50 is the largest that is allowed")
    assert not mentions(best_batch(400, TIMES, largest=113), "largest that is allowed")


def test_a_poor_fit_is_said() -> None:
    assert mentions(best_batch(400, {16: 0.12, 64: 0.9, 256: 0.72}), "fits these times poorly")


@pytest.mark.parametrize("devices", [1, 4])
def test_a_time_model_gives_the_steps_of_one_pass(devices: int) -> None:
    model = fit_times(PASSES_AND_A_STEP)
    best = best_batch(300, model, devices=devices)
    split = Split(32 * devices, 1, devices)
    assert best.step_seconds.at(32 * devices) == pytest.approx(model.step_seconds(split))
    assert best.step_seconds.timed == (8 * devices, 32 * devices)


@pytest.mark.parametrize("devices", [1, 4])
def test_a_time_model_with_a_micro_batch_gives_the_steps_that_accumulate(devices: int) -> None:
    model = fit_times(PASSES_AND_A_STEP)
    best = best_batch(3000, model, devices=devices, micro_batch=16)
    split = Split(16 * 5 * devices, 5, devices)
    assert best.step_seconds.at(16 * 5 * devices) == pytest.approx(model.step_seconds(split))
    assert best.value >= 16 * devices
    assert best.step_seconds.covers(16 * devices * 100)
    small = best_batch(1, model, devices=devices, micro_batch=16)
    assert small.value == 16 * devices
    assert mentions(small, "a smaller micro-batch may be sooner")


def test_an_assumed_time_model_is_called_a_model() -> None:
    best = best_batch(300, TimeModel(0.05, 0.001, 0.0))
    assert mentions(best, "the seconds are a model")
    assert best.to_dict()["source"] == "formula"


def test_whole_micro_batches_are_offered() -> None:
    best = best_batch(400, TIMES, micro_batch=16, devices=2)
    assert best.value == 113
    assert best.in_micro_batches == 128  # 96 takes 0.5 % longer than the best, 128 0.3 %
    assert best.time_ratio(128) < best.time_ratio(96)


def test_the_smallest_batch_that_meets_a_deadline_is_found() -> None:
    best = best_batch(400, TIMES, min_steps=1000, deadline_seconds=1800)
    assert best.run_seconds == pytest.approx(1000 * time_to_loss(113, 400, 0.08, 0.0025))
    met = best.deadline_batch
    assert met is not None
    seconds = [1000 * time_to_loss(batch, 400, 0.08, 0.0025) for batch in (met - 1, met)]
    assert seconds[1] <= 1800 < seconds[0]


def test_a_deadline_that_no_batch_meets_is_answered_with_the_least_time() -> None:
    best = best_batch(400, TIMES, min_steps=1000, deadline_seconds=1600)
    assert best.deadline_batch is None
    assert mentions(best, "no batch reaches the loss within 1,600 s: it takes at least 1,646 s")


def test_devices_by_the_hour_are_chosen_by_the_least_cost() -> None:
    best = best_batch(400, TIMES, micro_batch=16, price_per_device_hour=2.0, value_per_hour=50.0)
    costs = {n: (1 + 400 / (16 * n)) * (50 + 2 * n) for n in range(1, 500)}
    assert best.elastic_devices == min(costs, key=costs.__getitem__)
    assert best.elastic_devices * 16 == pytest.approx(math.sqrt(50 * 16 * 400 / 2), abs=16)


def test_without_a_value_of_time_one_full_device_is_cheapest() -> None:
    best = best_batch(400, TIMES, devices=3, micro_batch=16, price_per_device_hour=2.0, min_steps=1000)
    assert best.elastic_devices == 1
    assert best.run_cost == pytest.approx(3 * 2.0 * (best.run_seconds or 0) / 3600)


@pytest.mark.parametrize(
    ("critical", "times", "options", "message"),
    [
        (0, TIMES, {}, "critical batch must be a positive number"),
        (math.inf, TIMES, {}, "critical batch must be a positive number"),
        ("large", TIMES, {}, "critical batch must be a positive number"),
        (400, TimeModel(0.0, 0.0, 0.0), {}, "a step must take some time"),
        (400, {32: 0.1}, {}, "at least two effective batches"),
        (400, [0.1, 0.2], {}, "at least two effective batches"),
        (400, {32: 0.1, 2.5: 0.2}, {}, "effective batch in step_times must be a whole number"),
        (400, {32: 0.1, (4, 8): 0.2}, {}, "effective batch in step_times must be a whole number"),
        (400, {32: 0.1, 64: -1}, {}, "step time of batch 64 must be"),
        (400, TIMES, {"devices": 0}, "devices must be"),
        (400, TIMES, {"largest": 8, "micro_batch": 16}, "largest must be at least one micro-batch"),
        (400, TIMES, {"deadline_seconds": 60}, "a deadline of 60 s needs min_steps"),
        (400, TIMES, {"value_per_hour": 60}, "needs price_per_device_hour and micro_batch"),
        (400, TIMES, {"price_per_device_hour": -1}, "price per device-hour must be"),
        (400, TIMES, {"min_steps": 0}, "min_steps must be"),
    ],
)
def test_what_cannot_be_used_is_named(critical: Any, times: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        best_batch(critical, times, **options)


def test_the_answer_is_plain_data_and_shows_itself() -> None:
    best = best_batch(measured(100, 400, math.inf), TIMES, micro_batch=8, min_steps=10, price_per_device_hour=1.0)
    data = json.loads(json.dumps(best.to_dict(), allow_nan=False))
    assert data["high"] is None
    assert data["critical"]["high"] is None
    assert data["source"] == "measured"
    assert f"{best.value}" in best._repr_html_()
    drawn = render_plain(best)
    assert drawn.startswith(f"effective batch {best.value} [{best.low} or more] reaches the loss soonest")
    assert all(f"{line}." in drawn.replace("\n", " ") for line in best.words)


seconds = st.floats(1e-4, 1.0)


@settings(max_examples=500)
@given(
    critical=st.floats(1, 500),
    alpha=seconds,
    beta=seconds,
    sigma=seconds,
    devices=st.integers(1, 4),
    largest=st.integers(1, 64),
    samples=st.one_of(st.none(), st.integers(1, 300)),
)
def test_the_soonest_and_its_range_are_those_of_counting(
    critical: float, alpha: float, beta: float, sigma: float, devices: int, largest: int, samples: int | None
) -> None:
    times = TimeModel(alpha, beta, sigma, (TimedPoint(1, 1.0),))
    by_batch = TimeToLoss(critical, StepSeconds(times, devices, largest), most=samples or LARGEST_COUNT)
    by_counting = {batch: by_batch.at(batch) for batch in range(1, (samples or 4000) + 1)}
    least = min(by_counting.values())
    assert by_batch.at(by_batch.soonest) <= least * (1 + 1e-9)
    low, high = by_batch.as_good
    assert low <= by_batch.soonest <= high
    limit = 1.05 * by_batch.at(by_batch.soonest) * (1 + 1e-9)
    assert all(by_counting[batch] <= limit for batch in range(low, min(high, max(by_counting)) + 1))
    if high < max(by_counting):
        assert by_counting[high + 1] > 0.999999 * limit
    if low > 1:
        assert by_counting[low - 1] > 0.999999 * limit
    for share in (0.9, 1.02, 1.3, 3.0):
        deadline = share * least
        first = by_batch.smallest_within(deadline)
        by_search = [batch for batch, time in by_counting.items() if time <= deadline * (1 - 1e-12)]
        assert first is None or by_batch.at(first) <= deadline
        assert not by_search or (first is not None and first <= by_search[0])


def test_no_batch_is_larger_than_the_data() -> None:
    by_batch = TimeToLoss(1000.0, StepSeconds(TimeModel(0.1, 0.001, 0.1), devices=2, micro_batch=64), most=20)
    assert by_batch.soonest <= 20
    assert by_batch.as_good[1] <= 20
