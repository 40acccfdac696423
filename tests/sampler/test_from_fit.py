"""from_fit: the bytes of a batch are fitted over all probes, and the costliest batch has run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import batchwright as bw
from batchwright.device.outcome import Outcome
from batchwright.errors import InvalidInputError
from batchwright.fitting.fit_result import Fit
from batchwright.sampler import from_fit as certified
from batchwright.sampler.from_fit import fit_cost
from batchwright.units import PeakBytes

LIMIT = 1_000_000


def peak(samples: int, length: int, cost: tuple[float, float, float]) -> float:
    return cost[0] + cost[1] * samples * length + cost[2] * samples * length**2


def row(length: int, cost: tuple[float, float, float], noise: float = 0.0) -> Fit:
    """What a fit at one length would have tried, and seen."""
    most = int((LIMIT - cost[0]) // (cost[1] * length + cost[2] * length**2))
    trials = [
        Outcome(n, {"seq_len": length}, "fits", PeakBytes(device=int(peak(n, length, cost) * (1 + noise))), 1.0)
        for n in (1, max(most // 2, 1), max(most, 1))
    ]
    trials.append(Outcome(most + 1, {"seq_len": length}, "out_of_memory", None, 1.0))
    return Fit("step", "cpu", most, 1000, LIMIT, tuple(trials), None, "", shape={"seq_len": length})


def table(lengths: list[int], cost: tuple[float, float, float]) -> Fit:
    rows = tuple(row(length, cost, noise) for length, noise in zip(lengths, (0.0, 0.01, -0.01, 0.0), strict=False))
    return Fit("step", "cpu", 1, 1000, LIMIT, (), None, "", shapes=rows)


@given(st.floats(0, 3e5), st.floats(1.0, 50), st.floats(0, 0.05))
def test_no_probe_took_more_than_the_cost_says_and_a_failed_one_is_over(a: float, b: float, c: float) -> None:
    fit = table([64, 256, 1024], (a, b, c))
    cost, limit = fit_cost(fit)
    assert min(cost.fixed, cost.per_token, cost.per_token_squared) >= 0
    for one in fit.shapes:
        for trial in one.trials:
            said = float(cost.of(np.array([trial.micro_batch]), np.array([one.shape["seq_len"]]))[0])
            if trial.fits:
                assert trial.peak_bytes is not None
                assert trial.peak_bytes.device is not None
                assert said >= trial.peak_bytes.device * (1 - 1e-9)
            else:
                assert said >= limit


def test_the_costliest_batch_is_probed_and_the_budget_lowered_until_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def probe(work: Any, *, limit: int, shapes: dict[str, int], **_: Any) -> Fit:
        length = shapes["seq_len"]
        asked.append((limit, length))
        # In truth it takes a tenth more than the probes said.
        fits = min(limit, int((LIMIT - 1e5) // (11.0 * length)))
        return Fit("step", "cpu", fits, 1000, LIMIT, (), None, "")

    monkeypatch.setattr(certified, "run_fit", probe)
    fit = table([64, 256, 1024], (1e5, 10.0, 0.0))
    lengths = np.random.default_rng(0).integers(10, 1000, 500)
    sampler = bw.TokenBatchSampler.from_fit(fit, lengths, "train.py:workload", rank=0, world_size=1)
    assert len(asked) > 1
    assert sampler.certified is not None
    samples, length = asked[-1]
    assert 1e5 + 11.0 * samples * length <= LIMIT
    for batch in sampler:
        assert 1e5 + 10.0 * len(batch) * max(lengths[batch]) <= LIMIT


def test_a_fit_over_fewer_lengths_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="at least 3 lengths of one shape"):
        bw.TokenBatchSampler.from_fit(table([64, 256], (1e5, 10.0, 0.0)), [5, 6], "train.py:workload")


@pytest.mark.slow
def test_a_real_fit_gives_a_sampler_whose_costliest_batch_ran() -> None:
    def workload() -> bw.Workload:
        return bw.Workload(
            model=lambda: nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 50)),
            batch=lambda n, seq_len=64: torch.randint(0, 50, (n, seq_len)),
            loss=lambda model, ids: nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        )

    found = bw.fit(workload(), shapes={"seq_len": [32, 64, 128]}, memory="64MiB", limit=512)
    lengths = np.random.default_rng(0).integers(8, 128, 2000)
    sampler = bw.TokenBatchSampler.from_fit(found, lengths, workload(), rank=0, world_size=1)
    assert sampler.certified is not None
    assert sampler.stats().fill > 0.5
