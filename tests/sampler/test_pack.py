"""pack gives the rows of best fit, longest first, placed one by one, with what attention needs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.errors import InvalidInputError
from batchwright.sampler.pack import pack


def one_by_one(lengths: list[int], room: int) -> list[int]:
    """Best fit decreasing as it is written down: the room left in each row, in the end."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [left for left in rooms if left >= length]
        if fitting:
            rooms[rooms.index(min(fitting))] -= length
        else:
            rooms.append(room - length)
    return sorted(rooms)


@given(st.lists(st.integers(1, 50), max_size=80), st.integers(50, 90))
@settings(max_examples=300)
def test_rows_are_those_of_best_fit(lengths: list[int], room: int) -> None:
    rows = pack(lengths, room)
    assert sorted(sample for row in rows for sample in row) == list(range(len(lengths)))
    assert sorted(room - sum(lengths[i] for i in row) for row in rows) == one_by_one(lengths, room)


def test_what_attention_needs() -> None:
    rows = pack([5, 3, 4, 2, 6], 10)
    for index, row in enumerate(rows):
        edges, positions = rows.boundaries(index), rows.position_ids(index)
        assert edges.tolist() == np.concatenate(([0], np.cumsum([[5, 3, 4, 2, 6][i] for i in row]))).tolist()
        assert len(positions) == edges[-1]
        assert all(positions[edge] == 0 for edge in edges[:-1])


def test_many_samples_are_packed_nearly_without_waste() -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(np.rint(rng.lognormal(np.log(180), 0.9, 100_000)), 8, 4096).astype(int)
    assert pack(lengths, 4096).waste < 0.001


def test_nothing_and_too_much() -> None:
    assert len(pack([], 10)) == 0
    with pytest.raises(InvalidInputError, match="sample 1 with 11"):
        pack([3, 11], 10)
    with pytest.raises(IndexError, match="row 1 of 1 row"):
        pack([3], 10)[1]
