"""A model of the catalogue as transformers builds it, from its shape alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers

if TYPE_CHECKING:
    from batchwright.catalogue.models import ModelShape

_PLAIN = {
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "gemma": "GemmaConfig",
    "gemma2": "Gemma2Config",
}


def make_config(shape: ModelShape) -> Any:
    """Return the transformers config of a shape; dropout follows the shape."""
    common: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_positions,
        "tie_word_embeddings": shape.tied,
    }
    partial = shape.rotary_dim / shape.head_dim
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": partial}
    family = shape.family
    if family in _PLAIN:
        kind = getattr(transformers, _PLAIN[family])
        return kind(**common, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim)
    if family == "gpt2":
        return transformers.GPT2Config(
            n_embd=shape.hidden,
            n_layer=shape.layers,
            n_head=shape.heads,
            attn_pdrop=shape.attention_dropout,
            resid_pdrop=shape.dropout,
            embd_pdrop=shape.dropout,
        )
    if family == "gpt_neo":
        kinds = [[["global", "local"], shape.layers // 2]]
        return transformers.GPTNeoConfig(
            hidden_size=shape.hidden, num_layers=shape.layers, num_heads=shape.heads, attention_types=kinds
        )
    if family == "opt":
        common["ffn_dim"] = common.pop("intermediate_size")
        return transformers.OPTConfig(**common, word_embed_proj_dim=shape.hidden, dropout=shape.dropout)
    if family == "gpt_neox":
        return transformers.GPTNeoXConfig(**common, rope_parameters=rope)
    if family == "bloom":
        return transformers.BloomConfig(
            hidden_size=shape.hidden, n_layer=shape.layers, n_head=shape.heads, vocab_size=shape.vocab
        )
    if family in ("bert", "roberta"):
        common["max_position_embeddings"] = shape.position_rows
        kind = transformers.BertConfig if family == "bert" else transformers.RobertaConfig
        return kind(
            **common,
            type_vocab_size=shape.token_types,
            hidden_dropout_prob=shape.dropout,
            attention_probs_dropout_prob=shape.attention_dropout,
        )
    if family == "phi":
        return transformers.PhiConfig(**common, hidden_act="gelu_new", rope_parameters=rope)
    if family == "phi3":
        return transformers.Phi3Config(**common, num_key_value_heads=shape.kv_heads, pad_token_id=0)
    if family == "stablelm":
        return transformers.StableLmConfig(**common, num_key_value_heads=shape.kv_heads, rope_parameters=rope)
    assert family == "falcon", family
    del common["intermediate_size"]
    return transformers.FalconConfig(
        **common, multi_query=True, parallel_attn=True, bias=False, alibi=False, new_decoder_architecture=False
    )


def build_on_meta(
    shape: ModelShape, *, dtype: torch.dtype = torch.float32, attention: str | None = None, labels: int | None = None
) -> Any:
    """Build the model on the meta device, in train mode; with `labels`, as a classifier."""
    config = make_config(shape)
    kind: Any = transformers.AutoModelForMaskedLM if shape.mask_head else transformers.AutoModelForCausalLM
    if labels:
        kind = transformers.AutoModelForSequenceClassification
        config.num_labels, config.pad_token_id = labels, 0
    with torch.device("meta"):
        model = kind.from_config(config, **({"attn_implementation": attention} if attention else {}))
    model = model.to(dtype).train()
    if shape.family == "opt":
        # Its decoder draws a random number to drop layers, which a fake tensor does not have.
        model.model.decoder.training = False
    return model
