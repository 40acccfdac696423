"""`check_machine`: what it says of this machine, and that a part that fails is said and ends nothing."""

from __future__ import annotations

import getpass
import json
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from batchwright.checkup.check import check_machine, probe_device, try_part
from batchwright.checkup.check_result import FAILED, NOT_HERE, WORKS, CheckedDevice, MeasuredProbe
from batchwright.checkup.parts import PARTS, NotHereError, _run
from batchwright.errors import BatchwrightError
from batchwright.units import PeakBytes

if TYPE_CHECKING:
    from tests.conftest import Run

QUICK = ["plan, advise, recommend", "estimate", "audit", "Accumulator", "TokenBatchSampler"]


def test_quick_parts_work_and_the_machine_is_described() -> None:
    check = check_machine(QUICK, on=[])
    assert [part.verdict for part in check.parts] == [WORKS] * len(QUICK)
    assert check.works
    assert {"system", "processor", "cores", "memory", "python"} <= set(check.machine)
    assert check.versions["torch"]
    assert check.devices[0].name == "cpu"
    data = json.loads(json.dumps(check.to_dict()))
    assert (data["schema"], data["source"], data["works"]) == (1, "measured", True)


def test_the_text_names_nobody() -> None:
    text = str(check_machine(["Accumulator"], on=[]))
    for private in (socket.gethostname(), str(Path.home()), sys.prefix):
        assert private not in text
    assert getpass.getuser() not in text.split()


def test_a_part_that_fails_is_said_and_the_next_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> str:
        print("noise on stdout")
        raise BatchwrightError(f"the very reason: {Path.home()}/secret on {sys.prefix}.", remedy="what to do")

    def leaves() -> str:
        sys.exit(3)

    def is_missing() -> str:
        raise NotHereError("no such thing here")

    for name, part in {"one": fails, "two": leaves, "three": is_missing}.items():
        monkeypatch.setitem(PARTS, name, part)
    check = check_machine(["one", "two", "three", "Accumulator"], on=[])
    assert [part.verdict for part in check.parts] == [FAILED, FAILED, NOT_HERE, WORKS]
    assert not check.works
    text = str(check)
    assert "FAILED: one, two" in text.splitlines()[0]
    assert "the very reason: ~/secret on <python>." in text
    assert "what to do" in text
    assert "test_check.py" in text


def test_a_command_that_hangs_is_ended() -> None:
    start = time.monotonic()
    with pytest.raises(BatchwrightError, match="no answer within 1 s"):
        _run([sys.executable, "-c", "import time; time.sleep(60)"], 1.0)
    assert time.monotonic() - start < 30


def test_a_framework_that_is_not_installed_is_not_here() -> None:
    from batchwright.checkup import parts

    PARTS["with nothing"] = parts.try_framework("no_such_package_at_all")
    try:
        assert try_part("with nothing").verdict == NOT_HERE
    finally:
        del PARTS["with nothing"]


def test_peaks_of_a_card_are_compared_kind_by_kind_and_a_host_has_one() -> None:
    predicted, measured = PeakBytes(100, 120, 600), PeakBytes(110, 120, None)
    card = MeasuredProbe("cuda:0", 16, "a100-40gb", predicted, measured, 0.1)
    assert card.pairs == (("allocated", 100, 110), ("reserved", 120, 120))
    assert card.error == pytest.approx(-1 / 11)
    host = MeasuredProbe("cpu", 16, "cpu", PeakBytes(allocated=99), PeakBytes(device=100), 0.1)
    assert host.pairs == (("memory", 99, 100),)
    assert MeasuredProbe("mps:0", 16, None, None, measured, None).error is None


def test_the_command_ends_with_1_if_a_part_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> str:
        raise BatchwrightError("broken.")

    # All but one part, and the devices, are left to the slow test.
    for name in list(PARTS):
        monkeypatch.delitem(PARTS, name)
    monkeypatch.setitem(PARTS, "the only part", fails)
    monkeypatch.setattr("batchwright.checkup.check.check_machine.__defaults__", (tuple(PARTS),))
    monkeypatch.setattr("batchwright.checkup.check.present_devices", lambda: ())
    ran = run("check", "--json")
    assert ran.code == 1
    assert json.loads(ran.out)["parts"][0]["detail"] == "BatchwrightError: broken."


@pytest.mark.slow
def test_a_step_on_this_cpu_takes_what_was_predicted() -> None:
    probe, part = probe_device(CheckedDevice("cpu", "", None, None, None))
    assert part.verdict == WORKS, part
    assert probe is not None
    assert probe.error is not None
    assert abs(probe.error) < 0.1


@pytest.mark.slow
def test_every_part_works_here(run: Run) -> None:
    ran = run("check")
    assert ran.code == 0, ran.out
    assert "every part that can be tried here works" in ran.out
