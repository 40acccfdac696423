"""The step of litgpt's finetuning scripts: chunked head, chunked cross entropy, AdamW.

Accumulated over a few micro-batches; Fabric's wrapper returns the bf16 logits in fp32; the loop's variable `logits`
lives through backward and, with its graph, through the next forward. With 4-bit weights litgpt takes bitsandbytes'
paged AdamW, whose moments the driver keeps where there is room, outside torch's counters.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

import batchwright as bw
from gpu_cases.litgpt_model import Decoder, Tuning, build_gpt
from gpu_cases.loop_variables import hold
from gpu_cases.optimizers_of_the_time import StateElsewhere

_CHUNK = 128

PHI_1_5 = Decoder(24, 2048, 32, 51200, 8192, rotary=0.5, parallel=True, shared_norm=True, bias=True, head_bias=True)
PHI_2 = Decoder(32, 2560, 32, 51200, 10240, rotary=0.4, parallel=True, shared_norm=True, bias=True, head_bias=True)
PHI_3 = Decoder(32, 3072, 32, 32064, 8192, gated="silu", rms_norm=True)
# 50,254 tokens padded to a multiple of 512.
STABLELM_3B = Decoder(16, 4096, 32, 50688, 16384, rotary=0.25, parallel=True, bias=True)
LLAMA_2_7B = Decoder(32, 4096, 32, 32000, 11008, gated="silu", rms_norm=True)
LLAMA_2_13B = Decoder(40, 5120, 40, 32000, 13824, gated="silu", rms_norm=True)
LLAMA_3_8B = Decoder(32, 4096, 32, 128256, 14336, groups=8, gated="silu", rms_norm=True)
LLAMA_32_1B = Decoder(16, 2048, 32, 128256, 8192, groups=8, gated="silu", rms_norm=True)
MISTRAL_7B = Decoder(32, 4096, 32, 32000, 14336, groups=8, gated="silu", rms_norm=True)
TINY_LLAMA = Decoder(22, 2048, 32, 32000, 5632, groups=4, gated="silu", rms_norm=True)
FALCON_7B = Decoder(32, 4544, 71, 65024, 18176, groups=1, parallel=True, shared_norm=True)
GEMMA_2B = Decoder(
    18, 2048, 8, 256000, 16384, groups=1, gated="gelu", rms_norm=True, unit_offset=True, scaled_embedding=True
)
GEMMA_2_9B = Decoder(
    42,
    3584,
    16,
    256000,
    14336,
    groups=8,
    head_size=256,
    gated="gelu",
    rms_norm=True,
    unit_offset=True,
    scaled_embedding=True,
    post_norms=True,
    softcapping=True,
    sliding_layers=2,
)


def finetuning(
    model: Decoder,
    tuning: Tuning,
    *,
    name: str,
    length: int,
    longest_alone: bool = False,
    wide_logits: bool = True,
) -> bw.Workload:
    """Return a litgpt finetuning step on sequences of a length.

    `longest_alone`: only one sample is that long, so what the one before it left is not added to its peak.
    `wide_logits`: Fabric casts what a model returns to the default type, so the cross entropy is in fp32.
    """
    return bw.Workload(
        model=lambda: build_gpt(model, tuning, length=length),
        batch=lambda n, seq_len: torch.randint(0, model.vocabulary, (n, seq_len)),
        loss=partial(_loss, longest_alone=longest_alone, wide_logits=wide_logits),
        optimizer=StateElsewhere if tuning.quantized else lambda params: torch.optim.AdamW(params, lr=2e-4),
        name=name,
    )


def _loss(model: Any, tokens: torch.Tensor, *, longest_alone: bool, wide_logits: bool) -> torch.Tensor:
    if longest_alone:
        hold(model, None)
    logits = [part.float() if wide_logits else part for part in model(tokens, _CHUNK)]
    hold(model, logits)
    logits[-1] = logits[-1][..., :-1, :]
    targets = tokens[..., 1:]
    losses = [
        F.cross_entropy(part.reshape(-1, part.size(-1)), target.reshape(-1), reduction="none")
        for part, target in zip(logits, targets.split(_CHUNK, dim=1), strict=True)
    ]
    counted = (targets != -100).sum()
    return torch.cat(losses).sum() / counted.maximum(torch.ones_like(counted))
