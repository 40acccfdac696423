"""A transformers Trainer: a small Llama learns characters, on text that ships with Python.

Tune it, then train with the answer (here from one machine):

batchwright tune examples/trainer.py:workload --memory 1GiB --limit 128
python examples/trainer.py --micro-batch 40 --accumulation 1 --learning-rate 0.00274

All that was added for batchwright is `workload`, and a callback that watches the batch during the training.
"""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, default_data_collator

import batchwright as bw
from batchwright.integrations.transformers import BatchwrightCallback

NUM_WINDOWS, CONTEXT = 2048, 32
# Suits an effective batch of 64, the default of --noise-batch.
LEARNING_RATE = 3e-3


def windows() -> list[dict[str, torch.Tensor]]:
    """Stretches of Python's own help on its topics, as bytes; labels are the same, the model shifts them."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics)).encode()[: NUM_WINDOWS * CONTEXT]
    codes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(NUM_WINDOWS, CONTEXT)
    return [{"input_ids": row, "labels": row} for row in codes]


def make_model() -> LlamaForCausalLM:
    """Two layers of width 32, over bytes."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT,
    )
    return LlamaForCausalLM(config)  # type: ignore[no-untyped-call]


def workload() -> bw.Workload:
    """What batchwright is pointed at: model and data of this script, the model's own loss, the Trainer's optimizer."""
    return bw.Workload(
        model=make_model,
        data=windows(),
        collate=default_data_collator,
        loss=lambda model, batch: model(**batch).loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE),
    )


def train(micro_batch: int, accumulation: int, learning_rate: float) -> None:
    """Train, and tell how it went."""
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        learning_rate=learning_rate,
        num_train_epochs=2,
        logging_steps=8,
        save_strategy="no",
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to="none",
    )
    callback = BatchwrightCallback()
    trainer = Trainer(
        model=make_model(),
        args=arguments,
        train_dataset=windows(),
        data_collator=default_data_collator,
        callbacks=[callback],
    )
    rate = trainer.train().metrics["train_samples_per_second"]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {losses[0]:.3f} at the beginning, {losses[-1]:.3f} at the end of {trainer.state.global_step} steps")
    print(f"effective batch {micro_batch} x {accumulation} = {micro_batch * accumulation}, {rate:,.0f} samples/s")
    print(f"critical batch {callback.critical_batch}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    train(**vars(parser.parse_args()))
