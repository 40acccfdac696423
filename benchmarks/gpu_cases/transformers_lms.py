"""Language models of transformers in xMem's loop, on two small cards and on an A100.

`AutoModel...from_config` in fp32, train mode, wikitext-2 cut at 128 tokens and padded to the longest of the batch,
labels as the collator of causal language modelling makes them, torch 2.6, three iterations, `zero_grad()` at the start
of each, optimizers with their defaults. Sizes are those of the models' config.json files on the Hub.

Not recorded there: the version of transformers. Attention is taken as it was in the first half of 2025 (SDPA for GPT-2,
OPT, Llama and Qwen, eager for GPT-Neo and T5), the loss as it is today (no shifted copy of the logits).
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

import batchwright as bw
from gpu_cases.loop_variables import hold
from gpu_cases.optimizers_of_the_time import TransformersAdafactor
from gpu_cases.recipes import Recipe

if TYPE_CHECKING:
    from collections.abc import Callable

_OPTIONS = {
    "steps": 3,
    "device_holds": "reserved and context",
    "doubt": "version of transformers not recorded; the loop was not found, so that it holds its outputs is assumed",
}
_ONE_LINE = {
    **_OPTIONS,
    "doubt": "one line of wikitext, at most 128 tokens: taken as 128; version of transformers not recorded",
    # A hosted notebook. There what was measured is what is reserved, as if the start that NVML's peak is told from
    # held the context already.
    "context_from": ("xmem-43", "xmem-44", "xmem-46"),
}

# name: config class, model class, attention, sizes
_MODELS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "gpt-neo-125m": (
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        "eager",
        {
            "hidden_size": 768,
            "num_layers": 12,
            "num_heads": 12,
            "attention_types": [[["global", "local"], 6]],
            "vocab_size": 50257,
            "max_position_embeddings": 2048,
            "embed_dropout": 0.0,
            "attention_dropout": 0.0,
            "resid_dropout": 0.0,
        },
    ),
    "t5-small": (
        "T5Config",
        "T5ForConditionalGeneration",
        "eager",
        {
            "d_model": 512,
            "d_kv": 64,
            "d_ff": 2048,
            "num_layers": 6,
            "num_decoder_layers": 6,
            "num_heads": 8,
            "vocab_size": 32128,
            "decoder_start_token_id": 0,
        },
    ),
    "cerebras-gpt-111m": (
        "GPT2Config",
        "GPT2LMHeadModel",
        "sdpa",
        {
            "n_embd": 768,
            "n_layer": 10,
            "n_head": 12,
            "n_inner": 3072,
            "n_positions": 2048,
            "activation_function": "gelu",
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    "distilgpt2": ("GPT2Config", "GPT2LMHeadModel", "sdpa", {"n_layer": 6}),
    "opt-125m": ("OPTConfig", "OPTForCausalLM", "sdpa", {}),
    "opt-350m": (
        "OPTConfig",
        "OPTForCausalLM",
        "sdpa",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "ffn_dim": 4096,
            "word_embed_proj_dim": 512,
            "do_layer_norm_before": False,
        },
    ),
    "llama-3.2-3b": (
        "LlamaConfig",
        "LlamaForCausalLM",
        "sdpa",
        {
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 28,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-4b": (
        "Qwen3Config",
        "Qwen3ForCausalLM",
        "sdpa",
        {
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek-r1-distill-qwen-1.5b": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        "sdpa",
        {
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": False,
        },
    ),
}

# case: model, optimizer, batch
_CASES: dict[str, tuple[str, str, int]] = {
    "xmem-26": ("gpt-neo-125m", "Adam", 25),
    "xmem-27": ("gpt-neo-125m", "SGD", 35),
    "xmem-30": ("t5-small", "AdamW", 29),
    "xmem-31": ("cerebras-gpt-111m", "AdamW", 35),
    "xmem-32": ("cerebras-gpt-111m", "SGD", 25),
    "xmem-34": ("distilgpt2", "AdamW", 30),
    "xmem-35": ("distilgpt2", "AdamW", 28),
    "xmem-36": ("opt-125m", "AdamW", 38),
    "xmem-37": ("opt-125m", "AdamW", 11),
    "xmem-39": ("opt-350m", "AdamW", 13),
    "xmem-40": ("opt-350m", "AdamW", 20),
    "xmem-43": ("llama-3.2-3b", "Adafactor", 1),
    "xmem-44": ("qwen3-4b", "SGD", 1),
    "xmem-45": ("qwen3-4b", "Adafactor", 1),
    "xmem-46": ("deepseek-r1-distill-qwen-1.5b", "SGD", 1),
    "xmem-47": ("deepseek-r1-distill-qwen-1.5b", "Adafactor", 1),
}


def recipes() -> dict[str, Recipe]:
    """Return the recipes of xMem's language models."""
    return {
        case: Recipe(
            partial(language_model, model, optimizer),
            batch,
            shape={"seq_len": 128},
            options=_ONE_LINE if batch == 1 else _OPTIONS,
        )
        for case, (model, optimizer, batch) in _CASES.items()
    }


def build_model(name: str) -> Callable[[], torch.nn.Module]:
    """Return a function that builds a model of the table, in train mode."""

    def build() -> torch.nn.Module:
        hf: Any = import_module("transformers")
        config_class, model_class, attention, sizes = _MODELS[name]
        config = getattr(hf, config_class)(**sizes)
        config._attn_implementation = attention
        model: torch.nn.Module = getattr(hf, model_class)(config).train()
        return model

    return build


def language_model(name: str, optimizer: str) -> bw.Workload:
    """Return a model of the table in xMem's loop."""
    vocabulary = _MODELS[name][3].get("vocab_size", 50257)

    def batch(n: int, seq_len: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, vocabulary, (n, seq_len))
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}

    def loss(model: torch.nn.Module, inputs: Any) -> torch.Tensor:
        outputs = model(**inputs)
        hold(model, outputs)
        return outputs.loss  # type: ignore[no-any-return]

    return bw.Workload(
        model=build_model(name), batch=batch, loss=loss, optimizer=partial(_optimizer, optimizer), name=name
    )


def _optimizer(name: str, params: Any) -> Any:
    return TransformersAdafactor(params) if name == "Adafactor" else getattr(torch.optim, name)(params, lr=1e-3)
