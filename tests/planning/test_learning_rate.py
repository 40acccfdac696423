"""The rules against the published ones where those hold, and their limits beyond."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.errors import InvalidInputError
from batchwright.planning.critical_batch import CriticalBatch
from batchwright.planning.learning_rate import OPTIMIZERS, LearningRateChange, gain, learning_rate_change, rule_for

sizes = st.floats(0.1, 1e6)


def known(value: float, low: float | None = None, high: float | None = None) -> CriticalBatch:
    return CriticalBatch(value, value if low is None else low, value if high is None else high, "samples", 50)


def after(change: LearningRateChange, name: str) -> float:
    found = next(setting.after for setting in change.settings if setting.name == name)
    assert found is not None
    return found.value


@settings(max_examples=200)
@given(before=sizes, then=sizes, critical=sizes)
def test_the_gain_is_the_ratio_of_the_best_learning_rates_of_the_quadratic_model(
    before: float, then: float, critical: float
) -> None:
    assert gain(before, then, critical) == pytest.approx((1 + critical / before) / (1 + critical / then))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_far_below_the_critical_batch_the_rules_are_those_of_the_plan(optimizer: str) -> None:
    for critical in (known(math.inf), known(1e12)):
        change = learning_rate_change(optimizer, 64, 256, critical)
        assert change.factor is not None
        assert change.factor.value == pytest.approx(rule_for(optimizer).factor(64, 256))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_far_beyond_it_the_learning_rate_stays(optimizer: str) -> None:
    change = learning_rate_change(optimizer, 64, 256, known(1e-9))
    assert change.factor is not None
    assert change.factor.value == pytest.approx(1)


@settings(max_examples=100)
@given(batches=st.tuples(sizes, sizes, sizes), critical=sizes)
def test_two_changes_in_a_row_are_one(batches: tuple[float, float, float], critical: float) -> None:
    a, b, c = batches
    assert gain(a, b, critical) * gain(b, c, critical) == pytest.approx(gain(a, c, critical))


def test_adam_takes_the_square_root_of_what_sgd_takes() -> None:
    critical = known(300.0, 100.0, 900.0)
    sgd, adam = (learning_rate_change(name, 100, 400, critical).factor for name in ("sgd", "adam"))
    assert sgd is not None
    assert adam is not None
    assert (adam.value**2, adam.low**2, adam.high**2) == pytest.approx((sgd.value, sgd.low, sgd.high))


@pytest.mark.parametrize("then", [25, 400])
def test_the_factor_holds_the_interval_either_way(then: int) -> None:
    change = learning_rate_change("sgd", 100, then, known(300.0, 100.0, math.inf), learning_rate=0.1)
    assert change.factor is not None
    assert change.factor.low < change.factor.value < change.factor.high
    assert 4 in (pytest.approx(change.factor.high), pytest.approx(1 / change.factor.low))


def test_beta2_keeps_its_half_life_in_samples() -> None:
    change = learning_rate_change("adamw", 64, 512, known(300.0), betas=(0.9, 0.999))
    steps_before = math.log(0.5) / math.log(0.999)
    steps_after = math.log(0.5) / math.log(after(change, "beta2"))
    assert steps_after * 512 == pytest.approx(steps_before * 64)


def test_weight_decay_keeps_the_timescale_of_adamw() -> None:
    change = learning_rate_change("adamw", 64, 256, known(300.0), learning_rate=3e-4, weight_decay=0.1)
    rate, decay = after(change, "learning rate"), after(change, "weight decay")
    assert 256 / (rate * decay) == pytest.approx(64 / (3e-4 * 0.1))


def test_coupled_weight_decay_is_left_alone_and_said_so() -> None:
    change = learning_rate_change("sgd", 64, 256, known(300.0), weight_decay=1e-4)
    assert [setting.name for setting in change.settings] == ["learning rate"]
    assert any("weight decay stays at 0.0001" in note for note in change.notes)


@pytest.mark.parametrize("optimizer", ["sophia", "", "shampoo" * 30, 7])
def test_an_optimizer_without_a_rule_is_an_answer(optimizer: Any) -> None:
    change = learning_rate_change(optimizer, 64, 256, known(300.0), learning_rate=0.1)
    assert change.factor is None
    assert change.settings == ()
    assert change.reason.startswith("no rule is known for")
    assert json.dumps(change.to_dict())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_setting_has_a_source_and_a_doubt(optimizer: str) -> None:
    change = learning_rate_change(optimizer, 64, 256, known(300.0, 1.0, math.inf), betas=(0.9, 0.95), weight_decay=0.1)
    for setting in change.settings:
        assert "et al." in setting.source
        assert setting.doubt
    assert json.dumps(change.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"before": 0}, "batch before must be"),
        ({"after": -1}, "batch after must be"),
        ({"learning_rate": "fast"}, "learning rate must be"),
        ({"betas": 0.9}, "betas must be two numbers"),
        ({"betas": (0.9, 1.5)}, "betas must be two numbers"),
        ({"weight_decay": -0.1}, "weight decay must be"),
    ],
)
def test_values_that_cannot_be_used_are_named(wrong: dict[str, Any], message: str) -> None:
    options = {"before": 64, "after": 128, **wrong}
    before, then = options.pop("before"), options.pop("after")
    with pytest.raises(InvalidInputError, match=message):
        learning_rate_change("adamw", before, then, known(300.0), **options)
