"""Batches dealt to ranks: as many for each, split as few as can be, repeated only where samples are short."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import batchwright as bw
from batchwright.sampler.rounds import deal


@given(st.lists(st.integers(1, 6), min_size=1, max_size=40), st.integers(1, 12), st.integers(0, 5))
def test_samples_are_repeated_only_where_there_are_fewer_than_places(sizes: list[int], ranks: int, seed: int) -> None:
    stops = np.cumsum(sizes)
    found = deal(stops - sizes, stops, np.array(sizes, float), ranks=ranks, rng=np.random.default_rng(seed))
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
        planned = bw.TokenBatchSampler(lengths, 2_000, rank=0, world_size=8, seed=seed).planned
        cheapest = planned.costs.sum(axis=1).argmin()
        pieces.append(planned.longest[cheapest].mean())
        places.append(cheapest / planned.rounds.number)
    assert np.mean(pieces) > 80
    assert min(places) < 0.5 < max(places)
