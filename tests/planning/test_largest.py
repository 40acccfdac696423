"""The largest size within a budget, against counting, and in how few looks it is found."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.planning.search import Curve, largest_that_fits, largest_within
from tests.oracle.largest_size import largest_size

pieces = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 200)), min_size=1, max_size=6)


class Looks:
    """A peak that is the largest of affine pieces, and the sizes it was asked for."""

    def __init__(self, pieces: list[tuple[int, int]]) -> None:
        self.pieces = pieces
        self.sizes: list[int] = []

    def __call__(self, size: int) -> int:
        self.sizes.append(size)
        return self.value(size)

    def value(self, size: int) -> int:
        return max(start + rise * size for start, rise in self.pieces)


@settings(max_examples=400)
@given(pieces=pieces, limit=st.integers(0, 20_000), cap=st.integers(1, 300))
def test_it_agrees_with_counting(pieces: list[tuple[int, int]], limit: int, cap: int) -> None:
    peak = Looks(pieces)
    fitting = [size for size in range(1, cap + 1) if peak.value(size) <= limit]
    assert largest_within(peak, limit, cap=cap) == max(fitting, default=None)
    assert len(peak.sizes) == len(set(peak.sizes)), "no size is looked at twice"


@settings(max_examples=200)
@given(rises=st.lists(st.integers(0, 50), min_size=1, max_size=200), limit=st.integers(0, 3000))
def test_a_peak_that_is_not_convex_is_still_answered_rightly(rises: list[int], limit: int) -> None:
    values = [sum(rises[:end]) for end in range(1, len(rises) + 1)]
    fitting = [size for size, value in enumerate(values, 1) if value <= limit]
    assert largest_within(lambda size: values[size - 1], limit, cap=len(values)) == max(fitting, default=None)


@settings(max_examples=400)
@given(pieces=pieces, limit=st.integers(0, 20_000))
def test_the_answer_and_the_size_after_it_were_looked_at(pieces: list[tuple[int, int]], limit: int) -> None:
    peak = Looks(pieces)
    answer = largest_within(peak, limit, cap=2**20)
    if answer is not None:
        assert answer in peak.sizes
        assert answer == 2**20 or answer + 1 in peak.sizes


def test_a_flat_start_and_one_slope_take_8_looks_at_most_and_5_on_average() -> None:
    draw = random.Random(0)
    looks: list[int] = []
    while len(looks) < 1000:
        flat, start, rise = (draw.randint(0, 2**33), draw.randint(0, 2**33), draw.randint(2**12, 2**30))
        peak = Looks([(flat, 0), (start, rise)])
        answer = largest_within(peak, int(draw.uniform(1.1, 20) * peak.value(1)), cap=2**20)
        assert answer is not None
        if answer <= 4096:
            looks.append(len(peak.sizes))
    assert max(looks) <= 8
    assert sum(looks) / len(looks) < 5


@settings(max_examples=400)
@given(
    pieces=st.lists(st.tuples(st.integers(0, 2**33), st.integers(0, 2**28)), min_size=1, max_size=6),
    limit=st.integers(0, 2**36),
)
def test_any_pieces_take_few_looks(pieces: list[tuple[int, int]], limit: int) -> None:
    peak = Looks(pieces)
    largest_within(peak, limit, cap=2**20)
    assert len(peak.sizes) <= 16


def test_a_straight_line_takes_four_looks() -> None:
    peak = Looks([(1000, 7)])
    assert largest_within(peak, 100_000, cap=2**20) == 14_142
    assert peak.sizes == [1, 16, 14_142, 14_143]


def test_nothing_fits_after_one_look() -> None:
    peak = Looks([(1000, 7)])
    assert largest_within(peak, 1006, cap=2**20) is None
    assert peak.sizes == [1]


def test_where_all_fit_the_cap_is_the_answer() -> None:
    assert largest_within(Looks([(1000, 0)]), 1000, cap=777) == 777
    assert largest_within(Looks([(1000, 0)]), 1000, cap=1) == 1


wide_pieces = st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**7)), min_size=1, max_size=4)


@given(wide_pieces, st.lists(st.integers(0, 10**10), min_size=1, max_size=4), st.integers(1, 2000))
def test_the_crossing_of_a_maximum_of_lines_is_right_to_one_size(
    pieces: list[tuple[int, int]], limits: list[int], cap: int
) -> None:
    def peak(n: int) -> int:
        return max(fixed + per_sample * n for fixed, per_sample in pieces)

    curve = Curve(peak, cap=cap)
    for limit in limits:
        answer = curve.roughly_within(limit)
        truth = largest_size(lambda n, limit=limit: peak(n) <= limit, cap)  # type: ignore[misc]
        # A look that is on the line by the tolerance leaves the crossing open by as much.
        slack = max(1, round(2 * limit / 8192 / max(peak(truth + 1) - peak(truth), 1)) + 1)
        assert abs(answer - truth) <= slack


def test_a_second_limit_near_the_first_costs_no_look() -> None:
    looks: list[int] = []

    def peak(n: int) -> int:
        looks.append(n)
        return 10**9 + 10**6 * n

    curve = Curve(peak, cap=2**20)
    curve.roughly_within(2 * 10**9)
    before = len(looks)
    assert curve.roughly_within(19 * 10**8) == 900
    assert len(looks) == before <= 5


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 60))
def test_yes_or_no_alone_is_enough_just_above_a_size_that_fits(above: int, more: int, room: int) -> None:
    cap = above + room
    looks: list[int] = []

    def fits(size: int) -> bool:
        looks.append(size)
        return size <= above + more

    assert largest_that_fits(fits, above=above, cap=cap) == min(above + more, cap)
    assert len(looks) == len(set(looks)), "no size is looked at twice"
