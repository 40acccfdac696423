"""BERT-large under transformers' Trainer on a V100: Hugging Face's guide to training on one GPU (2022).

512 random sequences of 512 tokens, bert-large-uncased with a classification head, eager attention (the scores and
their softmax are kept: torch before 1.11), AdamW of transformers itself, gradients clipped at 1.0 and, with torch 1.x,
set to zero in place, so they are never given back. fp16 is torch's autocast with its scaler; checkpointing is the
reentrant kind.
What is printed is the device's used memory at the end, in MiB, with the context in it: 1,343 MiB before anything else.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch

import batchwright as bw
from gpu_cases.operators_of_the_time import softmax_before_1_11
from gpu_cases.optimizers_of_the_time import (
    EightBitAdamOf2022,
    TransformersAdafactor,
    TransformersAdamW,
    zeroing_in_place,
)
from gpu_cases.recipes import Recipe

_OPTIONS: dict[str, Any] = {
    "clip_norm": 1.0,
    "device_holds": "reserved and context",
    "context_bytes": 1343 * 2**20,
    "doubt": "torch 1.x and transformers 4.x of 2022 traced with those of today",
}


def recipes() -> dict[str, Recipe]:
    """Return the recipes of the guide."""
    accumulated = {**_OPTIONS, "accumulation": 4}
    made: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
        "bs4": ({}, 4, _OPTIONS),
        "bs1-ga4": ({}, 1, accumulated),
        "bs1-ga4-gc": ({"checkpointing": True}, 1, accumulated),
        "bs4-fp16": ({"fp16": True}, 4, _OPTIONS),
        "bs1-ga4-gc-fp16": ({"checkpointing": True, "fp16": True}, 1, accumulated),
        "bs4-adafactor": ({"optimizer": "adafactor"}, 4, _OPTIONS),
        "bs4-adam8bit": ({"optimizer": "adam8bit"}, 4, _OPTIONS),
    }
    return {
        f"hf-bertlarge-{name}": Recipe(partial(bert_large, **changes), batch, shape={"seq_len": 512}, options=options)
        for name, (changes, batch, options) in made.items()
    }


def bert_large(*, checkpointing: bool = False, fp16: bool = False, optimizer: str = "adamw") -> bw.Workload:
    """Return bert-large-uncased as a sequence classifier under the Trainer of 2022."""

    def build() -> torch.nn.Module:
        hf: Any = import_module("transformers")
        config = hf.BertConfig(
            hidden_size=1024,
            num_hidden_layers=24,
            num_attention_heads=16,
            intermediate_size=4096,
            vocab_size=30522,
            max_position_embeddings=512,
        )
        hf.AttentionInterface.register("of_2022", _attention_of_2022)
        config._attn_implementation = "of_2022"
        model = hf.BertForSequenceClassification(config).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": True})
        return model  # type: ignore[no-any-return]

    def loss(model: Any, inputs: Any) -> torch.Tensor:
        if not fp16:
            return model(**inputs).loss  # type: ignore[no-any-return]
        with torch.autocast("cuda", dtype=torch.float16):
            return model(**inputs).loss  # type: ignore[no-any-return]

    return bw.Workload(
        model=build,
        batch=lambda n, seq_len: {
            "input_ids": torch.randint(100, 30000, (n, seq_len)),
            "labels": torch.randint(0, 2, (n,)),
        },
        loss=loss,
        optimizer=_OPTIMIZERS[optimizer],
        scaler=(lambda: torch.amp.GradScaler("cuda")) if fp16 else None,
        name="bert-large",
    )


def _attention_of_2022(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scaling: float,
    dropout: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    scores = query @ key.transpose(2, 3) / scaling**-1
    scores = scores if mask is None else scores + mask
    weights = torch.nn.functional.dropout(softmax_before_1_11(scores), p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), None


_OPTIMIZERS = {
    "adamw": TransformersAdamW,
    "adafactor": zeroing_in_place(TransformersAdafactor),
    "adam8bit": EightBitAdamOf2022,
}
