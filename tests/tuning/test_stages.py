"""Throughput: sizes take turns, and the time model is that of the passes."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from batchwright.errors import InvalidInputError
from batchwright.tuning.stages import measure_throughput
from tests.tuning.runs import loss, quick


class Clock:
    """A clock that only the loss and the update move."""

    def __init__(self) -> None:
        self.now = 0.0

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        self.now += 0.004 + 0.001 * len(batch)
        return loss(model, batch)


def test_the_times_of_a_step_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            clock.now += 0.002

    workload = quick(loss=clock.loss, optimizer=lambda params: Slow(params, lr=0.1))
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    found = measure_throughput(workload, [2, 8, 16], repeats=3, seconds=0)
    assert [row.micro_batch for row in found.rows] == [2, 8, 16]
    times = found.times
    assert (times.alpha, times.beta, times.sigma) == pytest.approx((0.004, 0.001, 0.002), rel=1e-6)
    assert found.fastest_micro_batch == 16
    assert [row.repeats for row in found.rows] == [3, 3, 3]
    assert found.notes == ()


def test_a_noisy_clock_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, turns = Clock(), iter(range(100))

    def uneven(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        clock.now += 1.0 if next(turns) % 2 else 2.0
        return loss(model, batch)

    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    found = measure_throughput(quick(loss=uneven), [2], repeats=8, seconds=0)
    assert "the machine was busy" in found.notes[0]


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


def test_a_size_that_is_too_small_for_batch_normalization_is_left_out() -> None:
    normalized = quick(model=lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    found = measure_throughput(normalized, [1, 2, 4], repeats=2, seconds=0)
    assert [row.micro_batch for row in found.rows] == [2, 4]
    assert found.notes[0] == "micro-batch 1 is too small for batch normalization, and was not timed"
    with pytest.raises(InvalidInputError, match=r"^micro-batch 1 has micro-batches that are too small"):
        measure_throughput(normalized, [1], repeats=2, seconds=0)
