"""Hand the Composer and torchtitan dialects to those frameworks' own classes, on a CPU.

    python benchmarks/dialects_elsewhere.py

Neither installs beside the packages of `make test`: Composer 0.32 pins an older torch, torchtitan 0.3 brings some
fifty packages. So each gets a fresh environment in a temporary folder (a few minutes, about 2 GB), and is asked
there, in a process of its own, what it makes of our settings.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

TORCH = ["torch==2.13.0"]
# Composer's own requirements, less torch and torchvision, whose pins exclude this torch.
COMPOSER_NEEDS = [
    *("pyyaml", "tqdm", "torchmetrics<1.7.5", "torch_optimizer<0.4", "requests", "numpy<2.3", "psutil", "coolname<3"),
    *(
        "tabulate==0.9.0",
        "py-cpuinfo",
        "packaging<25.1",
        "importlib-metadata<9",
        "pillow<12",
        "mosaicml-cli<0.8,>=0.5.25",
    ),
]
RECIPES = {
    "composer": [TORCH, ["--no-deps", "mosaicml==0.32.1"], COMPOSER_NEEDS, ["--no-deps", "torchvision==0.28.0"]],
    "torchtitan": [TORCH, ["torchtitan==0.3.0"], ["--no-deps", "triton"]],
}


def main() -> None:
    import batchwright as bw

    plans = [
        bw.plan(1024, micro_batch=48, devices=4),
        bw.plan(80, micro_batch=4, devices=5),
        bw.plan(258, micro_batch=43),
        bw.plan(10, micro_batch=4, policy="exact"),
    ]
    for framework, recipe in RECIPES.items():
        with tempfile.TemporaryDirectory() as folder:
            python = make_environment(Path(folder), recipe)
            for plan in plans:
                if framework == "torchtitan" and not plan.split.is_even:
                    continue
                case = {"settings": plan.to(framework), "devices": plan.devices}
                command = [python, __file__, framework, json.dumps(case)]
                done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
                answer = done.stdout.strip().splitlines()[-1] if done.returncode == 0 else done.stderr[-600:]
                print(f"{framework:<11} {plan!r}: {answer}", flush=True)


def make_environment(folder: Path, recipe: list[list[str]]) -> str:
    venv.create(folder / "venv", with_pip=True)
    python = str(folder / "venv" / "bin" / "python")
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(TORCH))
    for packages in recipe:
        limits = [] if "--no-deps" in packages else ["--constraint", str(constraints)]
        subprocess.run([python, "-m", "pip", "install", "-q", "-q", *limits, *packages], check=True)
    return python


def ask_composer(settings: dict[str, Any], devices: int) -> str:
    """Train one epoch with a tail on one device's share, and compare it with whole-batch steps."""
    import torch

    # torchvision's compiled operators do not load beside a CPU build of torch; Composer only needs the names.
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    from composer import ComposerModel, Trainer
    from torch.utils.data import DataLoader, TensorDataset

    class Model(ComposerModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.sizes: list[int] = []

        def forward(self, batch: list[torch.Tensor]) -> Any:
            self.sizes.append(len(batch[0]))
            return self.layer(batch[0])

        def loss(self, outputs: torch.Tensor, batch: list[torch.Tensor]) -> torch.Tensor:
            return torch.nn.functional.mse_loss(outputs, batch[1])

    torch.manual_seed(0)
    whole = settings["train_loader"]["batch_size"]
    inputs, targets = torch.randn(whole + whole // 2, 1), torch.randn(whole + whole // 2, 1)
    model, twin = Model(), torch.nn.Linear(1, 1)
    twin.load_state_dict(model.layer.state_dict())
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(TensorDataset(inputs, targets), **settings["train_loader"]),
        max_duration="1ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        device="cpu",
        progress_bar=False,
        **settings["trainer"],
    )
    trainer.fit()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for window in (slice(0, whole), slice(whole, None)):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(twin(inputs[window]), targets[window]).backward()
        optimizer.step()
    error = float((twin.weight - model.layer.weight).abs().max())
    return (
        f"accepted; passes {model.sizes}, weights within {error:.0e} of whole-batch steps, incomplete window included"
    )


def ask_torchtitan(settings: dict[str, Any], devices: int) -> str:
    """Let its Trainer derive the accumulation, up to the point where it would build the model on a GPU."""
    import dataclasses
    import types

    import torch._utils

    torch._utils._get_available_device_type = lambda: "cpu"
    from torchtitan.components import metrics
    from torchtitan.config import ConfigManager
    from torchtitan.trainer import Trainer

    class ReachedError(Exception):
        pass

    def stop(*_: object, **__: object) -> None:
        raise ReachedError

    monitor = types.SimpleNamespace(device_name="cpu", device_capacity_gib=1.0, reset_peak_stats=lambda: None)
    metrics.DeviceMemoryMonitor = lambda *_: monitor
    os.environ.update(LOCAL_RANK="0", RANK="0", NGPU=str(devices))
    flags = [word for name, value in settings.items() for word in (f"--training.{name}", str(value))]
    base = ["--module", "llama3", "--config", "llama3_debugmodel", "--training.disable_cuda_graphs"]
    config = ConfigManager().parse_args([*base, "--comm.mode", "fake_backend", *flags])
    config.model_spec = dataclasses.replace(config.model_spec, parallelize_fn=stop)
    trainer = Trainer.__new__(Trainer)
    try:
        trainer.__init__(config)
    except ReachedError:
        return f"accepted; it derives accumulation {trainer.gradient_accumulation_steps}"
    raise AssertionError("its Trainer was built without reaching the model")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        case = json.loads(sys.argv[2])
        print({"composer": ask_composer, "torchtitan": ask_torchtitan}[sys.argv[1]](**case))
    else:
        main()
