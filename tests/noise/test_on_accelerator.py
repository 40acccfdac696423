"""NoiseScale on a real accelerator: the observations of the CPU, and nothing read for a micro-batch."""

from __future__ import annotations

import pytest
import torch

from batchwright.accumulate.accumulator import Accumulator
from batchwright.noise.noise_scale import NoiseScale
from tests.noise.regression import STEPS, batches_of, expected, loss_of, make_model, seen_by


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator here: never run")
@pytest.mark.parametrize("sizes", [[4] * 4, [3, 1, 2, 4], [6]])
def test_an_accelerator_gives_the_observations_of_the_cpu(sizes: list[int]) -> None:
    device = torch.accelerator.current_accelerator()
    model = make_model("float32").to(device)
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.05), len(sizes))
    noise = NoiseScale(accumulator, window=10**9)
    for step in range(STEPS):
        for batch in accumulator.micro_batches([part.to(device) for part in batches_of(step, sizes, "float32")]):
            accumulator.backward(loss_of(model, batch))
    parts = sizes if len(sizes) > 1 else [1] * sizes[0]
    for critical, wanted in zip(seen_by(noise), expected(parts, "float32"), strict=True):
        assert critical == pytest.approx(wanted, rel=1e-3)
