"""`batchwright tune` as it is typed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from batchwright.cli import _run

ROOT = Path(__file__).parents[2]
TARGET = f"{ROOT / 'examples' / 'char_mlp.py'}:workload"
QUICK = ["--memory", "512MiB", "--limit", "64", "--steps", "40"]


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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--skip", "nosie"], "no stage 'nosie' to skip"),
        (["--run", "no/such/folder/run.json"], "for the run"),
        (["--on", "cuda"], "finds no cuda device"),
        (["--on", "a100-41gb"], "a100-40gb"),
        (["--resume"], "no run to resume"),
        (["--branches", "16,many"], "--branches"),
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
