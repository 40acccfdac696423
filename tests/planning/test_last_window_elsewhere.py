"""What the frameworks themselves do with an incomplete last window: the facts that docs/guide/plan.md states.

Their updates with `drop_last` are those that `plan` counts. Five micro-batches of one sample at accumulation 4: a full window, then one micro-batch left over. All losses are
means, so the update of the left-over one should be as large as its own gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import batchwright as bw

if TYPE_CHECKING:
    from pathlib import Path


class Ones(Dataset[dict[str, torch.Tensor]]):
    """Samples whose gradient is one."""

    def __init__(self, number: int = 5) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.ones(1)}


class Model(torch.nn.Module):
    """Its loss is its weight times the input, so a step of SGD at rate 1 moves it by the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.weight * x).mean()}


class Watching(torch.optim.SGD):
    """SGD that remembers the gradient of each step."""

    def __init__(self, model: Model) -> None:
        super().__init__(model.parameters(), lr=1.0)
        self.seen: list[float] = []

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        grad = self.param_groups[0]["params"][0].grad
        if grad is not None:
            self.seen.append(float(grad))
        return loss


def train_with_accelerate(loader: DataLoader[Any], watching: Watching, model: Model) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, optimizer, loader = accelerator.prepare(model, watching, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()


def test_accelerate_updates_on_it_with_a_quarter_of_its_gradient() -> None:
    model = Model()
    watching = Watching(model)
    train_with_accelerate(DataLoader(Ones(), batch_size=1), watching, model)
    assert watching.seen == pytest.approx([1.0, 0.25])


def train_with_lightning(loader: DataLoader[Any], watching: Watching, model: Model) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> Watching:
            return watching

    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, accumulate_grad_batches=4, enable_model_summary=False, **quiet
    )
    trainer.fit(Module(), loader)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_lightning_updates_on_it_with_a_quarter_of_its_gradient() -> None:
    model = Model()
    watching = Watching(model)
    train_with_lightning(DataLoader(Ones(), batch_size=1), watching, model)
    assert watching.seen == pytest.approx([1.0, 0.25])


def train_with_transformers(loader: DataLoader[Any], watching: Watching, model: Model, folder: Path) -> None:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=loader.batch_size or 1,
        dataloader_drop_last=loader.drop_last,
        gradient_accumulation_steps=4,
        num_train_epochs=1,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        remove_unused_columns=False,
    )
    Trainer(model=model, args=arguments, train_dataset=loader.dataset, optimizers=(watching, None)).train()


def test_transformers_updates_on_it_with_its_whole_gradient(tmp_path: Path) -> None:
    model = Model()
    watching = Watching(model)
    train_with_transformers(DataLoader(Ones(), batch_size=1), watching, model, tmp_path)
    assert watching.seen == pytest.approx([1.0, 1.0])


def train_with_ours(loader: DataLoader[Any], watching: Watching, model: Model) -> None:
    accumulator = bw.Accumulator(model, watching, 4)
    for batch in accumulator.micro_batches(loader):
        accumulator.backward(model(**batch)["loss"])


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("framework", ["transformers", "accelerate", "lightning", "ours"])
@pytest.mark.parametrize("drop_last", [True, False])
def test_an_epoch_has_the_updates_that_plan_counts(framework: str, drop_last: bool, tmp_path: Path) -> None:
    # Two windows of eight; then one micro-batch; then one that is not whole; then a whole window, nearly.
    for samples in (16, 18, 19, 23):
        model = Model()
        watching = Watching(model)
        loader = DataLoader(Ones(samples), batch_size=2, drop_last=drop_last)
        if framework == "transformers":
            train_with_transformers(loader, watching, model, tmp_path)
        elif framework == "accelerate":
            train_with_accelerate(loader, watching, model)
        elif framework == "lightning":
            train_with_lightning(loader, watching, model)
        else:
            train_with_ours(loader, watching, model)
        plan = bw.plan(8, micro_batch=2, samples=samples, drop_last=drop_last)
        assert len(watching.seen) == plan.updates_per_epoch, samples
