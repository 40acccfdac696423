"""Devices are opened by name, and one that is absent says what is there."""

from __future__ import annotations

import pytest
import torch

from batchwright.device import device
from batchwright.device.device import ACCELERATORS, open_device, present_devices
from batchwright.device.host import HostDevice
from batchwright.device.outcome import Outcome
from batchwright.errors import InvalidInputError
from batchwright.units import PeakBytes
from tests.device.workloads import make_linear


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
    monkeypatch.setattr(device, "_count", lambda kind: accelerators.get(kind, 0))
    assert device.default_device() == expected
