from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batchwright.fitting.search import Curve
from tests.oracle.largest_size import largest_size

pieces = st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**7)), min_size=1, max_size=4)


@given(pieces, st.lists(st.integers(0, 10**10), min_size=1, max_size=4), st.integers(1, 2000))
def test_the_crossing_of_a_maximum_of_lines_is_right_to_one_size(
    pieces: list[tuple[int, int]], limits: list[int], cap: int
) -> None:
    def peak(n: int) -> int:
        return max(fixed + per_sample * n for fixed, per_sample in pieces)

    curve = Curve(peak, cap=cap)
    for limit in limits:
        found = curve.largest_within(limit)
        truth = largest_size(lambda n, limit=limit: peak(n) <= limit, cap)  # type: ignore[misc]
        # A look that is on the line by the tolerance leaves the crossing open by as much.
        slack = max(1, round(2 * limit / 8192 / max(peak(truth + 1) - peak(truth), 1)) + 1)
        assert abs(found - truth) <= slack


def test_a_second_limit_near_the_first_costs_no_look() -> None:
    looks: list[int] = []

    def peak(n: int) -> int:
        looks.append(n)
        return 10**9 + 10**6 * n

    curve = Curve(peak, cap=2**20)
    curve.largest_within(2 * 10**9)
    before = len(looks)
    assert curve.largest_within(19 * 10**8) == 900
    assert len(looks) == before <= 5
