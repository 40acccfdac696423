"""What is claimed of a batch is true of every critical batch that the interval allows."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.errors import InvalidInputError
from batchwright.noise.noise_result import POSITIONS, judge
from batchwright.planning.critical_batch import CriticalBatch

sizes = st.floats(0.1, 1e6)


def measured(low: float, high: float, value: float | None = None, steps_needed: int | None = None) -> CriticalBatch:
    point = math.sqrt(low * high) if value is None else value
    return CriticalBatch(point, low, high, "samples", 50, steps_needed, evidence="given")


@pytest.mark.parametrize(
    ("batch", "interval", "position", "advice"),
    [
        (64, (700, 1200), "far below", "a larger batch pays"),
        (200, (150, 300), "near", "keep the batch"),
        (2000, (150, 300), "beyond", "lower the batch"),
        (64, (150, 600), "far below or near", "a larger batch may pay"),
        (1000, (150, 600), "near or beyond", "do not raise the batch"),
        (300, (10, 10000), "unresolved", "measure longer"),
    ],
)
def test_a_position_is_claimed_as_far_as_the_interval_agrees(
    batch: float, interval: tuple[float, float], position: str, advice: str
) -> None:
    verdict = judge(measured(*interval), batch)
    assert verdict.position == position
    assert advice in verdict.recommendation


@settings(max_examples=200)
@given(batch=sizes, ends=st.tuples(sizes, sizes, sizes).map(sorted))
def test_no_critical_batch_in_the_interval_contradicts_the_position(batch: float, ends: list[float]) -> None:
    low, inside, high = ends
    verdict = judge(measured(low, high, inside), batch)
    assert verdict.positions == tuple(p for p in POSITIONS if p in verdict.positions)
    assert judge(measured(inside, inside, inside), batch).position in verdict.positions
    if verdict.position == "far below":
        assert verdict.waste.high <= 0.2
        assert verdict.doubling_saves.low >= 0.4
    if verdict.position == "beyond":
        assert verdict.waste.low >= 0.8
        assert verdict.doubling_saves.high <= 0.1


@pytest.mark.parametrize("batch", [200, 5000, 10**9])
def test_without_an_upper_end_no_batch_is_called_too_large(batch: float) -> None:
    for value in (900.0, math.inf):
        verdict = judge(measured(168.0, math.inf, value, steps_needed=340), batch)
        assert "beyond" not in verdict.position
        assert verdict.recommendation.startswith("no evidence that the batch is too large")
        assert "340 more steps" in verdict.recommendation


def test_without_an_upper_end_a_batch_far_below_the_lower_end_is_far_below() -> None:
    assert judge(measured(1000.0, math.inf, 5000.0), 32).position == "far below"


def test_an_interval_from_nothing_to_infinity_resolves_nothing() -> None:
    verdict = judge(CriticalBatch(math.inf, 0.0, math.inf, "samples", 2), 32)
    assert verdict.position == "unresolved"
    assert json.dumps(verdict.to_dict(), allow_nan=False)


def test_a_noise_scale_is_judged_with_what_such_estimates_are_off_by() -> None:
    noise = CriticalBatch(300.0, 290.0, 310.0, "samples", 500)
    verdict, exact = judge(noise, 64), judge(measured(290, 310), 64)
    assert verdict.critical is noise
    assert verdict.doubling_saves.low < exact.doubling_saves.low < exact.doubling_saves.high
    assert verdict.doubling_saves.high > exact.doubling_saves.high
    assert "far below" in verdict.positions
    assert "beyond" not in verdict.positions


def test_twice_the_devices_pay_between_once_and_twice() -> None:
    verdict = judge(measured(100, 400), 100, devices=4)
    assert (verdict.doubling_speeds_up.low, verdict.doubling_speeds_up.high) == pytest.approx((4 / 3, 5 / 3))
    assert verdict.devices_pay.startswith("8 devices instead of 4")


def test_the_learning_rate_is_given_for_a_doubled_and_a_halved_batch() -> None:
    verdict = judge(measured(100, 400), 100, optimizer="AdamW", learning_rate=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    assert verdict.if_doubled is not None
    assert verdict.if_halved is not None
    assert (verdict.if_doubled.after, verdict.if_halved.after) == (200, 50)
    assert sum("batch: learning rate x" in words for words in verdict.words) == 2
    assert judge(measured(100, 400), 100).if_doubled is None


def test_the_verdict_is_plain_data() -> None:
    data = judge(measured(100, 400), 100, optimizer="sgd").to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["position"] == "near"


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="effective batch must be"):
        judge(measured(100, 400), 0)
