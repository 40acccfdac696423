"""`batchwright tune` as it is typed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
from torch.distributed.run import get_args_parser

from batchwright.cli import _run, group

ROOT = Path(__file__).parents[2]
TARGET = f"{ROOT / 'examples' / 'char_mlp.py'}:workload"
QUICK = ["--memory", "512MiB", "--limit", "64", "--steps", "40"]


@pytest.mark.slow
def test_ranks_of_torchrun_give_one_answer_and_one_run(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "-m",
        "batchwright",
        "tune",
        TARGET,
    ]
    done = subprocess.run(
        [*command, *QUICK, "--skip", "estimate", "--json"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)  # one document, so one answer
    assert told == json.loads((tmp_path / "run.json").read_text())
    assert told["recommendation"]["devices"] == 2
    assert told["noise"]["devices"] == 2
    assert told["fit"]["ranks"] == 2


def test_what_to_paste_is_printed_of_a_run_that_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["tune", TARGET, *QUICK, "--skip", "fit,estimate,audit"]
    assert _run(options) == 0
    after = capsys.readouterr().err
    assert "batchwright report run.json" in after
    assert "what to type: batchwright tune" in after
    assert _run([*options, "--resume", "--for", "transformers"]) == 0
    told = capsys.readouterr()
    assert "TrainingArguments(" in told.out
    assert "learning_rate=" in told.out
    assert "= effective batch" in told.err


@pytest.mark.parametrize("command", ["tune", "fit", "noise", "audit"])
def test_torchrun_takes_no_option_for_its_own(command: str) -> None:
    """Its parser takes a word that begins one of its options for that option, even behind the program's name."""
    theirs = [name for action in get_args_parser()._actions for name in action.option_strings]
    found = group.get_command(click.Context(group), command)
    assert found is not None
    for option in found.params:
        for name in option.opts:
            assert not any(name.startswith("--") and other.startswith(name) for other in theirs), name


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--skip", "nosie"], "no stage 'nosie' to skip"),
        (["--for", "transfomers"], "transformers"),
        (["--run-file", "no/such/folder/run.json"], "the run cannot be written"),
        (["--on", "cuda"], "finds no cuda device"),
        (["--on", "a100-41gb"], "a100-40gb"),
        (["--resume"], "no run to resume"),
        (["--branches", "16,many"], "--branches"),
        (["--branches", "16,32@late"], "--branches"),
        (["--branches", "16"], "try: --branches 16,64"),
    ],
)
def test_what_is_wrong_is_said(
    options: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = _run(["tune", TARGET, *QUICK, *options])
    told = capsys.readouterr()
    assert code in (1, 2)
    assert words in told.err + told.out
