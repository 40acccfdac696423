"""The time model against numbers that were made from it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import batchwright as bw
from batchwright.errors import InvalidInputError
from batchwright.planning.split import Split
from batchwright.planning.times import TimedPoint, fit_times

seconds = st.floats(1e-4, 10)


@settings(max_examples=200)
@given(alpha=seconds, beta=seconds, sigma=seconds)
def test_three_coefficients_are_found_again(alpha: float, beta: float, sigma: float) -> None:
    points = [TimedPoint(m, alpha + beta * m) for m in (1, 4, 16)]
    points += [TimedPoint(m, a * (alpha + beta * m) + sigma, a) for m, a in ((4, 2), (1, 8), (16, 4))]
    model = fit_times(points)
    assert model.unknown == ()
    for split in (Split(64, 4, 1), Split(64, 16, 1), Split(64, 64, 1)):
        truth = split.accumulation * (alpha + beta * split.largest) + sigma
        assert model.step_seconds(split) == pytest.approx(truth, rel=1e-3)


def test_the_fit_is_least_squares_on_relative_error() -> None:
    measured = {1: 0.05, 2: 0.06, 4: 0.11, 8: 0.17, 16: 0.36}
    model = fit_times(measured)
    sizes, times = np.array(list(measured)), np.array(list(measured.values()))
    rows = np.stack([1 / times, sizes / times], axis=1)
    expected, *_ = np.linalg.lstsq(rows, np.ones(len(times)), rcond=None)
    assert (model.alpha, model.beta) == pytest.approx(tuple(expected))


def test_a_coefficient_never_goes_below_zero() -> None:
    model = fit_times({1: 1.0, 2: 2.2, 4: 4.8})
    assert model.alpha == 0
    assert model.largest_error is not None
    assert 0.01 < model.largest_error < 0.2


def test_one_point_means_time_in_proportion_to_samples() -> None:
    model = fit_times({4: 0.2})
    assert model.beta == pytest.approx(0.05)
    assert model.alpha == 0.0


@pytest.mark.parametrize(
    ("times", "unknown"),
    [
        ({4: 0.11, 8: 0.19}, ("sigma",)),
        ({(4, 8): 0.95, (8, 8): 1.59}, ("alpha", "sigma")),
        ({(4, 8): 0.95, (8, 4): 0.83}, ("beta", "sigma")),
        ({(4, 8): 0.95, 8: 0.19}, ("alpha", "beta", "sigma")),
        ({4: 0.11, 8: 0.19, (4, 8): 0.95}, ()),
        ({1_000_000: 1.0, 1_000_001: 1.0000005}, ("alpha", "beta", "sigma")),
        ({4: 0.11}, ("alpha", "beta", "sigma")),
    ],
)
def test_what_the_points_cannot_tell_is_named(times: dict[Any, float], unknown: tuple[str, ...]) -> None:
    assert fit_times(times).unknown == unknown


def test_relative_time_of_each_split_follows_the_measurements() -> None:
    table = bw.plan(32, micro_batch=32, times={4: 0.11, 8: 0.19, 32: 0.67}).table
    # alpha 0.03, beta 0.02: 8 passes of 4 take 0.88 s, one of 32 takes 0.67 s.
    assert [round(row.relative_time, 4) for row in table[:4]] == [1.0, 1.0448, 1.1343, 1.3134]
    assert [row.is_extrapolated for row in table] == [False, False, False, False, True, True]


def test_without_measurements_the_times_are_called_a_model() -> None:
    plan = bw.plan(32, micro_batch=32)
    assert plan.to_dict()["time_model"]["source"] == "formula"
    assert {row.relative_time for row in plan.table} == {1.0}
    assert "a model, not measured" in plan._repr_html_()


@pytest.mark.parametrize(
    "times",
    [
        {},
        "4=0.1",
        {"4": 1.0},
        {4: 0.0},
        {4: -1.0},
        {4: float("nan")},
        {4: float("inf")},
        {4: 1e-320},
        {(4, 0): 1.0},
        {0: 1.0},
    ],
)
def test_times_that_cannot_be_used_are_refused(times: Any) -> None:
    with pytest.raises(InvalidInputError):
        fit_times(times)
