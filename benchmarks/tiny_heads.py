"""Any transformers head from a tiny config, with inputs and labels that it takes.

The numbers of a default config are made small by their names, the parts of it too; labels are tried in the usual forms,
then in the form of the logits. No model is downloaded.
"""

from __future__ import annotations

import inspect
import itertools
import re
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

SAMPLES, LENGTH, WIDTH, HEADS, VOCAB = 2, 12, 64, 4, 256
MOST_PARAMETERS = 100_000_000
# Names of config numbers, and what they become. The first that matches counts; None leaves the number as it is.
_ALWAYS: list[tuple[str, int | None]] = [
    (r"num_feat_extract_layers|num_conv_pos.*|feature_layer|num_labels|num_codebooks|num_channels", None),
    (r"num_feature_levels|first_k_dense_replace|moe_layer_(start|first).*|mlp_only.*|num_stack_layers", None),
    (r".*vocab_size|n_vocab|num_embeddings|vocab_size_.*", VOCAB),
    (r".*(num_hidden_layers|num_layers|n_layers?|_layers|num_blocks)|layers|depth|n_blocks", 2),
    (r"(n|num)_?(routed_|local_|)experts|moe_num_experts|ffn_num_experts", 4),
    (r"num_experts_per_tok|.*top_?k(_experts)?|moe_k|num_selects", 2),
    (r"n_group|topk_group|num_expert_groups?|n_shared_experts|num_shared_experts", 1),
    (r"max_position_embeddings|n_positions|max_target_positions|n_ctx|max_seq(uence)?_len(gth)?|seq_length", 512),
    (r"sliding_window|attention_window|local_attention", 8),
]
_WIDTHS: list[tuple[str, int | None]] = [
    (r".*(key_value|kv|multi_query)_?heads?|n_head_kv|num_key_value_groups", 2),
    (r".*(num|n)_.*heads?|num_heads?|n_heads?|.*attention_heads|.*_heads", HEADS),
    (r"qk_rope_head_dim|qk_nope_head_dim|v_head_dim|rotary_dim", 16),
    (r"qk_head_dim", 32),
    (r".*head_dim|d_kv|kv_channels|attention_head_size|head_size", WIDTH // HEADS),
    (r".*_rank", 16),
    (r".*(hidden_size|d_model|n_embd|embed_dim|hidden_dim|embedding_size|d_embed|emb_dim|projection_dim)", WIDTH),
    (r"dim|word_embed_proj_dim|proj_dim|output_dim|model_dim|width", WIDTH),
    (r".*(intermediate_size|ffn_dim|d_ff|n_inner|inner_dim|ffn_hidden.*|mlp_dim|d_inner.*|feed_?forward.*)", 2 * WIDTH),
]
_PER_LAYER = re.compile(r"no_rope_layers|.*_types?$|.*block_types?|.*layer_pattern")
_SPECIAL = re.compile(r".*_(token_id|token_index|id|ids)$")
_UNSET = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
_FIXED = {
    "use_cache": False,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "layerdrop": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "axial_pos_embds": False,
    "num_kv_shared_layers": 0,
    "depth_coefficient": 1.0,
    "width_coefficient": 1.0,
}


def tiny_config(kind: Any, *, widths: bool = True) -> Any:
    """Return a config with small numbers in it and in its parts; without `widths`, fewer layers and tokens only."""
    default = kind()
    plain = default.to_dict()
    _shrink(plain, widths=widths)
    try:
        config = kind.from_dict(plain)
    except Exception:
        config = default
        for part in parts_of(config):
            for name, value in small_values(dict(vars(part)), widths=widths).items():
                setattr(part, name, value)
    for part in parts_of(config):
        for name, value in _FIXED.items():
            if hasattr(part, name):
                setattr(part, name, value)
        for name, value in (("pad_token_id", 0), ("vocab_size", VOCAB)):
            if getattr(part, name, 0) is None:
                setattr(part, name, value)
        if (
            widths
            and isinstance(getattr(part, "rope_parameters", None), dict)
            and re.search("vl|omni|ocr", part.model_type)
        ):
            part.rope_parameters.setdefault("mrope_section", [2, 3, 3])
        if not hasattr(part, "decoder_start_token_id") or part.decoder_start_token_id is None:
            part.decoder_start_token_id = 1
    return config


def parts_of(config: Any) -> Iterator[Any]:
    """Yield a config and every config in it."""
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from parts_of(value)


def _shrink(plain: dict[str, Any], *, widths: bool) -> None:
    plain.update(small_values(plain, widths=widths))
    for value in plain.values():
        if isinstance(value, dict):
            _shrink(value, widths=widths)


def small_values(plain: dict[str, Any], *, widths: bool) -> dict[str, Any]:
    """Return the numbers of a config that must change, by name."""
    found = {}
    # Stages with heads of their own, as in Swin: their widths follow from one number, which must stay.
    has_stages = isinstance(plain.get("depths"), list)
    rules = _ALWAYS + (_WIDTHS if widths and not has_stages else [])
    for name, value in plain.items():
        new = _small(name, value, rules)
        if new != value:
            found[name] = new
    heads, kv_heads = plain.get("num_attention_heads"), plain.get("num_key_value_heads")
    if "num_key_value_heads" in plain and heads and kv_heads in (None, heads):
        found["num_key_value_heads"] = found.get("num_attention_heads", heads)
    found |= {name: value for name, value in _UNSET.items() if name in plain and plain[name] is None}
    if widths and "head_dim" in plain and plain["head_dim"] is None:
        found["head_dim"] = WIDTH // HEADS
    if widths and "mamba_n_heads" in plain:  # expand * hidden = heads * width of a head
        found |= {"mamba_n_heads": 2 * HEADS, "mamba_d_head": WIDTH // HEADS}
    return found


def _small(name: str, value: Any, rules: list[tuple[str, int | None]]) -> Any:
    if isinstance(value, bool) or not value:
        return value
    if isinstance(value, int):
        if _SPECIAL.fullmatch(name):
            return value if 0 <= value < VOCAB - 40 else VOCAB - 1 - value % 37
        small = next((small for pattern, small in rules if re.fullmatch(pattern, name)), None)
        return value if small is None or value < 0 else min(value, small)
    if isinstance(value, list) and name == "mrope_section" and rules[-1] is _WIDTHS[-1]:
        return [2, 3, 3]
    if isinstance(value, list) and _PER_LAYER.fullmatch(name) and len(value) > 2:
        # One layer of each kind, in order, where there are two.
        return (list(dict.fromkeys(value)) * 2)[:2]
    if isinstance(value, list) and name == "depths":
        return [1] * len(value)
    return value


def build(kind: Any, *, widths: bool = True) -> Any:
    """Build a head from a tiny config, in train mode."""
    torch.manual_seed(0)
    config = tiny_config(kind.config_class, widths=widths)
    with torch.device("meta"):
        try:
            size = sum(p.numel() for p in kind(config).parameters())
        except Exception:
            size = 0  # built from values: it fails for real below, or it does not
    if size > MOST_PARAMETERS:
        raise MemoryError(f"{size / 1e6:.0f} million parameters")
    model = kind(config).train()
    if hasattr(model, "set_default_language"):
        model.set_default_language("en_XX")
    return model


def input_forms(model: Any) -> Iterator[dict[str, Any]]:
    """Yield inputs of a forward, without labels: the least first, then with a picture beside the text."""
    names = inspect.signature(model.forward).parameters
    text, picture, sound = _text(model, names), _picture(model, names), _sound(model, names)
    main = getattr(model, "main_input_name", "input_ids")
    if text and main != "pixel_values":
        yield text
    for others in (picture, sound):
        if others and not text:
            yield others
        elif others:
            yield {**text, **others}
    if not text and not picture and not sound:
        yield {}


def _text(model: Any, names: Any) -> dict[str, Any]:
    if "input_ids" not in names:
        return {}
    ids = torch.randint(5, 30, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    end = next((p.eos_token_id for p in parts_of(model.config) if isinstance(getattr(p, "eos_token_id", None), int)), 2)
    ids[ids == end] += 1
    ids[:, -1] = end
    if "MultipleChoice" in type(model).__name__:
        ids = ids[:, None, :].repeat(1, 3, 1)
    found = {"input_ids": ids}
    if "attention_mask" in names:
        found["attention_mask"] = torch.ones_like(ids)
    if "bbox" in names:
        wide = 8 if "bros" in model.config.model_type else 4
        found["bbox"] = torch.ones(*ids.shape, wide, dtype=torch.float if wide == 8 else torch.long)
    for name in ("next_sentence_label", "sentence_order_label"):
        if name in names:
            found[name] = torch.tensor([0, 1])
    return found


def _picture(model: Any, names: Any) -> dict[str, Any]:
    name = next((name for name in ("pixel_values", "pixel_values_videos") if name in names), None)
    if name is None:
        return {}
    config = model.config
    size = first_of(config, "image_size", None) or first_of(config, "crop_size", 224)
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    frames = first_of(config, "num_frames", None) or first_of(config, "frames_per_clip", None)
    shape = (first_of(config, "num_channels", 3), height, width)
    whole = (SAMPLES, frames, *shape) if frames else (SAMPLES, *shape)
    return {name: torch.randn(whole, generator=torch.Generator().manual_seed(2))}


def _sound(model: Any, names: Any) -> dict[str, Any]:
    config, generator = model.config, torch.Generator().manual_seed(3)
    mels = first_of(config, "num_mel_bins", None) or first_of(config, "feature_projection_input_dim", 80)
    if "input_values" in names:
        length = first_of(config, "max_length", None)
        is_picture = "audio-spectrogram" in config.model_type
        shape: tuple[int, ...] = (SAMPLES, length or 1024, mels) if is_picture else (SAMPLES, 16_000)
        return {"input_values": torch.randn(shape, generator=generator)}
    if "input_features" in names:
        positions = first_of(config, "max_source_positions", 100)
        shape = (SAMPLES, mels, 2 * positions) if "whisper" in config.model_type else (SAMPLES, 100, mels)
        mask = {"attention_mask": torch.ones(SAMPLES, 100, dtype=torch.long)} if "attention_mask" in names else {}
        return {
            "input_features": torch.randn(shape, generator=generator),
            **({} if len(mask) and shape[1] == mels else mask),
        }
    return {}


def first_of(config: Any, name: str, default: Any) -> Any:
    """Return a value of a config or of the first part that has it."""
    return next((getattr(part, name) for part in parts_of(config) if getattr(part, name, None) is not None), default)


def label_forms(model: Any, inputs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield labels in the usual forms, the likeliest for this head first."""
    generator = torch.Generator().manual_seed(5)
    family = re.sub(r".*?For(?=[A-Z])", "", type(model).__name__, count=1)
    ids = inputs.get("input_ids")
    tokens = ids.clone() if ids is not None else torch.randint(5, 30, (SAMPLES, LENGTH), generator=generator)
    by_token = torch.randint(0, 2, tokens.shape[:1] + tokens.shape[-1:], generator=generator)
    by_sample = torch.tensor([0, 1] * (SAMPLES // 2))
    pixels = inputs.get("pixel_values")
    size = None if pixels is None else (pixels.shape[0], *pixels.shape[-2:])
    pictures = [] if size is None else [torch.randint(0, 2, size, generator=generator), torch.rand(size)]
    forms = {"tokens": [tokens], "by token": [by_token], "sample": [by_sample, by_sample.float()], "picture": pictures}
    if re.search("Token|Frame|Entity", family):
        order = ("by token", "sample", "tokens", "picture")
    elif re.search("Segmentation|Depth|Normal|Matting|Pose|Resolution", family):
        order = ("picture", "sample", "by token", "tokens")
    elif re.search("LM|Generation|CTC|PreTraining|Text|Speech|RNNT|TDT", family):
        order = ("tokens", "by token", "sample", "picture")
    else:
        order = ("sample", "by token", "tokens", "picture")
    yield from itertools.chain.from_iterable(forms[form] for form in order)
    yield from _like_logits(model, inputs)


def _like_logits(model: Any, inputs: dict[str, Any]) -> Iterator[torch.Tensor]:
    try:
        with torch.no_grad():
            logits = getattr(model(**inputs), "logits", None)
    except Exception:
        return
    if isinstance(logits, torch.Tensor) and logits.dim() > 1:
        yield torch.zeros(logits.shape[:-1], dtype=torch.long)
        yield torch.nn.functional.one_hot(torch.zeros(logits.shape[:-1], dtype=torch.long), logits.shape[-1])
        yield torch.rand(logits.shape)
