"""What a sampler cannot use is refused, with what was handed in."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import batchwright as bw
from batchwright.errors import InvalidInputError
from batchwright.sampler.cost import BatchCost

if TYPE_CHECKING:
    from pathlib import Path


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
        ({"segments": [[10**9, 1]]}, "ranks is at most 1,048,576"),
        ({"segments": [[1, 10**15]]}, "rounds over 1,000,000,000,000,000 samples or more; there are 3"),
        ({"segments": [[1, 3], [2, 1]]}, "rounds"),
        ({"segments": [[1, 0], [2, 1]]}, "at least one round"),
        ({"segments": [[1, 1], [2, 0]] * 10**6}, "at most 1,000 segments"),
        ({"segments": iter(int, 1)}, "pairs of ranks and rounds"),
        ({"segments": [[1, 1, 1]]}, "pairs of ranks and rounds"),
        ({"segments": "12"}, "pairs of ranks and rounds"),
    ],
)
def test_a_damaged_state_is_refused(change: dict[str, Any], said: str) -> None:
    sampler = bw.TokenBatchSampler([3, 4, 5], 10)
    before = sampler.state_dict()
    with pytest.raises(InvalidInputError, match=said):
        sampler.load_state_dict({**sampler.state_dict(), **change})
    assert sampler.state_dict() == before
    assert sorted(sample for batch in sampler for sample in batch) == [0, 1, 2]
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


def test_workers_that_drew_everything_have_no_state_either() -> None:
    sampler = bw.TokenBatchSampler([3, 4, 5, 6], 6)
    loader: Any = DataLoader([3, 4, 5, 6], batch_sampler=sampler, num_workers=1)  # type: ignore[arg-type]
    assert len(list(loader)) == len(sampler)
    with pytest.raises(InvalidInputError, match="nobody counts"):
        sampler.state_dict()


def test_an_epoch_begun_in_the_middle_of_a_pass_starts_at_its_beginning() -> None:
    sampler = bw.TokenBatchSampler([3, 4, 5, 6], 6)
    going = iter(sampler)
    next(going)
    sampler.set_epoch(1)
    next(going)
    assert sampler.state_dict()["segments"] == [[1, 0]]


def test_numbers_of_numpy_are_plain_in_a_state() -> None:
    place: dict[str, Any] = {"max_tokens": np.int64(10), "rank": np.int64(0), "world_size": np.int64(1)}
    sampler, epoch = bw.TokenBatchSampler([3, 4, 5], **place), np.int64(3)
    sampler.set_epoch(epoch)  # type: ignore[arg-type]
    state = json.loads(json.dumps(sampler.state_dict()))
    other = bw.TokenBatchSampler([3, 4, 5], 10.0, rank=0, world_size=1)
    other.load_state_dict(state)
    assert (other.epoch, other.state_dict()["segments"]) == (3, [[1, 0]])


def test_what_is_left_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="every one costs more"):
        bw.TokenBatchSampler([100, 200], 50, oversize="drop")
    with pytest.raises(InvalidInputError, match="no state"):
        bw.TokenBatchSampler([3], 10).load_state_dict(None)  # type: ignore[arg-type]


def test_a_damaged_file_of_lengths_is_named(tmp_path: Path) -> None:
    file = tmp_path / "lengths.npy"
    file.write_bytes(b"")
    with pytest.raises(InvalidInputError, match=r"lengths\.npy' holds no lengths"):
        bw.TokenBatchSampler(len, 10, dataset=["a", "bc"], remember=file)
    with pytest.raises(InvalidInputError, match="no such folder"):
        bw.TokenBatchSampler(len, 10, dataset=["a", "bc"], remember=tmp_path / "missing" / "lengths.npy")
    with pytest.raises(InvalidInputError, match="these lengths are given"):
        bw.TokenBatchSampler([1, 2], 10, remember=file)


@pytest.mark.parametrize("wrap", [lambda s, loader: s.track(loader), lambda s, loader: Bar(loader)])
def test_an_accumulator_counts_once_whatever_is_around_the_loader(wrap: Any) -> None:
    sampler = bw.TokenBatchSampler([3] * 40, 6)
    model = torch.nn.Linear(1, 1)
    accumulator = bw.Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), accumulation=4)
    loader: Any = DataLoader(torch.ones(40, 1), batch_sampler=sampler)  # type: ignore[arg-type]
    for done, batch in enumerate(accumulator.micro_batches(wrap(sampler, loader)), 1):
        accumulator.backward(model(batch).mean())
        if done == 8:
            break
    assert sampler.state_dict()["segments"] == [[1, 8]]


class Bar:
    """As tqdm's: holds what it shows the progress of."""

    def __init__(self, iterable: Any) -> None:
        self.iterable = iterable

    def __iter__(self) -> Any:
        return iter(self.iterable)


def test_more_ranks_than_any_cluster_has_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="world_size is at most 1,048,576; received 1000000000"):
        bw.TokenBatchSampler([3], 10, rank=0, world_size=10**9)


_numbers = st.one_of(st.integers(-2, 12), st.sampled_from([10**6, 2**20, 10**9, 10**15, 10**30, 2.5, None, "3", True]))
_segments = st.one_of(_numbers, st.lists(st.one_of(_numbers, st.lists(_numbers, max_size=3)), max_size=4))


@settings(max_examples=150)
@given(epoch=_numbers, segments=st.one_of(_segments, st.lists(st.tuples(_numbers, _numbers), max_size=4)))
def test_a_state_of_any_numbers_is_resumed_or_refused_at_once(epoch: Any, segments: Any) -> None:
    sampler = bw.TokenBatchSampler([3, 4, 5, 6, 7, 8], 10, rank=0, world_size=1)
    try:
        sampler.load_state_dict({**sampler.state_dict(), "epoch": epoch, "segments": segments})
    except InvalidInputError:
        assert sampler.epoch == 0
    seen = [sample for batch in sampler for sample in batch]
    assert len(seen) == len(set(seen)) <= 6
