"""litgpt's resource tables (tutorials/resource-tables.md, 2023): one A100 with 40 GB, the longest Alpaca sample.

Commit 8641822, torch 2.1, bitsandbytes 0.41.1, bf16 throughout, 128 samples per step by accumulation, LoRA of rank 8 on
query and value, or LLaMA-Adapter with 10 prompt tokens from the third layer on. The first iteration runs the longest
sample on purpose, so its length decides. `max_memory_allocated() / 1e9` is printed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from gpu_cases.litgpt_model import Decoder, Tuning
from gpu_cases.litgpt_step import LLAMA_2_7B, LLAMA_2_13B, PHI_1_5, STABLELM_3B, finetuning
from gpu_cases.recipes import Recipe

_DOUBT = (
    "that RMSNorm applied its weight in fp32 then was inferred from an adapter row's figure, not read at that commit"
)

# Tokens of the longest sample, by each model's own tokenizer.
_LENGTHS = {"phi": 1044, "stablelm": 1034, "llama": 1304}

_LORA = Tuning(8, frozenset({"query", "value"}))
_LORA_NF4 = Tuning(8, frozenset({"query", "value"}), quantized="nf4")
_LORA_NF4_DQ = Tuning(8, frozenset({"query", "value"}), quantized="nf4-dq")

_CASES: dict[str, tuple[Decoder, Tuning, str, int]] = {
    "lora-on-1-gpu1-3-bphi-1-5none1": (PHI_1_5, _LORA, "phi", 1),
    "lora-on-1-gpu1-3-bphi-1-5bnb-nf4-dq1": (PHI_1_5, _LORA_NF4_DQ, "phi", 1),
    "lora-on-1-gpu1-3-bphi-1-5none4": (PHI_1_5, _LORA, "phi", 4),
    "lora-on-1-gpu3-bstablelm-alphanone1": (STABLELM_3B, _LORA, "stablelm", 1),
    "lora-on-1-gpu3-bstablelm-alphabnb-nf41": (STABLELM_3B, _LORA_NF4, "stablelm", 1),
    "lora-on-1-gpu3-bstablelm-alphanone4": (STABLELM_3B, _LORA, "stablelm", 4),
    "lora-on-1-gpu7-bllama-2none1": (LLAMA_2_7B, _LORA, "llama", 1),
    "lora-on-1-gpu7-bllama-2bnb-nf41": (LLAMA_2_7B, _LORA_NF4, "llama", 1),
    "lora-on-1-gpu7-bllama-2bnb-nf4-dq1": (LLAMA_2_7B, _LORA_NF4_DQ, "llama", 1),
    "lora-on-1-gpu7-bllama-2none2": (LLAMA_2_7B, _LORA, "llama", 2),
    "lora-on-1-gpu13-bllama-2none1": (LLAMA_2_13B, _LORA, "llama", 1),
    "lora-on-1-gpu13-bllama-2bnb-nf4-dq1": (LLAMA_2_13B, _LORA_NF4_DQ, "llama", 1),
    "adapter-on-1-gpu7-bllama-2bnb-nf4-dq1": (LLAMA_2_7B, Tuning(adapter="v1", quantized="nf4-dq"), "llama", 1),
    "adapter-v2-on-1-gpu3-bstablelm-alphanone1": (STABLELM_3B, Tuning(adapter="v2"), "stablelm", 1),
    "adapter-v2-on-1-gpu3-bstablelm-alphabnb-nf41": (STABLELM_3B, Tuning(adapter="v2", quantized="nf4"), "stablelm", 1),
    "adapter-v2-on-1-gpu7-bllama-2bnb-nf4-dq1": (LLAMA_2_7B, Tuning(adapter="v2", quantized="nf4-dq"), "llama", 1),
}


def recipes() -> dict[str, Recipe]:
    """Return the recipes of the tables' rows for one card."""
    return {
        f"litgpt-rt-{case}": Recipe(
            partial(
                finetuning,
                replace(model, wide_norm_product=True),
                tuning,
                name=case,
                length=_LENGTHS[tokenizer],
                longest_alone=True,
            ),
            batch,
            shape={"seq_len": _LENGTHS[tokenizer]},
            options={"accumulation": 2, "doubt": _DOUBT},
        )
        for case, (model, tuning, tokenizer, batch) in _CASES.items()
    }
