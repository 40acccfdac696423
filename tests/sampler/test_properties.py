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
@settings(max_examples=150, deadline=None)
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
@settings(max_examples=100, deadline=None)
def test_a_resumed_run_is_the_unbroken_one(lengths: list[int], data: Any, options: dict[str, Any]) -> None:
    ranks = data.draw(st.integers(1, 4))
    rank = data.draw(st.integers(0, ranks - 1))
    whole = list(of_rank(lengths, rank, ranks, **options))
    cut = data.draw(st.integers(0, len(whole)))
    first = of_rank(lengths, rank, ranks, **options)
    iterator = iter(first)
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
@settings(max_examples=100, deadline=None)
def test_ranks_may_change_on_the_way_and_no_sample_is_lost_or_repeated(
    lengths: list[int], data: Any, options: dict[str, Any]
) -> None:
    seen: list[int] = []
    state: dict[str, Any] | None = None
    plan = data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=3))
    for number, ranks in enumerate([*plan, data.draw(st.integers(1, 8))]):
        samplers = [of_rank(lengths, rank, ranks, **options) for rank in range(ranks)]
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(state)
        left = len(samplers[0]) if samplers[0].epoch == 0 else 0
        if samplers[0].epoch:
            break
        rounds = left if number == len(plan) else data.draw(st.integers(0, left))
        for sampler in samplers:
            iterator = iter(sampler)
            for index in range(rounds):
                batch = next(iterator)
                if sampler.counts(index):
                    seen += batch
        state = samplers[0].state_dict()
    assert sorted(seen) == list(range(len(lengths)))


@given(lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), max_size=80), ranks=st.integers(1, 4))
@settings(max_examples=80, deadline=None)
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
@settings(max_examples=60, deadline=None)
def test_a_cost_keeps_its_budget(lengths: list[int], squared: float, fixed: float) -> None:
    cost = BatchCost(fixed=fixed, per_token=1.0, per_token_squared=squared)
    limit = fixed + BUDGET + squared * BUDGET**2
    sampler = TokenBatchSampler(lengths, limit, cost=cost, rank=0, world_size=1)
    for batch in sampler:
        longest = max(lengths[i] for i in batch)
        assert fixed + len(batch) * (longest + squared * longest**2) <= limit * (1 + 1e-9)


@given(lengths=st.lists(st.integers(1, 4 * BUDGET), min_size=1, max_size=60))
@settings(max_examples=60, deadline=None)
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
