"""A batch of any form: its tensors are found, moved and counted against the size asked for."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from transformers import BatchEncoding

from batchwright.device.batches import check_size, make_batch, move_batch, tensors_in
from batchwright.errors import InvalidInputError
from batchwright.state.untouched import thrown_away
from tests.device.workloads import make_linear

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _nothing_to_give_back() -> Iterator[None]:
    with thrown_away():
        yield


META = torch.device("meta")
CPU = torch.device("cpu")


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    name: str


FORMS: list[Any] = [
    torch.ones(3, 2),
    [torch.ones(3, 2)],
    (torch.ones(3, 2), torch.ones(3)),
    {"x": torch.ones(3, 2), "deep": [{"y": torch.ones(3)}]},
    Pair(torch.ones(3, 2), torch.ones(3)),
    Sample(torch.ones(3, 2), "a"),
    UserDict({"x": torch.ones(3, 2)}),
    BatchEncoding({"input_ids": torch.ones(3, 2), "attention_mask": torch.ones(3, 2)}),
]


@pytest.mark.parametrize("batch", FORMS, ids=[type(form).__name__ for form in FORMS])
def test_every_form_is_moved_and_the_users_own_stays(batch: Any) -> None:
    moved = move_batch(batch, META)
    assert type(moved) is type(batch)
    assert [t.device for t in tensors_in(moved)] == [META for _ in tensors_in(batch)]
    assert all(t.device == CPU for t in tensors_in(batch))
    assert len(list(tensors_in(batch))) > 0


@pytest.mark.parametrize("batch", FORMS, ids=[type(form).__name__ for form in FORMS])
def test_every_form_is_checked_against_the_size(batch: Any) -> None:
    check_size(batch, 3)
    with pytest.raises(InvalidInputError, match="ignores its size: asked for 5 samples, received tensors of 3"):
        check_size(batch, 5)


def test_packed_sequence_keeps_its_lengths_on_the_cpu() -> None:
    packed = pack_padded_sequence(torch.ones(2, 4, 3), torch.tensor([4, 2]), batch_first=True)
    moved = move_batch({"x": packed}, META)["x"]
    assert isinstance(moved, PackedSequence)
    assert moved.data.device == META
    assert moved.batch_sizes.device == CPU


@pytest.mark.parametrize(
    "batch",
    [
        {"x": torch.ones(3, 2), "positions": torch.ones(1, 2), "scale": torch.tensor(2.0)},
        {"images": torch.ones(7, 2), "targets": [{"boxes": torch.ones(2, 4)} for _ in range(3)]},
        [torch.ones(5), torch.ones(7), torch.ones(9)],
        ["one", "two", "three"],
        "an object of the user's own",
    ],
)
def test_what_a_batch_of_three_may_look_like(batch: Any) -> None:
    check_size(batch, 3)


def test_list_of_texts_of_the_wrong_length() -> None:
    with pytest.raises(InvalidInputError, match="ignores its size"):
        check_size(["one", "two"], 3)


def test_own_split_means_own_sizes() -> None:
    graph = {"nodes": torch.ones(17, 4), "edges": torch.ones(2, 60)}
    workload = make_linear(batch=lambda n: graph, split=lambda batch, sizes: [batch])
    assert make_batch(workload, 3, {}, CPU)["nodes"] is graph["nodes"]


class TestFromData:
    def test_the_first_samples_are_collated(self) -> None:
        data = [(torch.full((8,), float(i)), i) for i in range(10)]
        inputs, labels = make_batch(make_linear(batch=None, data=data), 3, {}, CPU)
        assert inputs.shape == (3, 8)
        assert labels.tolist() == [0, 1, 2]

    def test_own_collate(self) -> None:
        workload = make_linear(batch=None, data=list(range(10)), collate=lambda samples: torch.tensor(samples))
        assert make_batch(workload, 2, {}, CPU).tolist() == [0, 1]

    def test_more_than_there_is(self) -> None:
        workload = make_linear(batch=None, data=[torch.ones(8)] * 3)
        with pytest.raises(InvalidInputError, match="asked for 4 samples, but data= holds 3 samples"):
            make_batch(workload, 4, {}, CPU)

    def test_a_shape_cannot_be_asked_of_data(self) -> None:
        with pytest.raises(InvalidInputError, match=r"a shape \(seq_len\) was asked for"):
            make_batch(make_linear(batch=None, data=[torch.ones(8)]), 1, {"seq_len": 4}, CPU)
