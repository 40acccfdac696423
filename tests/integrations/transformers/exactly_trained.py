"""Tiny heads from transformers, samples of unequal length, and the gradients that a real Trainer steps with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

LENGTHS = (4, 30, 7, 22, 5, 28, 3, 17, 12, 9)
SMALL: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
BERT = {**SMALL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3}


def build(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    if name.startswith("Bert"):
        family, numbers = "Bert", BERT
    elif name.startswith("T5"):
        family = "T5"
        numbers = {"vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
        numbers |= {"dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0}
    elif name.startswith("Mixtral"):
        family = "Mixtral"
        numbers = {**SMALL, "num_key_value_heads": 1, "num_local_experts": 4, "experts_implementation": "eager"}
    else:
        family, numbers = "Llama", {**SMALL, "num_key_value_heads": 1, "num_labels": 3}
    config = getattr(transformers, f"{family}Config")(**{**numbers, **options})
    return getattr(transformers, name)(config)


def samples(name: str, lengths: Sequence[int] = LENGTHS) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for length in lengths:
        ids = torch.randint(3, 60, (length,), generator=generator)
        if "Sequence" in name:
            labels = torch.randint(0, 3, (), generator=generator)
        elif "Token" in name:
            labels = torch.randint(0, 3, (length,), generator=generator)
        elif "Masked" in name:
            labels = torch.where(torch.rand(length, generator=generator) < 0.5, ids, -100)
            labels[0] = ids[0]
        else:
            labels = ids.clone()
        found.append({"input_ids": ids, "labels": labels})
    return found


def collate(chosen: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([sample["input_ids"] for sample in chosen], batch_first=True)
    mask = pad([torch.ones_like(sample["input_ids"]) for sample in chosen], batch_first=True)
    labels = [sample["labels"] for sample in chosen]
    joined = torch.stack(labels) if labels[0].dim() == 0 else pad(labels, batch_first=True, padding_value=-100)
    return {"input_ids": ids, "attention_mask": mask, "labels": joined}


class Recorder(TrainerCallback):
    """Keeps the gradient of every step, and the losses that were logged."""

    def __init__(self) -> None:
        self.gradients: list[torch.Tensor] = []
        self.losses: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.gradients.append(gradient_of(model))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])


class InOrder(Trainer):
    """A Trainer that takes samples as they come."""

    def _get_train_sampler(self, *_: Any) -> Any:
        data: Any = self.train_dataset
        return torch.utils.data.SequentialSampler(data)


def make_trainer(model: Any, data: Any, folder: Path | str, micro_batch: int, accumulation: int, **options: Any) -> Any:
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=1,
        learning_rate=0.0,
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        dataloader_pin_memory=False,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    recorder = Recorder()
    trainer: Any = InOrder(model, args, train_dataset=data, data_collator=collate, callbacks=[recorder])
    trainer.remove_callback(PrinterCallback)
    trainer.recorder = recorder
    return trainer


def gradient_of(model: Any) -> torch.Tensor:
    # A weight without a gradient counts as zeros: DDP makes them, one process does not.
    return torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in model.parameters()]
    )


def big_batch(model: Any, data: list[dict[str, Any]]) -> tuple[torch.Tensor, float]:
    """Return gradient and loss of all samples at once, by plain autograd."""
    model.zero_grad()
    loss = model.train()(**collate(data)).loss
    loss.backward()
    gradient = gradient_of(model)
    model.zero_grad()
    return gradient, float(loss.detach())


def relative_error(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found - right).norm() / right.norm())
