"""Batches dealt to ranks: as many for each, split as few as can be, repeated only where samples are short."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import batchwright as bw
from batchwright.sampler.cost import Budget
from batchwright.sampler.epoch_plan import CutOrder, deal


@given(st.lists(st.integers(1, 6), min_size=1, max_size=40), st.integers(1, 12), st.integers(0, 5))
def test_samples_are_repeated_only_where_there_are_fewer_than_places(sizes: list[int], ranks: int, seed: int) -> None:
    stops = np.cumsum(np.array(sizes, np.int64))
    lengths = np.ones(sum(sizes), np.int64)
    cut = CutOrder(np.arange(sum(sizes)), stops - np.array(sizes, np.int64), np.ones(len(sizes), np.int64), lengths)
    found = deal(cut, Budget(6), ranks=ranks, rng=np.random.default_rng(seed))
    places = -(-len(sizes) // ranks) * ranks
    assert found.starts.shape == (places // ranks, ranks)
    assert found.num_repeats == max(places - sum(sizes), 0)
    taken = [
        sample
        for index in range(found.number)
        for rank in range(ranks)
        if not found.is_repeat(index, rank)
        for sample in range(found.starts[index, rank], found.stops[index, rank])
    ]
    assert sorted(taken) == list(range(sum(sizes)))
    assert (found.stops > found.starts).all()


def test_the_pieces_are_not_always_the_shortest_samples_nor_the_last_round() -> None:
    lengths = np.random.default_rng(0).integers(10, 200, 3_000)
    pieces, places = [], []
    for seed in range(20):
        # In one window: the ends of several would be cheap rounds too.
        planned = bw.TokenBatchSampler(lengths, 2_000, rank=0, world_size=8, seed=seed, waste=0.015).planned
        cheapest = planned.costs.sum(axis=1).argmin()
        pieces.append(planned.longest[cheapest].mean())
        places.append(cheapest / planned.rounds.number)
    assert np.mean(pieces) > 80
    assert min(places) < 0.5 < max(places)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=400), st.integers(1, 6), st.floats(0, 0.4))
def test_every_epoch_has_as_many_rounds(lengths: list[int], ranks: int, waste: float) -> None:
    sampler = bw.TokenBatchSampler(lengths, 120, rank=0, world_size=ranks, waste=waste)
    numbers = set()
    for epoch in range(6):
        sampler.set_epoch(epoch)
        numbers.add(len(sampler))
        assert len(list(sampler)) == len(sampler)
    assert len(numbers) == 1


def test_a_sample_too_many_does_not_unbalance_the_ranks() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(180), 0.9, 7_999), 8, 4096).astype(int)
    assert bw.TokenBatchSampler(lengths, rank=0, world_size=8, max_samples=1).stats().rank_idle < 0.01


def test_pieces_are_of_like_cost() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(180), 0.9, 130), 8, 4096).astype(int)
    assert bw.TokenBatchSampler(lengths, rank=0, world_size=8, waste=0.015).stats().rank_idle < 0.5


def test_a_rare_long_second_length_does_not_empty_the_other_batches() -> None:
    rng = np.random.default_rng(0)
    second = np.where(rng.random(20_000) < 0.001, 4_000, 50)
    stats = bw.TokenBatchSampler(np.stack([rng.integers(100, 200, 20_000), second], axis=1), 16_384).stats()
    assert stats.waste < 0.05
    assert stats.fill > 0.9
