"""Bounds by kind: close where all is weights, wide where kernels decide, missing where nothing is known."""

from __future__ import annotations

import pytest

import batchwright as bw
from batchwright.catalogue.cards import Context
from batchwright.memory.upper_bound import upper_on_card
from batchwright.units import PeakBytes

CONTEXT = Context(500, 400, 700)
PEAKS = PeakBytes(10_000, 12_000, 12_500)


def test_what_is_known_to_the_byte_adds_nothing_to_the_allocated_bound() -> None:
    assert upper_on_card(PEAKS, CONTEXT, uncertain=0).allocated == PEAKS.allocated


def test_the_bound_grows_with_what_kernels_decide_and_covers_the_largest_workspace() -> None:
    few, many = (upper_on_card(PEAKS, CONTEXT, uncertain=size).allocated or 0 for size in (1_000, 9_000))
    assert 10_000 < few < many
    assert upper_on_card(PEAKS, CONTEXT, uncertain=1_000, unsure=8_000).allocated == 18_000


@pytest.mark.parametrize("uncertain", [0, 5_000, 10_000])
def test_kinds_stay_in_order(uncertain: int) -> None:
    upper = upper_on_card(PEAKS, CONTEXT, uncertain=uncertain)
    assert (upper.allocated or 0) <= (upper.reserved or 0)
    assert upper.device == (upper.reserved or 0) + CONTEXT.high_bytes


def test_a_formula_has_no_bound_and_says_so() -> None:
    answer = bw.estimate_named("gpt2", micro_batch=1, seq_len=128)
    assert answer.upper_bytes == PeakBytes()
    assert "so no bound" in " ".join(answer.notes)
    assert "without a bound" in str(answer)
