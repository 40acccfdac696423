"""For any lengths: the budget holds, every sample comes once, ranks have as many steps, and a resumed run is the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.sampler.cost import BatchCost
from batchwright.sampler.token_batch_sampler import TokenBatchSampler

BUDGET = 64


def _shapes(draw: Any) -> list[int]:
    number = draw(st.integers(0, 120))
    kind = draw(st.sampled_from(["any", "equal", "maximal", "giant", "pareto", "one"]))
    if kind == "equal":
        return [draw(st.integers(1, BUDGET))] * number
    if kind == "maximal":
        return [BUDGET] * number
    if kind == "giant":
        return [1] * number + [BUDGET]
    if kind == "one":
        return [draw(st.integers(1, BUDGET))]
    if kind == "pareto":
        rng = np.random.default_rng(draw(st.integers(0, 1000)))
        return [int(length) for length in np.clip(1 + rng.pareto(1.0, number), 1, BUDGET)]
    return list(draw(st.lists(st.integers(1, BUDGET), max_size=120)))


lengths_of = st.composite(_shapes)()
ranks_of = st.integers(1, 9)
options_of = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 3),
        "waste": st.sampled_from([0.0, 0.05, 0.5]),
        "max_samples": st.sampled_from([None, 3, 8]),
        "multiple_of": st.sampled_from([1, 2]),
    }
)


def of_rank(lengths: Any, rank: int, ranks: int, **options: Any) -> TokenBatchSampler:
    return TokenBatchSampler(lengths, BUDGET, rank=rank, world_size=ranks, **options)


def real(sampler: TokenBatchSampler, batches: list[list[int]]) -> list[list[int]]:
    return [batch for index, batch in enumerate(batches) if sampler.counts(index)]


@given(lengths=lengths_of, ranks=ranks_of, options=options_of, epoch=st.integers(0, 2))
@settings(max_examples=150)
def test_budget_once_and_equal_steps(lengths: list[int], ranks: int, options: dict[str, Any], epoch: int) -> None:
    seen: list[int] = []
    steps = set()
    for rank in range(ranks):
        sampler = of_rank(lengths, rank, ranks, **options)
        sampler.set_epoch(epoch)
        number = len(sampler)
        batches = list(sampler)
        assert number == len(batches)
        steps.add(number)
        for batch in batches:
            assert batch
            assert len(batch) * max(lengths[i] for i in batch) <= BUDGET
            assert options["max_samples"] is None or len(batch) <= options["max_samples"]
        sampler.set_epoch(epoch)
        fresh = of_rank(lengths, rank, ranks, **options)
        fresh.set_epoch(epoch)
        seen += [i for batch in real(fresh, batches) for i in batch]
    assert sorted(seen) == list(range(len(lengths)))
    assert len(steps) == 1


@given(lengths=lengths_of, data=st.data(), options=options_of)
@settings(max_examples=100)
def test_a_resumed_run_is_the_unbroken_one(lengths: list[int], data: Any, options: dict[str, Any]) -> None:
    ranks = data.draw(st.integers(1, 4))
    rank = data.draw(st.integers(0, ranks - 1))
    whole = list(of_rank(lengths, rank, ranks, **options))
    cut = data.draw(st.integers(0, len(whole)))
    first = of_rank(lengths, rank, ranks, **options)
    iterator = iter(first.track(first))
    begun = [next(iterator) for _ in range(cut)]
    second = of_rank(lengths, rank, ranks, **options)
    second.load_state_dict(first.state_dict())
    if cut < len(whole) or not whole:
        assert len(second) == len(whole) - cut
        assert begun + list(second) == whole
    else:
        assert second.epoch == 0
        list(second)
        assert second.epoch == 1


@given(lengths=lengths_of, data=st.data(), options=options_of)
@settings(max_examples=100)
def test_ranks_may_change_on_the_way_and_no_sample_is_lost_or_repeated(
    lengths: list[int], data: Any, options: dict[str, Any]
) -> None:
    seen: list[int] = []
    state: dict[str, Any] | None = None
    plan = data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=3))
    for number, ranks in enumerate([*plan, data.draw(st.integers(1, 8))]):
        if number and len(seen) == len(lengths):
            break  # what comes next is another epoch
        samplers = [of_rank(lengths, rank, ranks, **options) for rank in range(ranks)]
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(state)
        left = len(samplers[0])
        rounds = left if number == len(plan) else data.draw(st.integers(0, left))
        for sampler in samplers:
            iterator = iter(sampler.track(sampler))
            for index in range(rounds):
                batch = next(iterator)
                if sampler.counts(index):
                    seen += batch
        state = samplers[0].state_dict()
    assert sorted(seen) == list(range(len(lengths)))


@given(lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), max_size=80), ranks=st.integers(1, 4))
@settings(max_examples=80)
def test_two_lengths_keep_the_budget_too(lengths: list[tuple[int, int]], ranks: int) -> None:
    seen = []
    for rank in range(ranks):
        sampler = of_rank(lengths, rank, ranks)
        for batch in sampler:
            longest = [max(lengths[i][column] for i in batch) for column in (0, 1)]
            assert len(batch) * sum(longest) <= BUDGET
        fresh = of_rank(lengths, rank, ranks)
        seen += [i for batch in real(fresh, list(fresh)) for i in batch]
    assert sorted(seen) == list(range(len(lengths)))


@given(lengths=lengths_of, squared=st.floats(0, 0.1), fixed=st.floats(0, 20))
@settings(max_examples=60)
def test_a_cost_keeps_its_budget(lengths: list[int], squared: float, fixed: float) -> None:
    cost = BatchCost(fixed=fixed, per_token=1.0, per_token_squared=squared)
    limit = (fixed + BUDGET + squared * BUDGET**2) * (1 + 1e-9)
    sampler = TokenBatchSampler(lengths, limit, cost=cost, rank=0, world_size=1)
    for batch in sampler:
        longest = max(lengths[i] for i in batch)
        assert fixed + len(batch) * (longest + squared * longest**2) <= limit * (1 + 1e-9)


@given(lengths=st.lists(st.integers(1, 4 * BUDGET), max_size=60).map(lambda drawn: [1, *drawn]))
@settings(max_examples=60)
def test_samples_over_the_budget_are_dropped_or_alone_as_asked(lengths: list[int]) -> None:
    over = [i for i, length in enumerate(lengths) if length > BUDGET]
    dropping = TokenBatchSampler(lengths, BUDGET, rank=0, world_size=1, oversize="drop")
    assert dropping.stats().dropped == len(over)
    assert sorted(i for batch in dropping for i in batch) == [i for i in range(len(lengths)) if i not in over]
    single = TokenBatchSampler(lengths, BUDGET, rank=0, world_size=1, oversize="single")
    assert single.stats().single == len(over)
    batches = list(single)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= BUDGET


def test_epochs_differ_and_the_same_epoch_does_not() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 500)
    one, other = (of_rank(lengths, 0, 1) for _ in range(2))
    assert list(one) == list(other)
    assert one.epoch == 0
    second = list(one)
    assert one.epoch == 1
    other.set_epoch(1)
    assert second == list(other)
    assert list(of_rank(lengths, 0, 1)) != second
    assert list(of_rank(lengths, 0, 1, seed=1)) != list(of_rank(lengths, 0, 1))


@pytest.mark.parametrize("lengths", [[], [3]])
def test_no_sample_or_one(lengths: list[int]) -> None:
    for ranks in (1, 3):
        samplers = [of_rank(lengths, rank, ranks) for rank in range(ranks)]
        assert {len(sampler) for sampler in samplers} == {len(lengths)}
        stats = samplers[0].stats()
        assert (stats.samples, stats.repeats) == (len(lengths), (ranks - 1) * len(lengths))


@pytest.mark.parametrize(
    ("lengths", "least_fill"), [([8] * 20_000, 0.6), ([100] * 20_000, 0.9), ([256, 3] * 10_000, 0.9)]
)
def test_shuffling_does_not_leave_batches_empty(lengths: list[int], least_fill: float) -> None:
    assert TokenBatchSampler(lengths, 16_384, rank=0, world_size=1).stats().fill >= least_fill


def test_the_waste_target_is_kept_and_pairs_hardly_meet_again() -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(np.rint(rng.lognormal(np.log(180), 0.9, 200_000)), 8, 4096).astype(int)
    stats = TokenBatchSampler(lengths, 16_384, rank=0, world_size=8).stats()
    assert stats.waste <= 0.015
    assert stats.pair_repeat <= 0.04
    assert stats.rank_idle <= 0.02


def test_samples_of_one_length_meet_others_in_the_next_epoch() -> None:
    assert TokenBatchSampler([10] * 1000, 100, rank=0, world_size=1).stats().pair_repeat < 0.2


def test_a_length_asked_for_in_the_loop_changes_nothing() -> None:
    plain, asked = (of_rank(np.arange(1, 60), 0, 1) for _ in range(2))
    epochs = [[list(plain) for _ in range(3)], []]
    for _ in range(3):
        epochs[1].append([batch for batch in asked if len(asked)])
    assert epochs[0] == epochs[1]


def test_an_epoch_that_is_asked_for_again_comes_again() -> None:
    sampler = of_rank(np.arange(1, 60), 0, 1)
    first = list(sampler)
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_a_pass_that_was_broken_off_begins_anew_and_so_does_its_count() -> None:
    sampler = of_rank(np.arange(1, 60), 0, 1)
    for number, _ in enumerate(sampler.track(sampler)):
        if number == 4:
            break
    for _ in sampler.track(sampler):
        break
    assert sampler.state_dict()["segments"] == [[1, 1]]


def test_a_state_can_be_loaded_into_a_sampler_that_was_used() -> None:
    sampler = of_rank(np.arange(1, 60), 0, 1)
    whole = list(sampler)
    again = of_rank(np.arange(1, 60), 0, 1)
    iterator = iter(again.track(again))
    next(iterator)
    sampler.load_state_dict(again.state_dict())
    assert list(sampler) == whole[1:]


def test_the_state_of_a_finished_epoch_goes_on_with_the_next_on_any_ranks() -> None:
    sampler = of_rank(np.arange(1, 60), 0, 8)
    list(sampler.track(sampler))
    for ranks in (8, 4):
        other = of_rank(np.arange(1, 60), 0, ranks)
        other.load_state_dict(sampler.state_dict())
        assert list(other)
        assert other.epoch == 1


@pytest.mark.parametrize("number", [1_000, 4_000, 20_000])
def test_few_samples_are_shuffled_too(number: int) -> None:
    drawn = np.random.default_rng(1).lognormal(np.log(180), 0.9, number)
    lengths = np.clip(drawn, 8, 4096).astype(int)
    stats = TokenBatchSampler(lengths, 16_384, rank=0, world_size=1).stats()
    sorted_ones = TokenBatchSampler(lengths, 16_384, rank=0, world_size=1, waste=0.0).stats()
    assert stats.pair_repeat < 0.25 < sorted_ones.pair_repeat
    assert stats.batches <= 1.5 * sorted_ones.batches
    assert "little shuffling" in str(sorted_ones)


def test_samples_of_one_length_fill_their_batches_and_still_meet_others() -> None:
    stats = TokenBatchSampler([16] * 40_960, 16_384, rank=0, world_size=1).stats()
    assert stats.batches == 40
    assert stats.fill == 1.0
    assert stats.pair_repeat < 0.05


@pytest.mark.parametrize("longest", [50, 4_000])
def test_few_lengths_are_not_cut_small_for_shuffling_that_they_have_by_chance(longest: int) -> None:
    lengths = [10] * 999 + [longest]
    stats = TokenBatchSampler(lengths, 4_000, rank=0, world_size=1).stats()
    assert stats.batches == TokenBatchSampler(lengths, 4_000, rank=0, world_size=1, waste=0.0).stats().batches
    assert stats.pair_repeat < 0.6
