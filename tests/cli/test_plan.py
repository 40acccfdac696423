"""`batchwright plan` as a person types it, the wrong things too."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

import batchwright as bw

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Run


def test_the_answer_goes_to_stdout_and_nothing_to_stderr(run: Run) -> None:
    ran = run("plan", "1024", "--micro-batch", "48", "--devices", "4")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith(
        "micro-batch 43 x accumulation 6 x devices 4 = effective batch 1,032 (8 more than the 1,024 asked for)\n"
    )


def test_the_table_of_10_000_samples_is_printed_to_the_digit(run: Run) -> None:
    out = run("plan", "32", "--micro-batch", "32", "--samples", "10000").out
    dropped = str(bw.plan(32, micro_batch=32, samples=10_000, drop_last=True))
    assert ["32", "1", "32", "313", "313"] in [line.split()[:5] for line in out.splitlines()]
    rows = [line.split() for line in dropped.splitlines()]
    for expected in (
        ["32", "1", "32", "312", "312"],
        ["16", "2", "32", "625", "313"],
        ["8", "4", "32", "1,250", "313"],
        ["4", "8", "32", "2,500", "313"],
    ):
        assert any(row[:5] == expected for row in rows), expected


def test_json_is_the_plan_as_data(run: Run) -> None:
    ran = run("plan", "100", "--micro-batch", "7", "--devices", "3", "--samples", "1000", "--policy", "exact", "--json")
    assert json.loads(ran.out) == bw.plan(100, micro_batch=7, devices=3, samples=1000, policy="exact").to_dict()


def test_for_prints_only_what_is_to_be_pasted(run: Run) -> None:
    ran = run("plan", "1024", "--micro-batch", "48", "--devices", "4", "--for", "deepspeed")
    assert json.loads(ran.out) == {
        "train_batch_size": 1032,
        "train_micro_batch_size_per_gpu": 43,
        "gradient_accumulation_steps": 6,
    }
    assert "effective batch 1,032" in ran.err


def test_for_and_json_give_both(run: Run) -> None:
    data = json.loads(run("plan", "32", "--micro-batch", "8", "--for", "lightning", "--json").out)
    assert data["config"]["trainer"]["accumulate_grad_batches"] == data["accumulation"] == 4
    assert data["snippet"].startswith("# micro-batch 8")
    assert data["framework"] == "lightning"


def test_for_and_policy_are_read_whatever_their_case(run: Run) -> None:
    ran = run("plan", "32", "--micro-batch", "8", "--for", "DeepSpeed", "--policy", "EXACT")
    assert json.loads(ran.out)["gradient_accumulation_steps"] == 4


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["0", "--micro-batch", "8"], "EFFECTIVE must be a whole number from 1 to 10^15; received 0."),
        (
            ["-8", "--micro-batch", "8"],
            "EFFECTIVE must be a whole number from 1 to 10^15, such as 32 or 10_000; received '-8'.",
        ),
        (["2.5", "--micro-batch", "8"], "received '2.5'."),
        (["1e9", "--micro-batch", "8"], "received '1e9'."),
        (["many", "--micro-batch", "8"], "received 'many'."),
        (["9" * 5000, "--micro-batch", "8"], "EFFECTIVE must be a whole number"),
        (["٣٢", "--micro-batch", "8"], "EFFECTIVE must be a whole number"),
        (["", "--micro-batch", "8"], "EFFECTIVE must be a whole number"),
        (["32", "--micro-batch", "-1"], "--micro-batch must be a whole number from 1 to 10^15; received -1."),
        (["32", "--micro-batch", "8", "--devices", "0"], "--devices must be"),
        (["32", "--micro-batch", "8", "--samples", "10,000"], "such as 32 or 10_000; received '10,000'."),
        (["32", "--micro-batch", "8", "--workers", "4"], "try: in Python: bw.plan(256, micro_batch=8, workers=4)"),
        (["32", "--micro-batch", "8", "--policy", "best"], "policy must be one of nearest, at-least, at-most, exact"),
        (["32", "--micro-batch", "8", "--for", "lightnin"], "unknown framework 'lightnin'; known are transformers"),
        (
            ["32", "--micro-batch", "8", "--times", "4=0.1"],
            "try: in Python: bw.plan(256, micro_batch=8, times={4: 0.11,",
        ),
        (["32"], "--micro-batch, the largest that fits, is needed"),
        (["--micro-batch", "8"], "EFFECTIVE, the batch you want, is needed"),
        (
            ["3", "--micro-batch", "8", "--devices", "4", "--policy", "exact"],
            "effective batch 3 is below the number of devices, 4",
        ),
        (["32", "--micro-batch", "8", "--wibble"], "No such option"),
        (
            ["100", "--micro-batch", "7", "--policy", "exact", "--for", "transformers"],
            "transformers cannot run this plan",
        ),
    ],
)
def test_wrong_input_is_one_message_and_exit_code_2(run: Run, args: list[str], said: str) -> None:
    ran = run("plan", *args)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
    assert "Traceback" not in ran.err


def test_check_agrees_disagrees_or_cannot_be_read(run: Run, tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text('{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}')
    agrees = run("plan", "--check", str(config), "--devices", "8")
    assert (agrees.code, agrees.err) == (0, "")
    assert "4 x 2 x 8 devices = 64" in agrees.out
    disagrees = run("plan", "--check", str(config), "--devices", "4")
    assert disagrees.code == 1
    assert "gradient_accumulation_steps: 2 -> 4" in disagrees.out
    assert json.loads(run("plan", "--check", str(config), "--devices", "4", "--json").out)["agrees"] is False
    config.write_text("{")
    assert run("plan", "--check", str(config)).code == 2
    assert run("plan", "--check", str(tmp_path / "none.json")).code == 2


def test_check_takes_no_numbers_of_its_own(run: Run) -> None:
    ran = run("plan", "64", "--check", "ds.json", "--micro-batch", "4")
    assert ran.code == 2
    assert "received --micro-batch, EFFECTIVE" in ran.err


def test_a_closed_pipe_is_no_error() -> None:
    import subprocess
    import sys

    # The reader is gone before the first byte is written.
    command = f"{sys.executable} -m batchwright plan 32 --micro-batch 32 --json | (exec <&-; sleep 1)"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stderr == ""


def test_a_full_disk_is_one_message() -> None:
    import subprocess
    import sys

    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "batchwright", "plan", "32", "--micro-batch", "32"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == "Error: cannot write the answer: No space left on device.\n"


def test_an_unknown_command_names_the_nearest(run: Run) -> None:
    ran = run("plam")
    assert ran.code == 2
    assert "no command 'plam'. Did you mean 'plan'?" in ran.err


def test_an_interrupt_ends_with_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("batchwright.planning.plan.plan", interrupted)
    assert run("plan", "32", "--micro-batch", "8").code == 130
