"""An accelerator: its book-keeping with a pretended backend, and a real one where there is one.

The real ones were never run on the machines this was written on; they are skipped, and say so.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from batchwright.device.accelerator import AcceleratorDevice
from batchwright.device.device import Device, open_device, present_devices
from batchwright.units import PeakBytes
from tests.device.workloads import make_linear, make_mlp

ACCELERATOR = next((name for name in present_devices() if name != "cpu"), None)
real = pytest.mark.skipif(ACCELERATOR is None, reason="no accelerator on this machine (torch finds only the CPU)")


class Pretended:
    """Counters as torch.cuda has them, over the CPU."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.calls.append("reset")

    def max_memory_allocated(self, device: torch.device) -> int:
        self.calls.append("read")
        return 100

    def max_memory_reserved(self, device: torch.device) -> int:
        return 200

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 700, 1000


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    waited: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    return waited


def test_peaks_are_the_backends_and_the_cache_is_emptied_around(
    monkeypatch: pytest.MonkeyPatch, waits: list[Any]
) -> None:
    backend = Pretended()
    monkeypatch.setattr(torch, "get_device_module", lambda device: backend)
    device = AcceleratorDevice(torch.device("cpu"))
    outcome = device.probe(make_linear(), 4)
    assert outcome.fits, outcome.traceback
    assert outcome.peak_bytes == PeakBytes(allocated=100, reserved=200, device=300)
    assert backend.calls == ["empty_cache", "reset", "read", "empty_cache"]
    assert len(waits) == 4
    assert (device.total_bytes, device.free_bytes) == (1000, 700)


def test_a_backend_that_reports_little_gives_none(monkeypatch: pytest.MonkeyPatch, waits: list[Any]) -> None:
    class Little:
        def empty_cache(self) -> None:
            pass

        def mem_get_info(self, device: torch.device) -> tuple[int, int]:
            raise RuntimeError("The device doesn't support querying the available free memory")

    monkeypatch.setattr(torch, "get_device_module", lambda device: Little())
    device = AcceleratorDevice(torch.device("cpu"))
    assert device.probe(make_linear(), 4).peak_bytes == PeakBytes()
    assert (device.total_bytes, device.free_bytes) == (None, None)


@pytest.fixture
def device() -> Device:
    assert ACCELERATOR is not None
    return open_device(ACCELERATOR)


@pytest.mark.gpu
@real
def test_probe_fits_and_reports_what_the_backend_knows(device: Device) -> None:
    outcome = device.probe(make_mlp(), 64)
    assert outcome.fits, outcome.traceback
    assert outcome.peak_bytes is not None
    assert outcome.peak_bytes.reserved is not None
    if device.name.startswith("cuda"):
        assert outcome.peak_bytes.allocated is not None
        assert outcome.peak_bytes.device is not None
        assert outcome.peak_bytes.allocated <= outcome.peak_bytes.reserved <= outcome.peak_bytes.device


@pytest.mark.gpu
@real
def test_memory_returns_after_a_probe(device: Device) -> None:
    free = device.free_bytes
    if free is None:
        pytest.skip(f"{device.name} does not say how much memory is free")
    device.probe(make_mlp(), 64)
    before = device.free_bytes
    device.probe(make_mlp(), 4096)
    assert device.free_bytes == before


@pytest.mark.gpu
@real
def test_real_out_of_memory_is_an_outcome(device: Device) -> None:
    assert ACCELERATOR is not None
    workload = make_linear(batch=lambda n: torch.empty(n, 2**38, device=ACCELERATOR))
    outcome = device.probe(workload, 1)
    assert outcome.verdict == "out_of_memory"
    assert outcome.rule is not None
    assert device.probe(make_linear(), 4).fits
