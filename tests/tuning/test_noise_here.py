"""The critical batch for a simulated card: measured on the CPU if that is soon done, or taken from a run before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import batchwright as bw
from batchwright.errors import InvalidInputError
from batchwright.tuning import noise_here
from batchwright.tuning.tune import TuneRequest


def workload(width: int = 64) -> bw.Workload:
    teacher = torch.randn(32, 1, generator=torch.Generator().manual_seed(0))

    def batch(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(n, 32)
        return x, x @ teacher + torch.randn(n, 1)

    return bw.Workload(
        model=lambda: nn.Sequential(nn.Linear(32, width), nn.Tanh(), nn.Linear(width, 1)),
        batch=batch,
        loss=lambda model, pair: (model(pair[0]) - pair[1]).square().mean(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
    )


def tuned(file: Path, **changes: Any) -> Any:
    settings = {"on": "a100-40gb", "limit": 256, "steps": 40, "skip": ("estimate", "fit"), "file": file, **changes}
    return bw.tune(f"{__file__}:workload", **settings)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run") / "run.json"


@pytest.fixture(scope="module")
def first(file: Path) -> Any:
    return tuned(file, network="400Gb/s", price_per_hour=2.5, hours=1.0)


def test_it_is_measured_on_the_cpu_and_the_recommendation_is_whole(first: Any) -> None:
    noise, advised = first.run["noise"], first.run["recommendation"]
    assert (noise["on"], noise["steps"], noise["effective_batch"]) == ("cpu", 40, 64)
    assert "measured on this machine's CPU: 40 steps of 64 samples" in str(first)
    assert (advised["source"], advised["critical_batch_from"]) == ("predicted", "noise scale")
    assert [row["devices"] for row in advised["by_devices"]["rows"]] == [1, 2, 4, 8, 16, 32, 64]
    assert "beyond 8 a model of the network" in str(first)
    assert advised["run"]["cost"] == 2.5


def test_a_run_of_the_same_workload_is_taken_as_it_is(first: Any, file: Path) -> None:
    noise = first.run["noise"]
    again = tuned(file, on="rtx-4090-24gb").run["noise"]
    assert again["critical_batch"] == noise["critical_batch"]
    assert "is that of the run of" in again["how"]


def test_one_of_another_question_is_not(first: Any, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about, request = first.run["workload"], TuneRequest(on="a100-40gb", steps=40)
    assert noise_here.take_from(file, about, request, print)
    assert noise_here.take_from(file, {**about, "learning_rate": 0.5}, request, print) == {}
    assert noise_here.take_from(file, about, TuneRequest(on="a100-40gb", steps=41), print) == {}
    assert noise_here.take_from(file.with_name("none.json"), about, request, print) == {}
    monkeypatch.setattr(noise_here, "_has_changed_since", lambda run: True)
    assert noise_here.take_from(file, about, request, print) == {}


def test_a_workload_whose_file_is_younger_has_changed(tmp_path: Path) -> None:
    source = tmp_path / "train.py"
    source.write_text("")
    run = {"workload": {"target": f"{source}:workload"}, "created": "2001-01-01T00:00:00+00:00"}
    assert noise_here._has_changed_since(run)
    assert not noise_here._has_changed_since({**run, "created": "2999-01-01T00:00:00+00:00"})
    assert noise_here._has_changed_since({**run, "workload": {"target": None}})


def test_what_takes_too_long_here_is_not_begun_and_the_answer_says_how_to_have_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(noise_here, "_rate_of_products", lambda: 1e3)
    skipped = tuned(tmp_path / "run.json", skip=("estimate", "fit", "throughput")).run["noise"]["skipped"]
    assert "40 steps of 16 samples would take at least" in skipped
    assert "batchwright noise TARGET --on cpu --effective-batch 16" in skipped
    assert "critical_batch= in Python" in skipped


def test_a_critical_batch_that_was_given_is_not_measured(tmp_path: Path) -> None:
    run = tuned(tmp_path / "run.json", critical_batch=500, skip=("estimate", "fit", "throughput")).run
    assert run["noise"] == {"skipped": "a critical batch was given"}


def test_a_network_is_refused_where_steps_are_timed() -> None:
    with pytest.raises(InvalidInputError, match="network is for steps that are predicted, and on cpu they are timed"):
        bw.tune(workload(), on="cpu", network="400Gb/s")
