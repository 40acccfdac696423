"""`fit` on a real card; nothing here has run on the machines this was written on."""

from __future__ import annotations

import pytest
import torch

import batchwright as bw
from batchwright.device.device import present_devices
from tests.fitting import targets

CARD = next((name for name in present_devices() if name != "cpu"), None)
real = pytest.mark.skipif(CARD is None, reason="no accelerator on this machine (torch finds only the CPU)")


@pytest.mark.gpu
@real
def test_the_largest_size_is_certified_on_the_card_and_the_model_comes_back() -> None:
    assert CARD is not None
    model = targets.build()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    workload = bw.Workload(model=model, batch=targets.batch, loss=targets.loss, optimizer=targets.adam)
    result = bw.fit(workload, on=CARD, memory="512MiB", cache=False)
    assert result.certified
    assert result.next_size is not None
    assert result.next_size.outcome == "out_of_memory"
    assert result.peak_bytes is not None
    assert result.peak_bytes.reserved is not None
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.gpu
@real
def test_each_probe_of_a_target_is_a_process_of_its_own() -> None:
    assert CARD is not None
    result = bw.fit(f"{targets.__file__}:mlp", on=CARD, memory="512MiB", limit=64, cache=False)
    assert result.micro_batch == 64
