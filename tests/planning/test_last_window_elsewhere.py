"""What the frameworks themselves do with an incomplete last window: the facts that docs/plan.md states.

Five micro-batches of one sample at accumulation 4: a full window, then one micro-batch left over. All losses are
means, so the update of the left-over one should be as large as its own gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

if TYPE_CHECKING:
    from pathlib import Path


class Ones(Dataset[dict[str, torch.Tensor]]):
    """Five samples whose gradient is one."""

    def __len__(self) -> int:
        return 5

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


def test_accelerate_updates_on_it_with_a_quarter_of_its_gradient() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = Model()
    watching = Watching(model)
    model, optimizer, loader = accelerator.prepare(model, watching, DataLoader(Ones(), batch_size=1))
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
    assert watching.seen == pytest.approx([1.0, 0.25])


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_lightning_updates_on_it_with_a_quarter_of_its_gradient() -> None:
    import lightning

    model = Model()
    watching = Watching(model)

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
    trainer.fit(Module(), DataLoader(Ones(), batch_size=1))
    assert watching.seen == pytest.approx([1.0, 0.25])


def test_transformers_updates_on_it_with_its_whole_gradient(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    model = Model()
    watching = Watching(model)
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        num_train_epochs=1,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        remove_unused_columns=False,
    )
    Trainer(model=model, args=arguments, train_dataset=Ones(), optimizers=(watching, None)).train()
    assert watching.seen == pytest.approx([1.0, 1.0])
