"""The curves against S(B) and E(B) as they are defined, and gamma against its closed forms."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.errors import InvalidInputError
from batchwright.planning import critical_batch as efficiency
from batchwright.planning.critical_batch import CriticalBatch

sizes = st.floats(0.01, 1e7)


def steps(batch: float, critical: float) -> float:
    return 1 + critical / batch


def samples(batch: float, critical: float) -> float:
    return 1 + batch / critical


@settings(max_examples=200)
@given(batch=sizes, critical=sizes)
def test_the_curves_follow_from_the_steps_and_samples_of_the_model(batch: float, critical: float) -> None:
    bc = critical
    assert efficiency.steps_over_minimum(batch, bc) == pytest.approx(steps(batch, bc))
    assert efficiency.wasted(batch, bc) == pytest.approx(1 - 1 / samples(batch, bc), abs=1e-12)
    for change in (2, 0.5):
        ratio = steps(change * batch, bc) / steps(batch, bc)
        assert efficiency.steps_after(change, batch, bc) == pytest.approx(ratio)
    for bend in (1.0, 1.5, 2.0):  # far from the critical batch all curves are one; around it a bend saves steps
        ratio = efficiency.steps_over_minimum(batch, bc, bend) / max(bc / batch, 1)
        assert 1 - 1e-9 <= ratio <= 2 ** (1 / bend) + 1e-9
        more = efficiency.steps_over_minimum(batch, bc, bend) / max(bc / batch, 1e-300)  # E/Emin
        assert efficiency.wasted(batch, bc, bend) == pytest.approx(1 - 1 / more, abs=1e-9)


CURVES: dict[Any, tuple[float, float]] = {
    efficiency.wasted: (1.0, 0.0),
    partial(efficiency.steps_after, 2): (1.0, 0.5),
    partial(efficiency.steps_after, 0.5): (1.0, 2.0),
    efficiency.steps_over_minimum: (1.0, math.inf),
}


@pytest.mark.parametrize(("curve", "limits"), CURVES.items(), ids=lambda c: getattr(c, "__name__", ""))
def test_a_curve_has_its_limit_without_noise_and_without_signal(curve: Any, limits: tuple[float, float]) -> None:
    assert (curve(64.0, 0.0), curve(64.0, math.inf)) == limits


@settings(max_examples=100)
@given(batch=sizes, ends=st.tuples(sizes, sizes, sizes).map(sorted))
def test_the_interval_of_the_answer_holds_every_value_inside_that_of_the_critical_batch(
    batch: float, ends: list[float]
) -> None:
    low, inside, high = ends
    for curve in CURVES:
        found = efficiency.over_interval(CriticalBatch(low, low, high, "samples", 9), lambda bc: curve(batch, bc))  # noqa: B023
        assert found.low <= curve(batch, inside) <= found.high


def test_at_the_critical_batch_half_is_wasted_and_a_doubling_saves_a_quarter() -> None:
    assert efficiency.wasted(212, 212) == 0.5
    assert efficiency.steps_after(2, 212, 212) == 0.75


def test_a_range_is_plain_data_with_none_for_what_is_infinite() -> None:
    assert efficiency.Range(2.0, 1.0, math.inf).to_dict() == {"value": 2.0, "low": 1.0, "high": None}


def test_gamma_of_linear_growth_is_eight_ninths() -> None:
    assert efficiency.gamma([(i + 0.5) / 4000 for i in range(4000)]) == pytest.approx(8 / 9, abs=1e-4)


def test_gamma_of_growth_by_a_hundred_is_071() -> None:
    grown = [100 ** ((i + 0.5) / 4000) for i in range(4000)]
    assert efficiency.gamma(grown) == pytest.approx((9 / math.log(10)) ** 2 / (99 / math.log(100)), rel=1e-5)
    assert round(efficiency.gamma(grown), 2) == 0.71


def test_gamma_weighs_by_progress_and_is_one_for_a_noise_scale_that_stays() -> None:
    assert efficiency.gamma([1.0, 100.0], [3, 1]) == pytest.approx(efficiency.gamma([1.0, 1.0, 1.0, 100.0]))
    assert efficiency.gamma([50.0] * 7, range(1, 8)) == pytest.approx(1.0)


def test_gamma_is_what_the_best_schedule_leaves() -> None:
    # The oracle: B_t = sqrt(lambda b_t) in the sums of S and E, over Smin steps of one unit each.
    scales, scale = [10.0, 40.0, 90.0, 160.0], 70.0
    batches = [math.sqrt(scale * b) for b in scales]
    over_steps = sum(b / batch for b, batch in zip(scales, batches, strict=True)) / len(scales)
    over_samples = sum(b + batch for b, batch in zip(scales, batches, strict=True)) / sum(scales) - 1
    assert over_steps * over_samples == pytest.approx(efficiency.gamma(scales))


@pytest.mark.parametrize(
    ("values", "weights"),
    [([], None), ([0.0], None), ([1.0, -1.0], None), ([math.inf], None), ([1.0], [0]), ([1.0], [1, 2])],
)
def test_gamma_refuses_what_has_no_mean(values: list[float], weights: list[float] | None) -> None:
    with pytest.raises(InvalidInputError, match="gamma needs noise scales"):
        efficiency.gamma(values, weights)


@pytest.mark.parametrize("batch", [0, -3, math.nan, math.inf, True, "many", None, 10**400])
def test_a_batch_that_is_no_positive_number_is_named(batch: object) -> None:
    with pytest.raises(InvalidInputError, match="effective batch must be a positive number"):
        efficiency.checked_batch(batch, "effective batch")
