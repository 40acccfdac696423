"""How many samples a batch has is right or asked for, whatever comes first in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from batchwright.device.batches import clear_num_samples, cut, num_samples
from batchwright.errors import InvalidInputError

X, Y = torch.ones(7, 6), torch.ones(7)


@dataclass
class Both:
    x: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize(
    ("batch", "number"),
    [
        (X, 7),
        ((X, Y), 7),
        ([X, Y], 7),
        ({"scale": torch.tensor(2.0), "x": X, "y": Y}, 7),
        ({"positions": torch.ones(1, 6), "x": X}, 7),
        ({"mask": torch.ones(1, 1, 6, 6), "x": X}, 7),
        ({"names": ["a"] * 7, "x": X}, 7),
        (Both(X, Y), 7),
        ([{"x": torch.ones(9), "y": 1}] * 7, 7),
        ([(torch.ones(9), 1)] * 7, 7),
        ([[X, X], [Y, Y]], 7),
        (pack_sequence([torch.ones(4), torch.ones(3), torch.ones(1)]), 3),
        (torch.nested.nested_tensor([torch.ones(4), torch.ones(3)], layout=torch.jagged), 2),
        (np.ones((7, 2)), 7),
        (["a", "b"], 2),
        ("a", None),
        ({"flag": True}, None),
        (torch.tensor(1.0), None),
        ({}, None),
    ],
    ids=range(19),
)
def test_the_number_is_what_the_parts_agree_on(batch: Any, number: int | None) -> None:
    assert num_samples(batch) == number


AMBIGUOUS = {
    "class weights first": {"weights": torch.ones(5), "x": X, "y": Y},
    "class weights last": {"x": X, "y": Y, "weights": torch.ones(5)},
    "one sample and class weights": {"weights": torch.ones(5), "x": X[:1], "y": Y[:1]},
    "an edge index": {"edge_index": torch.ones(2, 30), "x": X, "y": Y[:3]},
    "a mask that all share": (torch.ones(9, 9), X),
    "time first": (torch.ones(12, 7, 3), Y),
    "images that differ, with targets": ([torch.ones(3, 8, 8)] * 2, [{"boxes": torch.ones(4, 4)}] * 2),
    "sequences that differ": [torch.ones(12), torch.ones(7), torch.ones(9)],
}


@pytest.mark.parametrize("kind", AMBIGUOUS)
def test_parts_that_differ_are_asked_about(kind: str) -> None:
    with pytest.raises(InvalidInputError, match=r"cannot be told: its parts begin with .* and (\n|.)*weight=lambda"):
        num_samples(AMBIGUOUS[kind])
    assert clear_num_samples(AMBIGUOUS[kind]) is None


@pytest.mark.parametrize("kind", ["class weights first", "class weights last", "time first"])
def test_a_size_that_is_known_decides(kind: str) -> None:
    assert num_samples(AMBIGUOUS[kind], expected=7) == 7


def test_what_all_samples_share_goes_to_each_piece() -> None:
    pieces = cut({"weights": torch.arange(5), "x": torch.arange(7)}, [3, 4])
    assert [piece["x"].tolist() for piece in pieces] == [[0, 1, 2], [3, 4, 5, 6]]
    assert all(len(piece["weights"]) == 5 for piece in pieces)


def test_a_batch_without_that_many_samples_cannot_be_cut() -> None:
    with pytest.raises(
        InvalidInputError, match=r"parts of 5 and 7 cannot be cut into 2 \+ 4 samples(\n|.)*split=lambda"
    ):
        cut({"weights": torch.ones(5), "x": X}, [2, 4])
