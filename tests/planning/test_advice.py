"""Advice: the settings it proposes, and the learning rate that goes with them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import batchwright as bw
from batchwright.errors import InvalidInputError
from batchwright.planning.advice import PROBLEMS


def settings_of(advice: bw.Advice) -> list[tuple[int, int, int]]:
    return [(o.after.micro_batch, o.after.accumulation, o.after.effective_batch) for o in advice.options]


def test_out_of_memory_at_eight_splits_in_halves_down_to_one() -> None:
    assert settings_of(bw.advise("out-of-memory", micro_batch=8, devices=5)) == [(4, 2, 40), (2, 4, 40), (1, 8, 40)]


def test_unstable_doubles_the_effective_batch_on_purpose_and_keeps_the_rate() -> None:
    advice = bw.advise("unstable", micro_batch=4, accumulation=4, devices=5, learning_rate=1e-5)
    assert settings_of(advice)[0] == (4, 8, 160)
    assert advice.options[0].after.learning_rate == 1e-5
    assert advice.options[2].after.learning_rate == 5e-6
    assert not any(option.follows_rule for option in advice.options)


def test_unstable_above_the_critical_batch_leaves_the_batch_alone() -> None:
    advice = bw.advise("unstable", micro_batch=4, accumulation=4, critical_batch=16)
    assert [option.title for option in advice.options] == ["halve the learning rate"]
    assert "hardly the cure" in advice.further[0]


@pytest.mark.parametrize(("optimizer", "rate"), [("sgd", 2e-5), ("AdamW", 2**0.5 * 1e-5)])
def test_a_larger_batch_takes_the_rate_of_its_optimizer(optimizer: str, rate: float) -> None:
    advice = bw.advise("slow", micro_batch=4, accumulation=4, devices=5, learning_rate=1e-5, optimizer=optimizer)
    assert settings_of(advice) == [(8, 2, 80), (8, 4, 160)]
    assert advice.options[1].after.learning_rate == pytest.approx(rate)


def test_slow_fills_what_fits_and_stops_at_the_critical_batch() -> None:
    advice = bw.advise("slow", micro_batch=4, accumulation=4, max_micro_batch=16, critical_batch=16)
    assert settings_of(advice) == [(16, 1, 16)]
    assert "at or above the critical batch 16" in advice.further[0]


@settings(max_examples=300)
@given(
    problem=st.sampled_from(PROBLEMS),
    micro_batch=st.integers(1, 200),
    accumulation=st.integers(1, 50),
    devices=st.integers(1, 9),
    room=st.one_of(st.none(), st.integers(0, 9)),
    critical=st.one_of(st.none(), st.integers(1, 3000)),
)
def test_no_option_repeats_the_setting_or_breaks_its_promise(
    problem: str, micro_batch: int, accumulation: int, devices: int, room: int | None, critical: int | None
) -> None:
    cap = None if room is None else micro_batch + room
    if problem == "out-of-memory" and room is not None:
        cap = max(1, micro_batch - 1 - room)
        if cap >= micro_batch:
            return
    advice = bw.advise(
        problem,
        micro_batch=micro_batch,
        accumulation=accumulation,
        devices=devices,
        max_micro_batch=cap,
        critical_batch=critical,
    )
    before = advice.before.effective_batch
    assert len({(o.after, o.learning_rate_factor) for o in advice.options}) == len(advice.options)
    for option in advice.options:
        assert option.after != advice.before or option.learning_rate_factor != 1.0
        assert cap is None or option.after.micro_batch <= cap
        if problem == "out-of-memory" or option.title == "fewer, larger passes":
            assert option.after.effective_batch == before
            assert option.learning_rate_factor == 1.0
        if problem == "out-of-memory":
            assert option.after.micro_batch < micro_batch
        if option.title == "larger effective batch":
            assert option.after.effective_batch > before
            assert critical is None or option.after.effective_batch <= critical
    json.dumps(advice.to_dict(), allow_nan=False)
    assert str(advice).startswith(problem)


def test_a_micro_batch_of_one_leaves_other_means() -> None:
    advice = bw.advise("oom", micro_batch=1)
    assert advice.options == ()
    assert "cannot be split" in advice._repr_html_()


def test_sharding_is_named_only_where_there_are_devices() -> None:
    assert not any("shard" in line for line in bw.advise("oom", micro_batch=8).further)
    assert any("over the 5 devices" in line for line in bw.advise("oom", micro_batch=8, devices=5).further)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"problem": "sad"}, "problem must be one of out-of-memory, unstable, slow; received 'sad'."),
        ({"micro_batch": 0}, "micro-batch must be"),
        ({"optimizer": "wishful"}, "no learning-rate rule is known for optimizer 'wishful'; known are"),
        ({"learning_rate": -1}, "learning rate must be a positive number"),
        ({"learning_rate": 1.7e308}, "learning rate must be a positive number"),
        ({"max_micro_batch": 3}, "micro-batch 4 is above the largest that fits, 3"),
        ({"problem": "oom", "max_micro_batch": 4}, "says that micro-batch 4 fits"),
        ({"learning_rate": float("nan")}, "learning rate must be a positive number"),
        ({"micro_batch": 10**9, "accumulation": 10**9}, "effective batch (micro-batch x accumulation x devices)"),
    ],
)
def test_wrong_values_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError) as error:
        bw.advise(**{"problem": "slow", "micro_batch": 4, **arguments})
    assert message in str(error.value)
