"""Devices are opened by name; an accelerator's book-keeping with a pretended backend, and a real one where there is one.

The real ones were never run on the machines this was written on; they are skipped, and say so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from batchwright.device.device import (
    ACCELERATORS,
    AcceleratorDevice,
    default_device,
    open_device,
    present_devices,
)
from batchwright.device.host import HostDevice
from batchwright.device.outcome import Outcome
from batchwright.errors import InvalidInputError
from batchwright.units import PeakBytes
from tests.device.workloads import make_linear, make_mlp

if TYPE_CHECKING:
    from batchwright.device.step import Device


def test_cpu_opens_the_host() -> None:
    assert open_device("cpu") == HostDevice()
    assert open_device("cpu").name == "cpu"
    assert open_device("cpu").probe(make_linear(), 2).fits


@pytest.mark.parametrize("name", ["tpu", "", "cuda:x", "cuda:", "cuda:-1", "cpu:1", "CUDA", "cuda:٣", "a100-40gb"])
def test_unknown_names_list_what_is_there(name: str) -> None:
    with pytest.raises(InvalidInputError, match=r"no device is called .*; this machine has: cpu"):
        open_device(name)


@pytest.mark.parametrize("kind", ACCELERATORS)
def test_absent_accelerators_say_so(kind: str) -> None:
    if any(name.startswith(kind) for name in present_devices()):
        pytest.skip(f"there is a {kind} device here")
    for name in (kind, f"{kind}:1"):
        with pytest.raises(InvalidInputError, match=f"{name} was asked for, but torch .* finds no {kind} device"):
            open_device(name)


def test_index_beyond_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert open_device("cuda").name == "cuda:0"
    assert open_device("cuda:0").kind == "accelerator"
    with pytest.raises(InvalidInputError, match=r"cuda:1 was asked for; this machine has: cpu, cuda:0"):
        open_device("cuda:1")


def test_outcome_as_plain_data() -> None:
    outcome = Outcome(
        4, {"seq_len": 8}, "out_of_memory", PeakBytes(allocated=7), 0.5, rule="bad-alloc", error="RuntimeError: x"
    )
    assert not outcome.fits
    assert outcome.to_dict() == {
        "micro_batch": 4,
        "shape": {"seq_len": 8},
        "accumulation": 1,
        "outcome": "out_of_memory",
        "peak_bytes": {"allocated": 7, "reserved": None, "device": None},
        "seconds": 0.5,
        "step_seconds": None,
        "samples_per_second": None,
        "num_compilations": 0,
        "is_too_small": False,
        "rule": "bad-alloc",
        "doubt": None,
        "error": "RuntimeError: x",
        "traceback": None,
    }


@pytest.mark.parametrize(
    ("accelerators", "expected"), [({}, "cpu"), ({"cuda": 4}, "cuda"), ({"mps": 1}, "mps"), ({"xpu": 1}, "xpu")]
)
def test_the_default_is_the_accelerator_of_the_machine(
    accelerators: dict[str, int], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchwright.device.device._count", lambda kind: accelerators.get(kind, 0))
    assert default_device() == expected


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
