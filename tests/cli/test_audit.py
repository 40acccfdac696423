"""`batchwright audit` as a person types it, the wrong things too."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

import batchwright as bw

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Run

FILE = """
import torch
import batchwright as bw


def loss(model, batch):
    return model(batch).pow(2).mean()


def window(model, optimizer, micro_batches):
    for batch in micro_batches:
        (loss(model, batch) / len(micro_batches)).backward()
    optimizer.step()


def workload(**changes):
    fields = {
        "model": lambda: torch.nn.Linear(6, 2),
        "batch": lambda n, width=6: torch.randn(n, width),
        "loss": loss,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "window": window,
    }
    return bw.Workload(**{**fields, **changes})


def undivided():
    def window(model, optimizer, micro_batches):
        for batch in micro_batches:
            loss(model, batch).backward()
        optimizer.step()

    return workload(window=window)


def buggy():
    def window(model, optimizer, micro_batches):
        raise KeyError("labels")

    return workload(window=window)


def infers():
    return workload(optimizer=None, window=None)
"""


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("train")
class TestAudit:
    """A workload in a file."""

    def test_a_right_loop_ends_with_0(self, run: Run) -> None:
        ran = run("audit", "train.py:workload")
        assert ran.code == 0
        assert ran.out.startswith("train.py:workload: the accumulated gradient is that of the big batch")

    def test_a_wrong_loop_ends_with_1_and_its_cause(self, run: Run) -> None:
        ran = run("audit", "train.py:undivided", "--micro-batch", "3", "--accumulation", "5")
        assert ran.code == 1
        assert "ratio 5, relative error 4 (count ignored)" in ran.out
        assert "remedy:" in ran.out

    def test_json_is_the_dictionary(self, run: Run) -> None:
        ran = run("audit", "train.py:workload", "--micro-batch", "1", "--accumulation", "8", "--json")
        told = json.loads(ran.out)
        assert (ran.code, told["schema"], told["exact"], told["cause"]) == (0, 1, True, None)
        assert [split["split"] for split in told["splits"]] == ["1x8", "1x1"]

    def test_the_text_is_that_of_print(self, run: Run) -> None:
        ran = run("audit", "train.py:undivided")
        assert ran.out == f"{bw.audit('train.py:undivided')}\n"

    def test_a_bug_in_the_loop_keeps_its_traceback(self, run: Run) -> None:
        ran = run("audit", "train.py:buggy")
        assert ran.code == 3
        assert 'raise KeyError("labels")' in ran.err

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["train.py:infers"], "an audit compares gradients, and this workload only infers"),
            (["train.py:workload", "--splits", "4x2"], 'try: in Python: bw.audit(workload, splits="4x2,3+3+2")'),
            (["train.py:workload", "--dtype", "fp64"], 'try: in Python: bw.audit(workload, dtype="fp64")'),
            (["train.py:workload", "--shape", "n=1,2"], "--shape n takes one value here; received 1,2."),
            (["train.py:workload", "--micro-batch", "0"], "--micro-batch must be"),
            (["train.py:nope"], "nope"),
            (["nowhere.py:workload"], "nowhere.py"),
        ],
    )
    def test_wrong_usage_ends_with_2(self, run: Run, arguments: list[str], said: str) -> None:
        ran = run("audit", *arguments)
        assert (ran.code, ran.out) == (2, "")
        assert said in ran.err

    def test_a_way_of_dropout_that_there_is_not_is_refused(self) -> None:
        with pytest.raises(bw.BatchwrightError, match='dropout is "off" or "replayed"'):
            bw.audit("train.py:workload", dropout="on")
