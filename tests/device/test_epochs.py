"""The largest batch of an epoch stands for it where samples differ in length."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

import batchwright as bw
from batchwright.device.epochs import LargestBatches
from batchwright.errors import InvalidInputError

LENGTHS = [8] * 60 + [512] * 2 + [16] * 40
DATA = [torch.zeros(length, 32) for length in LENGTHS]


def padded(samples: list[torch.Tensor]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


def make_workload(**changes: Any) -> bw.Workload:
    options: dict[str, Any] = {
        "model": lambda: nn.Linear(32, 32),
        "data": DATA,
        "collate": padded,
        "loss": lambda model, batch: model(batch).square().mean(),
        **changes,
    }
    return bw.Workload(**options)


def test_it_is_the_largest_of_all_where_all_are_drawn() -> None:
    epoch = LargestBatches(DATA, padded, num_batches=len(DATA) // 4)
    assert max(map(len, epoch.choose(4))) == 512
    assert "largest of 25 random batches" in epoch.tell(4)
    assert [len(sample) for sample in epoch.choose(4)] == [len(sample) for sample in epoch.choose(4)]


def test_more_batches_are_never_smaller_and_draw_nothing_of_the_users() -> None:
    random.seed(3)
    before = random.getstate()
    sizes = [max(map(len, LargestBatches(DATA, padded, number).choose(4))) for number in (1, 5, 25, 100)]
    assert sizes == sorted(sizes)
    assert random.getstate() == before


def test_an_estimate_takes_it_and_says_so() -> None:
    first, largest = (bw.estimate(make_workload(), micro_batch=4, on="cpu", over=over) for over in (None, 25))
    assert largest.peak > 10 * first.peak
    assert any("random batches" in note for note in largest.notes)


def test_without_a_dataset_there_is_nothing_to_draw() -> None:
    workload = make_workload(data=None, collate=None, batch=lambda n: torch.zeros(n, 32))
    with pytest.raises(InvalidInputError, match="draws batches of a dataset"):
        bw.estimate(workload, on="cpu", over=8)
