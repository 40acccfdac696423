"""What is printed to be pasted runs as printed."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import Dataset

import batchwright as bw
from batchwright.errors import InvalidInputError, NotExpressibleError
from batchwright.planning.dialects import FRAMEWORKS

if TYPE_CHECKING:
    from pathlib import Path

Sample = tuple[torch.Tensor, torch.Tensor]


class Watched(Dataset[Sample]):
    """A dataset that remembers the order in which it was read."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(size, 4, dtype=torch.float64, generator=generator)
        self.targets = torch.randn(size, 1, dtype=torch.float64, generator=generator)
        self.order: list[int] = []

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Sample:
        self.order.append(index)
        return self.inputs[index], self.targets[index]


@pytest.mark.parametrize("policy", ["nearest", "exact"])
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_pytorch_loop_trains_like_whole_batches(policy: str, drop_last: bool) -> None:
    plan = bw.plan(10, micro_batch=4, policy=policy, drop_last=drop_last)
    data = Watched(35)
    model, twin = (torch.nn.Linear(4, 1, dtype=torch.float64) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    optimizer, twin_optimizer = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    loss_fn = torch.nn.MSELoss()
    names = {"train_set": data, "model": model, "optimizer": optimizer, "loss_fn": loss_fn, "epochs": 2}
    names["eval_set"] = data
    exec(plan.snippet("pytorch"), names)
    batch = plan.effective_batch
    read_per_epoch = len(data.order) // 2
    for start in (0, read_per_epoch):
        epoch = data.order[start : start + read_per_epoch]
        for window in (epoch[i : i + batch] for i in range(0, len(epoch), batch)):
            loss_fn(twin(data.inputs[window]), data.targets[window]).backward()
            twin_optimizer.step()
            twin_optimizer.zero_grad()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


WORKER = """
import os, sys, torch
from pathlib import Path
generator = torch.Generator().manual_seed(0)
inputs = torch.randn(20, 4, dtype=torch.float64, generator=generator)
targets = torch.randn(20, 1, dtype=torch.float64, generator=generator)
train_set = torch.utils.data.TensorDataset(inputs, targets)
model = module = torch.nn.Linear(4, 1, dtype=torch.float64)
torch.nn.init.constant_(module.weight, 0.5)
torch.nn.init.constant_(module.bias, 0.0)
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
loss_fn, epochs, eval_set = torch.nn.MSELoss(), 1, train_set
exec(Path(sys.argv[1]).read_text())
torch.save(module.state_dict(), f"{sys.argv[1]}.{torch.distributed.get_rank()}.pt")
torch.distributed.barrier()
# Not a plain exit: gloo's threads were once seen to abort a rank that had done its work.
sys.stdout.flush(), os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "policy"), [(2, "nearest"), (2, "exact"), (4, "exact")])
def test_the_pytorch_loop_under_torchrun_equals_one_big_step(tmp_path: Path, devices: int, policy: str) -> None:
    # One window that holds the whole set, so that the order in which it is read cannot matter.
    plan = bw.plan(20, micro_batch=5 if policy == "nearest" else 3, devices=devices, policy=policy)
    assert plan.effective_batch == 20
    assert plan.accumulation > 1
    assert plan.split.is_even is (policy == "nearest")
    script, snippet = tmp_path / "worker.py", tmp_path / "snippet.py"
    script.write_text(WORKER)
    snippet.write_text(plan.snippet("pytorch"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={devices}"]
    done = subprocess.run([*command, str(script), str(snippet)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    names: dict[str, Any] = {}
    exec(WORKER.split("exec(")[0], names)
    names["loss_fn"](names["module"](names["inputs"]), names["targets"]).backward()
    names["optimizer"].step()
    for rank in range(devices):
        state = torch.load(f"{snippet}.{rank}.pt")
        torch.testing.assert_close(state, names["module"].state_dict(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("framework", [f for f in FRAMEWORKS if f not in ("pytorch", "composer")])
def test_uneven_plans_are_refused_with_the_reason(framework: str) -> None:
    plan = bw.plan(1024, micro_batch=48, devices=4, policy="exact")
    with pytest.raises(NotExpressibleError) as error:
        plan.to(framework)
    assert 'micro-batches of 42 and 43 (policy="exact"), and ' in str(error.value)
    with pytest.raises(NotExpressibleError):
        plan.snippet(framework)


def test_composer_runs_uneven_plans_that_divide_over_the_devices() -> None:
    settings = bw.plan(1024, micro_batch=48, devices=4, policy="exact").to("composer")
    assert settings["train_loader"]["batch_size"] == 256
    with pytest.raises(NotExpressibleError, match="every device the same number"):
        bw.plan(1023, micro_batch=48, devices=4, policy="exact").to("composer")


def test_an_exact_plan_that_happens_to_be_even_is_accepted_everywhere() -> None:
    plan = bw.plan(80, micro_batch=4, devices=5, policy="exact")
    assert all(plan.to(framework) for framework in FRAMEWORKS)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_eval_micro_batch_and_workers_reach_those_that_have_them(framework: str) -> None:
    plan = bw.plan(80, micro_batch=4, devices=5, eval_micro_batch=61, workers=37, drop_last=True)
    text = plan.snippet(framework)
    if framework not in ("deepspeed", "torchtitan"):
        assert "37" in text
        assert "61" in text
    if framework != "deepspeed":
        compile(text, framework, "exec")


def test_drop_last_and_devices_reach_those_that_have_them() -> None:
    plan = bw.plan(80, micro_batch=4, devices=5, eval_micro_batch=61, workers=37, drop_last=True)
    assert plan.to("deepspeed")["dataloader_drop_last"] is True
    assert "--num_processes 5" in plan.snippet("accelerate")


def test_unknown_frameworks_are_named_with_the_nearest() -> None:
    plan = bw.plan(80, micro_batch=4, devices=5)
    for wrong in ("lightnin", "keras", "", 7):
        with pytest.raises(InvalidInputError, match="unknown framework"):
            plan.to(wrong)  # type: ignore[arg-type]
