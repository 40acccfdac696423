"""The peers of benchmarks/exactness.py: what gradient each hands to the optimizer, window by window.

All get the same samples in the same order, fp32, one process, a rate of 0 and no clipping, so that every window starts
from the same weights.
"""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from exactness_models import collate, loss_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from exactness_models import Sample
    from torch import nn


class Watching(torch.optim.SGD):
    """SGD at rate 0 that keeps the gradient of each step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.0)
        self.seen: list[list[torch.Tensor]] = []

    def step(self, closure: Any = None) -> Any:
        """Keep the gradients, once the closure, if any, has made them."""
        result = super().step(closure)
        weights = self.param_groups[0]["params"]
        self.seen.append([torch.zeros_like(w) if w.grad is None else w.grad.clone() for w in weights])
        return result


def trainer(model: nn.Module, samples: Sequence[Sample], micro_batch: int, accumulation: int) -> Watching:
    transformers = import_module("transformers")
    watching = Watching(model)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=accumulation,
            num_train_epochs=1,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            train_sampling_strategy="sequential",
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
            remove_unused_columns=False,
        )
        transformers.Trainer(
            model=model,
            args=arguments,
            train_dataset=list(samples),
            data_collator=collate,
            optimizers=(watching, None),
        ).train()
    return watching


def _loader(samples: Sequence[Sample], micro_batch: int) -> Any:
    return torch.utils.data.DataLoader(list(samples), batch_size=micro_batch, collate_fn=collate)  # type: ignore[arg-type]


def accelerate(model: nn.Module, samples: Sequence[Sample], micro_batch: int, accumulation: int) -> Watching:
    accelerator = import_module("accelerate").Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    watching = Watching(model)
    model, optimizer, loader = accelerator.prepare(model, watching, _loader(samples, micro_batch))
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    return watching


def lightning(model: nn.Module, samples: Sequence[Sample], micro_batch: int, accumulation: int) -> Watching:
    pytorch = import_module("lightning.pytorch")
    watching = Watching(model)
    base: Any = pytorch.LightningModule

    class Training(base):  # type: ignore[misc]
        """The model, as Lightning wants it."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            """Return the head's own loss."""
            return loss_of(self.model, batch)

        def configure_optimizers(self) -> Watching:
            """Hand over the optimizer that watches."""
            return watching

    pytorch.Trainer(
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=accumulation,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Training(), _loader(samples, micro_batch))
    return watching


PEERS: dict[str, Callable[..., Watching]] = {
    "transformers Trainer": trainer,
    "accelerate accumulate": accelerate,
    "lightning accumulate_grad_batches": lightning,
}


def quietly(peer: Callable[..., Watching], *args: Any) -> Watching:
    """Run a peer without what it prints."""
    logging.disable(logging.WARNING)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            return peer(*args)
    finally:
        logging.disable(logging.NOTSET)
