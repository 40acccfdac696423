"""Divisors: all of them, none too many, and fast for any batch that somebody may ask for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.planning.split import divisors, largest_divisor


@settings(max_examples=200)
@given(st.integers(1, 5000), st.integers(1, 6000))
def test_divisors_are_what_trying_every_size_finds(number: int, at_most: int) -> None:
    every = [size for size in range(1, at_most + 1) if number % size == 0]
    assert divisors(number, at_most=at_most) == every
    assert largest_divisor(number, at_most=at_most) == every[-1]


@settings(max_examples=200)
@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_divisors_of_a_large_number_pair_up(one: int, other: int) -> None:
    number = one * other
    listed = divisors(number, at_most=number)
    assert {1, one, other, number} <= set(listed)
    assert [number // size for size in reversed(listed)] == listed
    assert all(number % size == 0 for size in listed)


@pytest.mark.parametrize(
    ("number", "count"),
    # A prime, the most divisors of any number below 10^12, a square of a prime, a power.
    [(999_999_999_989, 2), (963_761_198_400, 6720), (999_983**2, 3), (2**39, 40)],
)
def test_the_number_of_divisors_is_the_known_one(number: int, count: int) -> None:
    assert len(divisors(number, at_most=number)) == count


@pytest.mark.parametrize(
    ("number", "at_most", "largest"),
    [
        (2 * 1_000_003, 1_000_002, 2),
        (999_983 * 1_000_003, 1_000_002, 999_983),
        (999_999_999_989, 999_999_999_988, 1),
        (10**15 - 11, 8192, 1),
        (10**12, 10**12, 10**12),
    ],
)
def test_a_divisor_far_below_the_cap_is_found(number: int, at_most: int, largest: int) -> None:
    assert largest_divisor(number, at_most=at_most) == largest
