"""BatchRamp acts on the lower end of the interval, slowly, within its cap, and says why."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import torch
from torch import nn

from batchwright.accumulate.accumulator import Accumulator
from batchwright.errors import InvalidInputError
from batchwright.noise.noise_scale import NoiseScale
from batchwright.noise.ramp import BatchRamp

WIDTH = 40


def run(
    ramp_of: Any, *, noise_size: float = 1.0, steps: int = 400, optimizer: Any = torch.optim.SGD, **options: Any
) -> tuple[BatchRamp, Accumulator]:
    """Train at a rate so small that the noise scale stands still: about WIDTH at noise 0, far more with noise."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(WIDTH, 1)
    nn.init.zeros_(model.weight)
    accumulator = Accumulator(model, optimizer(model.parameters(), lr=1e-9), 2, **options)
    ramp = ramp_of(NoiseScale(accumulator, window=100 * 8))
    while accumulator.number < steps:
        batch = torch.randn(4, WIDTH, generator=generator)
        target = batch.sum(1) + noise_size * torch.randn(4, generator=generator)
        step = accumulator.backward((model(batch).squeeze(1) - target).square().mean(), weight=4, samples=4)
        if step is not None:
            ramp.update(step)
    return ramp, accumulator


def test_it_raises_accumulation_as_far_as_the_lower_end_allows_and_no_further() -> None:
    ramp, accumulator = run(lambda noise: BatchRamp(noise, max_accumulation=64))
    # The truth is about 42: twice a batch of 8 or 16, but not of 32.
    assert [decision.accumulation for decision in ramp.decisions] in ([4, 8], [4])
    assert accumulator.accumulation == ramp.decisions[-1].accumulation
    for decision in ramp.decisions:
        assert decision.critical_batch.low >= 2 * decision.batch_before


def test_the_cap_holds_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="batchwright"):
        _, accumulator = run(lambda noise: BatchRamp(noise, max_accumulation=4), noise_size=5.0, steps=800)
    assert accumulator.accumulation == 4
    assert sum("at its cap" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(("fixed", "largest"), [(0.0, 8), (100.0, 32)])
def test_with_step_times_it_follows_the_soonest_batch(fixed: float, largest: int) -> None:
    # Samples alone cost time: the smallest batch is soonest. A step costs 100 samples more: far larger ones are.
    times = {size: fixed + size for size in (8, 64)}
    ramp, accumulator = run(lambda noise: BatchRamp(noise, max_accumulation=8, step_times=times), steps=500)
    assert accumulator.accumulation * 4 == largest
    assert bool(ramp.decisions) == (largest > 8)
    assert all("times as far in the same time" in decision.reason for decision in ramp.decisions)


def test_it_does_nothing_where_the_batch_is_large_enough() -> None:
    ramp, _ = run(lambda noise: BatchRamp(noise, max_accumulation=64), noise_size=0.0, steps=60)
    assert ramp.decisions == []


def test_the_learning_rate_and_the_schedule_follow() -> None:
    parameters = [nn.Parameter(torch.zeros(1))]
    for adjusts, least in ((True, 1.2), (False, 1.0)):
        schedules: list[Any] = []

        def made(params: Any, lr: float, schedules: list[Any] = schedules) -> Any:
            optimizer = torch.optim.SGD(params, lr=lr)
            schedules.append(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0))
            return optimizer

        def ramp_of(noise: NoiseScale, adjusts: bool = adjusts, schedules: list[Any] = schedules) -> BatchRamp:
            assert noise.accumulator is not None
            noise.accumulator.schedulers = schedules
            return BatchRamp(noise, max_accumulation=4, adjust_learning_rate=adjusts)

        ramp, accumulator = run(ramp_of, optimizer=made, steps=200)
        factor = ramp.decisions[0].learning_rate_factor
        assert factor >= least
        assert accumulator.optimizer.param_groups[0]["lr"] == pytest.approx(1e-9 * factor)
        assert schedules[0].base_lrs == pytest.approx([1e-9 * factor])
    assert parameters


def test_every_decision_has_its_reason() -> None:
    ramp, _ = run(lambda noise: BatchRamp(noise, max_accumulation=4), steps=200)
    assert "twice the 8 in use" in ramp.decisions[0].reason
    assert "gamma" in ramp.decisions[0].reason
    assert json.dumps(ramp.decisions[0].to_dict())


def test_a_ramp_goes_on_where_it_stood() -> None:
    ramp, _ = run(lambda noise: BatchRamp(noise, max_accumulation=4), steps=200)
    state = json.loads(json.dumps(ramp.state_dict()))
    model = nn.Linear(WIDTH, 1)
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=1.0), 2)
    again = BatchRamp(NoiseScale(accumulator), max_accumulation=4)
    again.load_state_dict(state)
    assert accumulator.accumulation == 4
    assert again.decisions == ramp.decisions


def test_it_needs_an_accumulator_with_a_plain_number() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(InvalidInputError, match="a loop of its own"):
        BatchRamp(NoiseScale(model, optimizer=optimizer, micro_batch=2), max_accumulation=4)
    with pytest.raises(InvalidInputError, match="sets the accumulation itself"):
        BatchRamp(NoiseScale(Accumulator(model, optimizer, lambda step: 2)), max_accumulation=4)


def test_it_stops_where_an_epoch_has_no_more_micro_batches() -> None:
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(WIDTH, 1)
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=1e-9), 2)
    ramp = BatchRamp(NoiseScale(accumulator, window=400), max_accumulation=1024)
    for _ in range(400):
        epoch = [torch.randn(4, WIDTH, generator=generator) for _ in range(3)]
        for batch in accumulator.micro_batches(epoch):
            noise = 30 * torch.randn(4, generator=generator)
            step = accumulator.backward((model(batch).squeeze(1) - batch.sum(1) - noise).square().mean())
            if step is not None:
                ramp.update(step)
    assert len(ramp.decisions) == 1
    assert accumulator.optimizer.param_groups[0]["lr"] < 3e-9
