"""A real run on a card, written down, sets predictions for that card right."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import batchwright as bw
from batchwright.errors import InvalidInputError
from batchwright.memory.on_card import read_run
from batchwright.timing.step_time import StepTime

if TYPE_CHECKING:
    from pathlib import Path

CARD = "t4-16gb"


def workload() -> bw.Workload:
    return bw.Workload(
        model=lambda: nn.Linear(256, 256),
        batch=lambda n: torch.randn(n, 256),
        loss=lambda model, batch: model(batch).pow(2).mean(),
        optimizer=lambda params: torch.optim.AdamW(params),
    )


def write_run(file: Path, **changes: Any) -> None:
    """Write a run that took 3 MiB more than predicted, with a context of 200 MiB."""
    peaks = bw.estimate(workload(), micro_batch=8, on=CARD).peak_bytes
    assert peaks.allocated is not None
    assert peaks.reserved is not None
    told = {
        "schema": 1,
        "source": "measured",
        "name": "workload",
        "product": "Tesla T4",
        "total_bytes": 15 << 30,
        "micro_batch": 8,
        "peak_bytes": {
            "allocated": peaks.allocated + (3 << 20),
            "reserved": peaks.reserved + (4 << 20),
            "device": peaks.reserved + (204 << 20),
        },
    }
    file.write_text(json.dumps({**told, **changes}))


def test_what_a_run_took_beyond_its_prediction_is_added_at_every_size(tmp_path: Path) -> None:
    write_run(tmp_path / "run.json")
    plain, set_right = (
        bw.estimate(workload(), micro_batch=4096, on=CARD, calibrate=file) for file in (None, tmp_path / "run.json")
    )
    assert set_right.peak - plain.peak == 3 << 20
    assert plain.peak_bytes.reserved is not None
    assert set_right.peak_bytes.reserved == plain.peak_bytes.reserved + (4 << 20)
    assert set_right.parts["context"] == 200 << 20
    assert set_right.peak_bytes.device == set_right.peak_bytes.reserved + (200 << 20)


def test_the_seconds_of_a_run_set_the_predicted_ones_right(tmp_path: Path) -> None:
    plain = bw.estimate(workload(), micro_batch=8, on=CARD).time
    assert isinstance(plain, StepTime)
    write_run(tmp_path / "run.json", seconds=3 * plain.seconds)
    answers = [bw.estimate(workload(), micro_batch=n, on=CARD, calibrate=tmp_path / "run.json") for n in (8, 4096)]
    time = answers[0].time
    assert isinstance(time, StepTime)
    assert time.seconds == pytest.approx(3 * plain.seconds)
    assert time.low < time.seconds < time.high
    assert "times 3 by the recorded run" in str(answers[1])
    write_run(tmp_path / "run.json", seconds="long")
    with pytest.raises(InvalidInputError, match="has a step of no seconds"):
        read_run(tmp_path / "run.json")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"product": "NVIDIA A100-SXM4-40GB"}, "was recorded on NVIDIA A100-SXM4-40GB, and t4-16gb is asked about"),
        ({"schema": 7}, "has schema 7; this version reads 1"),
        ({"peak_bytes": {"allocated": None}}, "does not say what was allocated"),
        ({"surprise": 1}, "is no recorded run"),
    ],
)
def test_a_run_that_does_not_go_with_the_question_is_refused(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    write_run(tmp_path / "run.json", **changes)
    with pytest.raises(InvalidInputError, match=told):
        bw.estimate(workload(), on=CARD, calibrate=tmp_path / "run.json")


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"missing\.json' cannot be read"):
        read_run(tmp_path / "missing.json")
    (tmp_path / "half.json").write_text('{"schema": 1')
    with pytest.raises(InvalidInputError, match=r"half\.json' is no recorded run"):
        read_run(tmp_path / "half.json")


def test_a_run_is_recorded_on_a_card() -> None:
    with pytest.raises(InvalidInputError, match="cpu is none"):
        bw.record_run(workload(), micro_batch=1, on="cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator here: never run")
def test_a_recorded_run_can_be_read_back(tmp_path: Path) -> None:
    run = bw.record_run(workload(), micro_batch=8, file=tmp_path / "run.json")
    assert read_run(tmp_path / "run.json") == run


def test_what_it_took_counts_against_the_card_at_one_size_too(tmp_path: Path) -> None:
    write_run(tmp_path / "run.json")
    told: dict[str, Any] = {"micro_batch": 8, "on": CARD, "calibrate": tmp_path / "run.json"}
    device = bw.estimate(workload(), **told).peak_bytes.device
    assert device is not None
    assert bw.estimate(workload(), **told, memory=device).fits
    assert not bw.estimate(workload(), **told, memory=device - (3 << 20)).fits


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "another.py:step"}, "was recorded of another.py:step"),
        ({"schema": 2}, "has schema 2"),
        ({"shape": [1]}, "no table of names"),
        ({"peak_bytes": {"allocated": "a", "reserved": 2, "device": 3}}, "peaks that no run has"),
        ({"peak_bytes": {"allocated": -5, "reserved": 2, "device": 3}}, "peaks that no run has"),
        ({"peak_bytes": {"allocated": 5, "reserved": 4, "device": 3}}, "peaks that no run has"),
    ],
)
def test_a_run_that_cannot_be_true_or_is_another_is_refused(tmp_path: Path, changes: Any, words: str) -> None:
    write_run(tmp_path / "run.json", **changes)
    with pytest.raises(InvalidInputError, match=words):
        bw.estimate(workload(), micro_batch=8, on=CARD, calibrate=tmp_path / "run.json")
