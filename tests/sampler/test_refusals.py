"""What a sampler cannot use is refused, with what was handed in."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import batchwright as bw
from batchwright.errors import InvalidInputError
from batchwright.sampler.cost import BatchCost


@pytest.mark.parametrize("given", [None, 5, (n for n in (1, 2)), {"a": 1}, {1, 2}, "12"])
def test_what_holds_no_lengths_is_named(given: Any) -> None:
    with pytest.raises(InvalidInputError, match=f"received {type(given).__name__}"):
        bw.TokenBatchSampler(given, 10)


def test_lengths_of_any_number_format_are_read() -> None:
    assert bw.TokenBatchSampler(torch.tensor([3.0, 4.0], dtype=torch.bfloat16), 10).lengths.tolist() == [[3], [4]]


def test_a_cost_is_a_batch_cost() -> None:
    with pytest.raises(InvalidInputError, match="must be a BatchCost"):
        bw.TokenBatchSampler([3], 10, cost=(1, 2, 3))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"epoch": -1}, "epoch"),
        ({"segments": [[1, -3]]}, "rounds"),
        ({"segments": [[0, 3]]}, "ranks"),
    ],
)
def test_a_damaged_state_is_refused(change: dict[str, Any], said: str) -> None:
    sampler = bw.TokenBatchSampler([3, 4, 5], 10)
    with pytest.raises(InvalidInputError, match=said):
        sampler.load_state_dict({**sampler.state_dict(), **change})
    with pytest.raises(InvalidInputError, match="no epoch, fingerprint, seed, segments"):
        sampler.load_state_dict({})


def test_two_passes_at_once_have_no_state() -> None:
    sampler = bw.TokenBatchSampler([3, 4, 5, 6], 6)
    one, other = iter(sampler), iter(sampler)
    assert [next(one), next(other), next(one)]
    with pytest.raises(InvalidInputError, match="two passes"):
        sampler.state_dict()
    sampler.set_epoch(1)
    assert sampler.state_dict()["epoch"] == 1


def test_from_fit_takes_no_budget_of_ones_own() -> None:
    with pytest.raises(InvalidInputError, match="have no place"):
        bw.TokenBatchSampler.from_fit(None, [3], None, max_tokens=5)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="have no place"):
        bw.TokenBatchSampler.from_fit(None, [3], None, cost=BatchCost())  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="these have two"):
        bw.TokenBatchSampler.from_fit(None, [(3, 4)], None)  # type: ignore[arg-type]


def test_rows_can_be_far_longer_than_all_samples() -> None:
    rows = bw.pack([1] * 1000 + [7], max_tokens=10**12)
    assert len(rows) == 1
    assert rows[0:5] == [rows[0]]
    assert rows.to_dict()["rows"] == [rows[0]]
    assert rows == rows
    assert repr(rows).startswith("Packing(1,001 samples in 1 row of 1,000,000,000,000 tokens")


def test_a_sampler_says_what_it_is() -> None:
    sampler = bw.TokenBatchSampler([3, 4, 5], 10, rank=1, world_size=2)
    assert repr(sampler) == "TokenBatchSampler(3 samples, batches of at most 10, rank 1 of 2, epoch 0)"


def test_batches_off_the_multiple_are_counted() -> None:
    stats = bw.TokenBatchSampler([5] * 21, 40, multiple_of=4).stats()
    assert stats.off_multiple == 1
