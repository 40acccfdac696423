"""The time to the loss by batch, against counting every batch."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.planning.times import TimedPoint, TimeModel
from batchwright.tuning.recommendation import TimeByBatch

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
    by_batch = TimeByBatch(critical, times, devices, largest, samples)
    by_counting = {batch: by_batch.at(batch) for batch in range(1, (samples or 4000) + 1)}
    least = min(by_counting.values())
    assert by_batch.at(by_batch.soonest) <= least * (1 + 1e-9)
    low, high = by_batch.as_good
    assert low <= by_batch.soonest <= high
    limit = 1.05 * by_batch.at(by_batch.soonest) * (1 + 1e-9)
    assert all(by_counting[batch] <= limit for batch in range(low, min(high, max(by_counting)) + 1))
    if high < max(by_counting):
        assert by_counting[high + 1] > 0.999999 * limit


def test_no_batch_is_larger_than_the_data() -> None:
    by_batch = TimeByBatch(1000.0, TimeModel(0.1, 0.001, 0.1), devices=2, largest=64, samples=20)
    assert by_batch.soonest <= 20
    assert by_batch.as_good[1] <= 20
