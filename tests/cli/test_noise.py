"""`batchwright noise` as a person types it, the wrong things too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from batchwright.noise.noise_run import measure_noise
from batchwright.targets import load_workload

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Run

FILE = """
import torch
import batchwright as bw


def loss(model, batch):
    return (model(batch[0]) - batch[1]).pow(2).mean()


def workload(**changes):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(600, 6, generator=generator)
    labels = inputs.sum(1, keepdim=True) + torch.randn(600, 1, generator=generator)
    fields = {
        "model": lambda: torch.nn.Linear(6, 1),
        "data": list(zip(inputs, labels)),
        "loss": loss,
        "optimizer": lambda params: torch.optim.AdamW(params, lr=0.01),
    }
    return bw.Workload(**{**fields, **changes})


def talks():
    print("I talk")
    return workload()


def made():
    return workload(data=None, batch=lambda n, width=6: (torch.randn(n, width), torch.randn(n, 1)))


def counted():
    return workload(units=lambda batch: 3 * len(batch[0]))


def infers():
    return workload(optimizer=None)


def at_zero():
    def optimizer(params):
        made = torch.optim.AdamW(params, lr=0.01)
        made.register_step_post_hook(lambda *_: made.param_groups[0].update(lr=0.0))
        return made

    return workload(optimizer=optimizer)


def still():
    return workload(loss=lambda model, batch: 0.0 * loss(model, batch))


def breaks():
    def fail(model, batch):
        raise KeyError("labels")

    return workload(loss=fail)


def diverges():
    return workload(loss=lambda model, batch: loss(model, batch) * float("nan"))
"""


@pytest.fixture
def target(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(FILE)
    return str(tmp_path / "train.py")


def test_the_answer_the_trend_and_the_verdict(run: Run, target: str) -> None:
    ran = run("noise", f"{target}:talks", "--effective-batch", "32", "--steps", "40")
    assert ran.code == 0
    assert "critical batch" in ran.out.splitlines()[0]
    assert "micro-batch 8 x accumulation 4 x devices 1" in ran.out
    assert "trend: " in ran.out
    assert "verdict: " in ran.out
    assert "learning rate x" in ran.out
    assert "I talk" not in ran.out
    assert "step 40 of 40" in ran.err


def test_json_has_the_agreed_keys_and_is_the_same_twice(run: Run, target: str) -> None:
    first, second = (
        json.loads(run("noise", f"{target}:workload", "--effective-batch", "32", "--steps", "40", "--json").out)
        for _ in range(2)
    )
    for told in (first, second):
        told.pop("seconds_per_step")
    assert first == second
    keys = {"schema", "critical_batch", "effective_batch", "observations", "steps_needed"}
    assert keys | {"history", "verdict", "recommendation"} <= set(first)
    assert set(first["critical_batch"]) >= {"value", "low", "high", "resolved", "unit"}
    assert first["critical_batch"]["unit"] == "samples"
    assert len(first["history"]) == 8


def test_another_seed_is_another_run(target: str) -> None:
    first, second = (
        measure_noise(load_workload(f"{target}:workload"), effective_batch=64, steps=20, seed=seed) for seed in (0, 1)
    )
    assert first.to_dict()["history"] != second.to_dict()["history"]


def test_units_are_named_and_told_in_samples_too(target: str) -> None:
    text = str(measure_noise(load_workload(f"{target}:counted"), effective_batch=32, steps=40, unit="tokens"))
    assert "(tokens)" in text
    assert "in samples: " in text


def test_a_batch_that_is_made_needs_no_data(run: Run, target: str) -> None:
    ran = run("noise", f"{target}:made", "--effective-batch", "16", "--steps", "10", "--shape", "width=6")
    assert "critical batch" in ran.out


def test_step_times_give_the_batch_that_is_soonest(target: str) -> None:
    times = {16: 0.010, 32: 0.012, 64: 0.016}
    told = measure_noise(load_workload(f"{target}:workload"), effective_batch=32, steps=40, times=times).to_dict()
    assert told["best_batch"]["value"] > 0
    assert "reaches the loss soonest" in told["recommendation"]


def test_every_and_clip_norm_and_micro_batch(run: Run, target: str) -> None:
    options = ["--effective-batch", "16", "--micro-batch", "4", "--steps", "40"]
    told = json.loads(run("noise", f"{target}:workload", *options, "--json").out)
    assert (told["micro_batch"], told["accumulation"]) == (4, 4)
    workload = load_workload(f"{target}:workload")
    measured = measure_noise(workload, effective_batch=16, micro_batch=4, steps=40, every=2, clip_norm=0.1)
    assert measured.to_dict()["observations"] == 10


def test_an_interval_that_is_not_resolved_ends_with_1_and_says_what_it_takes(run: Run, target: str) -> None:
    ran = run("noise", f"{target}:still", "--effective-batch", "8", "--steps", "12")
    assert ran.code == 1
    assert "at least 0 samples (upper end not resolved)" in ran.out
    assert "the number of steps is unknown" in ran.out


def test_a_schedule_at_zero_and_times_without_a_signal_are_lines_not_errors(run: Run, target: str) -> None:
    assert run("noise", f"{target}:at_zero", "--effective-batch", "16", "--steps", "12").code in (0, 1)
    still = load_workload(f"{target}:still")
    text = str(measure_noise(still, effective_batch=8, steps=12, times={8: 0.1, 16: 0.2}))
    assert "no batch can be named as the soonest" in text


def test_a_batch_above_the_data_is_refused(run: Run, target: str) -> None:
    ran = run("noise", f"{target}:workload", "--effective-batch", "1024")
    assert ran.code == 2
    assert "a step of 1,024 samples was asked for, but data= holds 600 samples" in ran.err


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        (["workload", "--effective-batch", "0"], 2, "--effective-batch must be a whole number"),
        (["workload", "--steps", "many"], 2, "--steps must be a whole number"),
        (["workload", "--effective-batch", "10", "--micro-batch", "4"], 2, "no whole number of micro-batches of 4"),
        (["workload", "--effective-batch", "4096", "--micro-batch", "2048"], 2, "data= holds 600 samples"),
        (["workload", "--effective-batch", "1024"], 2, "try: --effective-batch 300 or less"),
        (["workload", "--times", "32=0.1"], 2, "try: batchwright tune TARGET, which measures them"),
        (["workload", "--plot", "trend.png"], 2, "batchwright report: the page draws it"),
        (["workload", "--on", "tpu"], 2, "no device is called 'tpu'"),
        (["workload", "--shape", "width=6"], 2, "takes its samples from data="),
        (["infers"], 2, "this one only infers"),
        (["breaks"], 3, "KeyError: 'labels'"),
        (["diverges", "--steps", "8"], 1, "the loss is nan from step 1 on: training ended there"),
        (["nothing"], 2, "has no function 'nothing'"),
    ],
)
def test_wrong_usage_says_what_was_asked(run: Run, target: str, options: list[str], code: int, told: str) -> None:
    function, *rest = options
    ran = run("noise", f"{target}:{function}", *rest)
    assert (ran.code, ran.out) == (code, "")
    assert told in ran.err


@pytest.mark.slow
def test_ranks_of_torchrun_give_one_answer(target: str, tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = ["-m", "batchwright", "noise", f"{target}:workload", "--effective-batch", "32", "--steps", "30", "--json"]
    done = subprocess.run(
        [*launcher, *command],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["devices"], told["micro_batch"], told["accumulation"]) == (2, 4, 4)
