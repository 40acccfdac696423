"""Every dialect handed to the framework's own class. torchtitan and Composer need environments of their own:
benchmarks/dialects_elsewhere.py.
"""

from __future__ import annotations

import re
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import batchwright as bw

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Run

PLANS = [
    bw.plan(1024, micro_batch=48, devices=4, eval_micro_batch=96, workers=2, drop_last=True),
    bw.plan(80, micro_batch=4, devices=5),
    bw.plan(7, micro_batch=100),
]


@pytest.fixture
def data() -> TensorDataset:
    torch.manual_seed(0)
    return TensorDataset(torch.randn(9, 3), torch.randn(9, 1))


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_transformers_takes_keywords_and_flags(plan: bw.Plan, tmp_path: Path) -> None:
    from transformers import HfArgumentParser, TrainingArguments

    settings = plan.to("transformers")
    built = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **settings)
    flags = re.findall(r"--\w+(?: \d+| True)?", plan.snippet("transformers").partition("# or as flags")[2])
    words = [word for flag in flags if "nproc" not in flag for word in flag.split()]
    parsed = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(["--output_dir", str(tmp_path), *words])[0]  # type: ignore[arg-type]
    for arguments in (built, parsed):
        assert {name: getattr(arguments, name) for name in settings} == settings


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_accelerate_takes_the_settings(plan: bw.Plan, data: TensorDataset) -> None:
    from accelerate import Accelerator

    settings = plan.to("accelerate")
    accelerator = Accelerator(cpu=True, **settings["accelerator"])
    assert accelerator.gradient_accumulation_steps == plan.accumulation
    loader = accelerator.prepare(DataLoader(data, **settings["train_loader"]))
    assert loader.total_batch_size == plan.micro_batch


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_lightning_takes_the_settings(plan: bw.Plan) -> None:
    from lightning import Trainer

    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **plan.to("lightning")["trainer"])
    assert (trainer.accumulate_grad_batches, trainer.world_size) == (plan.accumulation, plan.devices)


def judged_by_deepspeed(config: dict[str, Any], devices: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Hand a config to DeepSpeed's own class, told that there are so many ranks; None where it refuses."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from deepspeed.runtime import config as deepspeed_config
    monkeypatch.setattr(deepspeed_config.dist, "get_rank", lambda *_, **__: 0)
    monkeypatch.setattr(deepspeed_config.dist, "get_world_size", lambda *_, **__: devices)
    try:
        return deepspeed_config.DeepSpeedConfig(dict(config))
    except AssertionError:
        return None


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_deepspeed_takes_the_settings(plan: bw.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = judged_by_deepspeed(plan.to("deepspeed"), plan.devices, monkeypatch)
    assert judged.train_batch_size == plan.effective_batch
    assert judged.gradient_accumulation_steps == plan.accumulation


def test_our_verdict_on_a_config_is_deepspeeds_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import itertools
    import json

    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    file = tmp_path / "ds.json"
    verdicts = []
    for total, micro, steps, devices in itertools.product((None, 3, 24, 32), (None, 1, 4), (None, 1, 2, 3), (1, 4)):
        config: dict[str, Any] = {k: v for k, v in zip(keys, (total, micro, steps), strict=True) if v is not None}
        file.write_text(json.dumps({**config, "steps_per_print": 10}))
        ours = bw.check_config(file, devices=devices)
        theirs = judged_by_deepspeed(config, devices, monkeypatch)
        assert ours.agrees == (theirs is not None), (config, devices)
        if theirs is not None:
            assert (ours.effective_batch, ours.micro_batch, ours.accumulation) == (
                theirs.train_batch_size,
                theirs.train_micro_batch_size_per_gpu,
                theirs.gradient_accumulation_steps,
            )
        verdicts.append(ours.agrees)
    assert set(verdicts) == {True, False}


def test_a_file_of_training_arguments_means_to_us_what_it_means_to_transformers(tmp_path: Path, run: Run) -> None:
    from transformers import HfArgumentParser, TrainingArguments

    file = tmp_path / "args.yaml"
    file.write_text(
        f"output_dir: {tmp_path}\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 4\nuse_cpu: true\n"
    )
    (arguments,) = HfArgumentParser(TrainingArguments).parse_yaml_file(str(file))  # type: ignore[arg-type]
    ours = bw.check_config(file, devices=1)
    assert ours.effective_batch == arguments.train_batch_size * arguments.gradient_accumulation_steps == 16
    assert run("plan", "--check", str(file), "--devices", "5").out.splitlines()[1] == "  4 x 4 x 5 devices = 80"


def test_the_printed_accelerate_script_runs(data: TensorDataset) -> None:
    from accelerate import Accelerator

    text = bw.plan(6, micro_batch=2).snippet("accelerate").replace("from accelerate import Accelerator\n", "")
    model = torch.nn.Linear(3, 1)
    before = model.weight.detach().clone()
    names = {
        "Accelerator": partial(Accelerator, cpu=True),
        "train_set": data,
        "eval_set": data,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss_fn": torch.nn.MSELoss(),
    }
    exec(text, names)
    assert not torch.equal(before, model.weight)
