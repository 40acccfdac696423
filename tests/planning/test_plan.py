"""The plan against counting: 1,000 random cases, and the cases that have a name."""

from __future__ import annotations

import json
import time
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import batchwright as bw
from batchwright.errors import InvalidInputError
from batchwright.planning.split import POLICIES
from tests.oracle import brute_plan

counts = st.integers(1, 3000)
caps = st.integers(1, 64)
device_counts = st.integers(1, 32)


@settings(max_examples=1000)
@given(effective=counts, cap=caps, devices=device_counts, policy=st.sampled_from(POLICIES))
def test_plan_agrees_with_counting(effective: int, cap: int, devices: int, policy: str) -> None:
    if policy in ("at-most", "exact") and effective < devices:
        with pytest.raises(InvalidInputError, match="below the number of devices"):
            bw.plan(effective, micro_batch=cap, devices=devices, policy=policy)
        return
    plan = bw.plan(effective, micro_batch=cap, devices=devices, policy=policy)
    assert plan.micro_batch <= cap
    weights = [Fraction(w.micro_batch, plan.effective_batch) * w.count for w in plan.weights]
    assert sum(weights) == 1
    assert sum(w.weight * w.count for w in plan.weights) == pytest.approx(1)
    sizes = [list(plan.split.micro_batches(rank)) for rank in range(devices)]
    assert all(len(rank_sizes) == plan.accumulation for rank_sizes in sizes)
    assert sum(map(sum, sizes)) == plan.effective_batch
    assert plan.difference == plan.effective_batch - effective
    if policy == "exact":
        assert plan.accumulation == brute_plan.fewest_micro_batches(effective, cap, devices)
        assert plan.effective_batch == effective
        dealt = brute_plan.deal_out(effective, plan.accumulation * devices)
        assert sorted((s for rank_sizes in sizes for s in rank_sizes), reverse=True) == dealt
        assert all(rank_sizes[-1] > 0 for rank_sizes in sizes), "the pass that synchronises is never empty"
    else:
        expected = brute_plan.best_micro_batch(effective, cap, devices, policy)
        assert (plan.micro_batch, plan.accumulation) == expected
        assert {s for rank_sizes in sizes for s in rank_sizes} == {plan.micro_batch}


@settings(max_examples=400)
@given(
    effective=st.integers(1, 200),
    cap=st.integers(1, 20),
    devices=st.integers(1, 5),
    samples=st.integers(1, 1000),
    policy=st.sampled_from(POLICIES),
    drop_last=st.booleans(),
)
def test_epoch_agrees_with_walking_it(
    effective: int, cap: int, devices: int, samples: int, policy: str, drop_last: bool
) -> None:
    if effective < devices:
        return
    plan = bw.plan(effective, micro_batch=cap, devices=devices, samples=samples, policy=policy, drop_last=drop_last)
    per_rank = [list(plan.split.micro_batches(rank)) for rank in range(devices)]
    micro_steps = [sum(step) for step in zip(*per_rank, strict=True)]
    walked = brute_plan.walk_epoch(samples, micro_steps, plan.micro_batch, devices, drop_last)
    assert (plan.forwards_per_epoch, plan.updates_per_epoch) == walked
    for row in plan.table:
        assert row.micro_batch <= plan.micro_batch


def test_the_comparison_of_10_000_samples_at_effective_batch_32() -> None:
    table = bw.plan(32, micro_batch=32, samples=10_000, drop_last=True).table
    assert table[-1].micro_batch == 1
    columns = [
        (r.micro_batch, r.accumulation, r.effective_batch, r.forwards_per_epoch, r.updates_per_epoch) for r in table
    ]
    assert columns[:4] == [(32, 1, 32, 312, 312), (16, 2, 32, 625, 313), (8, 4, 32, 1250, 313), (4, 8, 32, 2500, 313)]


def test_without_drop_last_the_incomplete_window_is_counted_and_shown() -> None:
    plan = bw.plan(32, micro_batch=8, samples=10_000)
    assert (plan.forwards_per_epoch, plan.updates_per_epoch) == (1250, 313)
    assert plan.to_dict()["last_window"] == {"samples": 16, "micro_batches": 2, "update": True}


def test_four_by_five_by_four_is_eighty() -> None:
    assert (
        repr(bw.plan(80, micro_batch=4, devices=5))
        == "Plan(micro_batch=4, accumulation=4, devices=5, effective_batch=80)"
    )


