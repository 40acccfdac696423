"""A machine's profile: made here, kept in a file, used for steps on this machine, and refused on another."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import batchwright as bw
from batchwright.catalogue.cards import find_card
from batchwright.errors import InvalidInputError
from batchwright.timing.calibrate import calibrate
from batchwright.timing.profile import (
    Machine,
    Profile,
    default_file,
    profile_here,
    profile_of_card,
    read_profile,
    write_profile,
)
from batchwright.timing.step_time import NoTime, StepTime, time_here
from batchwright.trace.work import StepWork, Work


def workload() -> bw.Workload:
    return bw.Workload(
        model=lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)),
        batch=lambda n: torch.zeros(n, 64),
        loss=lambda model, x: model(x).square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )


@pytest.fixture(scope="module")
def profile() -> Profile:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return calibrate(seconds=1.0, clock=time.thread_time)
    finally:
        torch.set_num_threads(threads)


def test_a_profile_knows_products_and_bytes_and_survives_its_file(profile: Profile, tmp_path: Path) -> None:
    assert "matmul" in profile.products
    assert "elementwise" in profile.curves
    file = tmp_path / "profiles" / "mine.json"
    write_profile(profile, file)
    again = read_profile(file)
    assert again.to_dict() == json.loads(json.dumps(profile.to_dict()))
    assert again.machine.difference(profile.machine) == ""


def test_larger_products_and_tensors_take_longer(profile: Profile) -> None:
    def product(size: int) -> Work:
        return Work("aten.mm", "matmul", 2 * size**3, 0, 0, 1, "fp32", dims=(1, size, size, size))

    def added(num_bytes: int) -> Work:
        return Work("aten.no_such_operator", "elementwise", 0, num_bytes, 0, 1, "fp32")

    assert 0 < profile.seconds_of(product(64)) < profile.seconds_of(product(512)) < profile.seconds_of(product(2048))
    assert 0 < profile.seconds_of(added(1 << 12)) < profile.seconds_of(added(1 << 28))


def test_a_format_that_was_not_profiled_is_no_time(profile: Profile) -> None:
    step = StepWork((Work("aten.mm", "matmul", 8, 8, 8, 1, "fp64", dims=(1, 2, 2, 1)),), ("",))
    answer = time_here(step, profile, samples=1)
    assert isinstance(answer, NoTime)
    assert "no products in fp64" in answer.reason


def test_an_estimate_on_this_cpu_uses_the_profile_and_says_when_it_does_not_hold(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHWRIGHT_CACHE", str(tmp_path))
    assert bw.estimate(workload(), micro_batch=4, on="cpu").time is None
    here = Machine.here()
    file = default_file(here)
    write_profile(replace(profile, machine=here), file)
    found = bw.estimate(workload(), micro_batch=4, on="cpu")
    assert isinstance(found.time, StepTime)
    assert found.time.source == "predicted from this machine's profile"
    assert "a step takes" in str(found)
    write_profile(replace(profile, machine=replace(here, torch="1.0.0")), file)
    other = bw.estimate(workload(), micro_batch=4, on="cpu").time
    assert isinstance(other, NoTime)
    assert "is of another machine: torch 1.0.0" in other.reason


def test_without_a_home_there_is_no_profile_and_no_place_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("BATCHWRIGHT_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert profile_here()[0] is None
    assert profile_of_card(find_card("a100-40gb")) is None
    with pytest.raises(InvalidInputError, match="no home folder"):
        default_file(Machine.here())


def test_a_card_that_was_profiled_anywhere_is_predicted_by_its_profile(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHWRIGHT_CACHE", str(tmp_path))
    machine = Machine("NVIDIA A100-SXM4-40GB", 0, torch.__version__)
    write_profile(replace(profile, machine=machine, overlaps=True), default_file(machine))
    profiled = bw.estimate(workload(), micro_batch=4, on="a100-40gb").time
    by_sheet = bw.estimate(workload(), micro_batch=4, on="a100-80gb").time
    assert isinstance(profiled, StepTime)
    assert isinstance(by_sheet, StepTime)
    assert (profiled.source, by_sheet.source) == ("predicted from this machine's profile", "predicted")


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"schema": 1}', '{"schema": 99}', "not json"])
def test_a_file_that_is_no_profile_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInputError):
        read_profile(file)


@pytest.mark.parametrize("change", [{"curves": {"add": [[2.0, 1.0], [1.0, 1.0]]}}, {"host_seconds": {"forward": -1.0}}])
def test_times_that_no_machine_has_are_refused(profile: Profile, change: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps({**profile.to_dict(), **change}), encoding="utf-8")
    with pytest.raises(InvalidInputError, match=r"no machine has|out of order"):
        read_profile(file)


def test_without_a_profile_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHWRIGHT_CACHE", str(tmp_path))
    profile, reason = profile_here()
    assert profile is None
    assert "batchwright calibrate" in reason
