"""The plan's batch sampler in a real DataLoader."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import batchwright as bw
from batchwright.errors import InvalidInputError


@settings(max_examples=200)
@given(
    effective=st.integers(1, 60),
    cap=st.integers(1, 9),
    devices=st.integers(1, 4),
    samples=st.integers(1, 200),
    policy=st.sampled_from(["nearest", "exact"]),
    drop_last=st.booleans(),
)
def test_every_sample_once_and_ranks_in_step(
    effective: int, cap: int, devices: int, samples: int, policy: str, drop_last: bool
) -> None:
    if effective < devices:
        return
    plan = bw.plan(effective, micro_batch=cap, devices=devices, samples=samples, policy=policy, drop_last=drop_last)
    samplers = [plan.batch_sampler(rank, seed=3) for rank in range(devices)]
    batches = [list(sampler) for sampler in samplers]
    weights = [list(sampler.weights()) for sampler in samplers]
    assert {len(b) for b in batches} == {len(sampler) for sampler in samplers}
    assert len(samplers[0]) == plan.forwards_per_epoch
    assert len(list(samplers[0].windows())) == plan.updates_per_epoch
    seen = [i for b, w in zip(batches, weights, strict=True) for n, x in zip(b, w, strict=True) if x > 0 for i in n]
    expected = samples - plan.to_dict()["dropped_samples"]
    assert drop_last or expected == samples
    assert len(seen) == len(set(seen)) == expected
    assert all(len(batch) <= cap for b in batches for batch in b)
    streams = [iter(w) for w in weights]
    for window in samplers[0].windows():
        assert sum(sum(islice(stream, window.accumulation)) for stream in streams) == pytest.approx(1)


def test_an_exact_plan_trains_like_the_whole_batch_at_once() -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(47, 5, dtype=torch.float64), torch.randn(47, 1, dtype=torch.float64))
    plan = bw.plan(10, micro_batch=4, policy="exact", samples=len(data))
    sampler = plan.batch_sampler(seed=1)
    split_up, at_once = (torch.nn.Linear(5, 1, dtype=torch.float64) for _ in range(2))
    at_once.load_state_dict(split_up.state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (split_up, at_once)]
    batches = zip(DataLoader(data, batch_sampler=sampler, num_workers=2), sampler.weights(), strict=True)
    for window in sampler.windows():
        whole = []
        for (inputs, targets), weight in islice(batches, window.accumulation):
            (torch.nn.functional.mse_loss(split_up(inputs), targets) * weight).backward()
            whole.append((inputs, targets))
        inputs, targets = (torch.cat(parts) for parts in zip(*whole, strict=True))
        torch.nn.functional.mse_loss(at_once(inputs), targets).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(split_up.parameters(), at_once.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_order_depends_on_seed_and_epoch_alone() -> None:
    plan = bw.plan(8, micro_batch=4, samples=64)
    first, again = plan.batch_sampler(seed=5), plan.batch_sampler(seed=5)
    assert list(first) == list(again)
    again.set_epoch(1)
    assert list(first) != list(again)


def test_an_empty_micro_batch_repeats_a_sample_at_weight_zero() -> None:
    sampler = bw.plan(5, micro_batch=1, devices=4, policy="exact").batch_sampler(1, samples=5, shuffle=False)
    assert list(zip(sampler, sampler.weights(), strict=True)) == [([0], 0.0), ([2], 0.2)]


def test_a_sampler_needs_samples_and_an_existing_rank() -> None:
    plan = bw.plan(8, micro_batch=4, devices=2)
    with pytest.raises(InvalidInputError, match="number of samples"):
        plan.batch_sampler(0)
    with pytest.raises(InvalidInputError, match="seed must be"):
        plan.batch_sampler(0, samples=64, seed=-1)
    with pytest.raises(InvalidInputError, match="epoch must be"):
        plan.batch_sampler(0, samples=64).set_epoch(-1)
    with pytest.raises(InvalidInputError, match="rank 2 does not exist in a plan for 2 devices"):
        plan.batch_sampler(2, samples=64)
