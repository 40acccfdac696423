"""The problem of tests/noise/regression.py, trained by transformers, Lightning and accelerate: one loop for each."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import GradientState
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler

from batchwright.integrations.accelerate import watch
from tests.noise.regression import STEPS, batches_of, loss_of, make_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MICRO = 4


def parts(number: int, steps: int = STEPS) -> list[torch.Tensor]:
    """The micro-batches of all ranks, step after step."""
    return list(itertools.chain.from_iterable(batches_of(step, [MICRO] * number) for step in range(steps)))


class WithLoss(nn.Module):
    """What a Trainer takes: the loss is in the output."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = make_model()
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = x.to(next(self.parameters()).dtype)  # an audit compares in fp32
        return {"loss": (self.drop(self.net(x)) - x.sum(1, keepdim=True)).pow(2).mean()}


def trained_by_transformers(folder: Path, number: int, callbacks: list[Any], **options: Any) -> Any:
    """Train on windows of so many micro-batches on all ranks; returns the Trainer."""
    dropout, steps = options.pop("dropout", 0.0), options.pop("steps", STEPS)
    torch.manual_seed(3)
    model = WithLoss(dropout)
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=MICRO, use_cpu=True, num_train_epochs=1,
        lr_scheduler_type="constant", max_grad_norm=0.0, logging_steps=1, disable_tqdm=True, save_strategy="no",
        ddp_backend="gloo" if "WORLD_SIZE" in os.environ else None, **{"report_to": [], **options},
    )  # fmt: skip
    arguments.gradient_accumulation_steps = number // arguments.world_size
    rows = [{"x": row} for row in torch.cat(parts(number, steps))]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = transformers.Trainer(
        model, arguments, train_dataset=rows, callbacks=callbacks, optimizers=(optimizer, None),
        data_collator=lambda given: {"x": torch.stack([row["x"] for row in given])},
    )  # fmt: skip
    trainer._get_train_sampler = lambda dataset=None: SequentialSampler(rows)  # type: ignore[method-assign,assignment]
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return trainer


class Module(pl.LightningModule):
    """Keeps its losses in a list, as many do."""

    def __init__(self, number: int, *, rank: int = 0, ranks: int = 1, dropout: float = 0.0, steps: int = STEPS) -> None:
        super().__init__()
        self.net, self.drop = make_model(), nn.Dropout(dropout)
        self.batches = parts(number, steps)[rank::ranks]
        self.losses: list[float] = []
        self.batch_size = 2

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        # Not through forward: what a module's own step calls is its own matter.
        loss = loss_of(lambda x: self.drop(self.net(x)), batch)
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def train_dataloader(self) -> Any:
        return DataLoader(self.batches, batch_size=None)  # type: ignore[arg-type]


def trained_by_lightning(folder: Path, module: Module, accumulation: int, callbacks: list[Any], **options: Any) -> Any:
    """Fit a module; returns the Trainer."""
    torch.manual_seed(3)
    trainer = pl.Trainer(
        **{
            "max_epochs": 1, "accelerator": "cpu", "accumulate_grad_batches": accumulation, "callbacks": callbacks,
            "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "log_every_n_steps": 1,
            "enable_model_summary": False, "default_root_dir": str(folder), "use_distributed_sampler": False, **options,
        }
    )  # fmt: skip
    trainer.fit(module)
    return trainer


def trained_by_accelerate(
    number: int,
    *,
    is_watched: bool = True,
    dropout: float = 0.0,
    steps: int = STEPS,
    prepare: Callable[[Accelerator], None] = lambda _: None,
    **options: Any,
) -> tuple[nn.Module, Any, list[float]]:
    """Train with `accelerator.accumulate`; returns the model, the watch and the losses of this process."""
    # One for the whole process: a Trainer that ran before may have left it at the end of its loader.
    GradientState._reset_state()
    accelerator = Accelerator(
        cpu=True, **{name: options.pop(name) for name in ("log_with", "project_dir") if name in options}
    )
    accelerator.gradient_accumulation_steps = number // accelerator.num_processes
    prepare(accelerator)
    torch.manual_seed(3)
    plain = nn.Sequential(make_model(), nn.Dropout(dropout))
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.05))
    watched = watch(accelerator, model, optimizer, micro_batch=MICRO, **options) if is_watched else None
    losses = []
    for batch in parts(number, steps)[accelerator.process_index :: accelerator.num_processes]:
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            losses.append(loss.item())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
            optimizer.zero_grad()
    # Not end_training(): it ends the process group, too.
    for tracker in accelerator.trackers:
        tracker.finish()
    return plain, watched, losses
