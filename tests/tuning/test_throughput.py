"""Throughput: sizes take turns, and the time model is that of the passes."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from batchwright.errors import InvalidInputError
from batchwright.tuning.throughput import measure_throughput
from tests.tuning.runs import loss, quick


def slow(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    time.sleep(0.004 + 0.001 * len(batch))
    return loss(model, batch)


def test_the_times_of_a_step_are_found() -> None:
    found = measure_throughput(quick(loss=slow), [2, 8, 16], repeats=3, seconds=0)
    assert [row.micro_batch for row in found.rows] == [2, 8, 16]
    assert found.times.beta == pytest.approx(0.001, rel=0.3)
    assert found.times.alpha == pytest.approx(0.004, rel=0.6)
    assert found.fastest_micro_batch == 16
    assert [row.repeats for row in found.rows] == [3, 3, 3]


def test_sizes_take_turns() -> None:
    seen: list[int] = []

    def watched(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        seen.append(len(batch))
        return loss(model, batch)

    measure_throughput(quick(loss=watched), [4, 2], repeats=2, seconds=0)
    assert seen == [2, 4] * 3


def test_a_live_model_is_left_as_it_was() -> None:
    model = nn.Linear(8, 1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    measure_throughput(quick(model=model), [2], repeats=2, seconds=0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_nothing_to_time_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="no micro-batch"):
        measure_throughput(quick(), [])