def test_at_most_at_a_cap_of_one_takes_one_micro_batch_less() -> None:
    plan = bw.plan(7, micro_batch=1, devices=3, policy="at-most")
    assert (plan.micro_batch, plan.accumulation, plan.effective_batch) == (1, 2, 6)
    assert plan.reason == "7 samples over 3 devices, at most 1 at a time: 3 passes would exceed it, so 2 per step"


@pytest.mark.parametrize("policy", ["nearest", "at-least"])
def test_fewer_samples_than_devices_give_one_each(policy: str) -> None:
    assert bw.plan(3, micro_batch=8, devices=4, policy=policy).effective_batch == 4


@pytest.mark.parametrize("policy", POLICIES)
def test_a_billion_answers_at_once(policy: str) -> None:
    start = time.process_time()
    plan = bw.plan(
        10**9 + 7, micro_batch=3, devices=1000, samples=10**12, drop_last=True, policy=policy, times={1: 1, 3: 2}
    )
    json.dumps(plan.to_dict())
    str(plan)
    # A loop over 10^9 anything takes minutes; the answer takes milliseconds.
    assert time.process_time() - start < 1.0


def test_to_dict_carries_the_agreed_keys() -> None:
    agreed = (
        "schema requested_batch effective_batch difference policy weights micro_batch accumulation devices "
        "forwards_per_epoch updates_per_epoch last_window table reason source"
    )
    data = bw.plan(1024, micro_batch=48, devices=4).to_dict()
    assert set(agreed.split()) <= set(data)
    assert (data["schema"], data["source"], data["forwards_per_epoch"]) == (1, "formula", None)
    assert json.loads(json.dumps(data, allow_nan=False)) == data


def test_the_largest_equal_split_that_reaches_the_target_is_in_the_table() -> None:
    table = bw.plan(1024, micro_batch=48, devices=4).table
    assert (32, 8, 1024) in [(row.micro_batch, row.accumulation, row.effective_batch) for row in table]
    assert [row.micro_batch for row in table] == sorted((row.micro_batch for row in table), reverse=True)


def test_notes_say_what_the_numbers_do_not() -> None:
    assert "no update in an epoch" in bw.plan(32, micro_batch=8, samples=7, drop_last=True).notes[0]
    assert "3 micro-batches of 0 samples at weight 0" in bw.plan(5, micro_batch=1, devices=4, policy="exact").notes[0]
    assert "policy 'exact' reaches 1,024" in bw.plan(1024, micro_batch=48, devices=4).notes[0]


def test_a_table_is_never_longer_than_a_person_reads() -> None:
    assert len(bw.plan(10**9, micro_batch=10**9).table) <= 13


def test_estimate_fills_the_peak_of_each_row() -> None:
    plan = bw.plan(32, micro_batch=8, estimate=lambda micro_batch: 1000 + 10 * micro_batch)
    assert [row.peak_bytes for row in plan.table] == [1080, 1040, 1020, 1010]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"effective_batch": 0}, "effective batch must be a whole number from 1 to 10^15; received 0."),
        ({"effective_batch": -8}, "received -8."),
        ({"effective_batch": 2.5}, "received 2.5."),
        ({"effective_batch": 10**30}, "received 1000000000000000000000000000000."),
        ({"effective_batch": True}, "received True."),
        ({"effective_batch": "32"}, "received '32'."),
        ({"micro_batch": 0}, "micro-batch must be"),
        ({"devices": 0}, "devices must be"),
        ({"samples": -1}, "samples must be"),
        ({"workers": -1}, "workers must be a whole number from 0"),
        ({"eval_micro_batch": 0}, "eval micro-batch must be"),
        ({"policy": "best"}, "policy must be one of nearest, at-least, at-most, exact; received 'best'."),
        ({"policy": ["nearest"]}, "policy must be one of"),
        ({"times": {0: 1.0}}, "micro-batch in times must be"),
        ({"times": {4: -1.0}}, "time of micro-batch 4 must be a positive number of seconds; received -1.0."),
        ({"times": {}}, "no times received"),
        ({"drop_last": "no"}, "drop_last must be True or False; received 'no'."),
        ({"estimate": 5}, "estimate must be a function"),
        ({"estimate": lambda _: float("nan")}, "what estimate returns must be a whole number"),
        ({"times": 4}, "times must be a mapping"),
        ({"times": [(4, 0.1)]}, "timed points"),
    ],
)
def test_wrong_values_are_named_with_what_is_accepted(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError) as error:
        bw.plan(**{"effective_batch": 32, "micro_batch": 8, **arguments})
    assert message in str(error.value)
