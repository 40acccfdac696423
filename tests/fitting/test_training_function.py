"""The sizes that a decorated function may be called at, and the search among them."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.fitting.find_batch_size import Sizes, _well_divisible, by_doubling_among
from batchwright.fitting.run_search import Cap, Cause
from batchwright.planning.search import Seen
from batchwright.planning.split import divisors


def tried_sizes(sizes: Sizes, *, start: int, room: int) -> list[int]:
    """Drive the search with a function that fits up to a size."""
    search = by_doubling_among(sizes.allowed, cap=sizes.cap.size, start=start)
    tried = [next(search)]
    while True:
        try:
            tried.append(search.send(Seen(tried[-1], fits=tried[-1] <= room)))
        except StopIteration:
            return tried


@settings(max_examples=200)
@given(st.integers(1, 5000), st.integers(1, 6000), st.integers(1, 6000), st.integers(0, 6000))
def test_the_search_ends_at_the_largest_divisor_that_fits(effective: int, cap: int, start: int, room: int) -> None:
    sizes = Sizes.within(Cap(cap, Cause.LIMIT), effective=effective)
    tried = tried_sizes(sizes, start=start, room=room)
    allowed = [size for size in range(1, min(cap, effective) + 1) if effective % size == 0]
    assert set(tried) <= set(allowed)
    assert len(set(tried)) == len(tried)
    fitting = [size for size in allowed if size <= room]
    # The answer and its neighbour have both been tried: nothing is left open.
    assert set(allowed[max(0, len(fitting) - 1) : len(fitting) + 1]) <= set(tried)


@settings(max_examples=200)
@given(st.integers(1, 10**12), st.integers(1, 10**12))
def test_the_search_stays_short_for_huge_batches(effective: int, room: int) -> None:
    sizes = Sizes.within(Cap(10**12, Cause.LIMIT), effective=effective)
    assert len(tried_sizes(sizes, start=128, room=room)) <= 40


@settings(max_examples=200)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 300))
def test_without_an_effective_batch_every_size_counts(cap: int, start: int, room: int) -> None:
    sizes = Sizes.within(Cap(cap, Cause.LIMIT), effective=None)
    tried = tried_sizes(sizes, start=start, room=room)
    assert len(set(tried)) == len(tried)
    assert {size for size in (room, room + 1) if 1 <= size <= cap} <= set(tried)


@settings(max_examples=200)
@given(st.integers(1, 10**9))
def test_the_neighbour_that_is_named_has_a_divisor_within_a_factor_of_two_of_any_size(effective: int) -> None:
    neighbour = _well_divisible(effective)
    assert all(above <= 2 * size for size, above in pairwise(divisors(neighbour, at_most=neighbour)))
    assert (neighbour - effective) ** 2 <= effective
