"""The parts of a workload for any transformers model with labels: batches of its own kind, its own loss.

Promises:
- the batch follows from what the model's class takes (tokens, pixels) and from the task it is registered for;
- a class that takes no labels, or inputs of another kind, is refused by name when its batch is asked for, so that
  a batch= of the user's own can still replace it.
"""

from __future__ import annotations

import inspect
from typing import Any

from batchwright.errors import InvalidInputError, import_extra
from batchwright.units import shortened, whole_number

# Where a config names no size, as convolutional nets do: what ImageNet models are trained at.
_IMAGE_SIZE = 224
_NUM_CHOICES = 2


def transformers_parts(model_or_config: Any, *, seq_len: int) -> dict[str, Any]:
    """Return model, batch, loss, optimizer and name for a transformers model or config."""
    transformers = import_extra("transformers", extra="transformers", purpose="Workload.from_transformers")
    import torch

    length = whole_number(seq_len, "seq_len")
    if isinstance(model_or_config, transformers.PreTrainedModel):
        kind, config, build = type(model_or_config), model_or_config.config, model_or_config
    elif isinstance(model_or_config, transformers.PretrainedConfig):
        config = model_or_config
        kind = _class_for(config, transformers)
        build = _builder(kind, config)
    else:
        raise InvalidInputError(
            f"from_transformers takes a transformers model or config; received {shortened(model_or_config)}."
        )
    make = _image_batch if kind.main_input_name == "pixel_values" else _text_batch
    return {
        "model": build,
        "batch": make(kind, config, transformers, length),
        "loss": lambda model, inputs: model(**inputs).loss,
        "optimizer": lambda params: torch.optim.AdamW(params),
        "name": kind.__name__,
    }


def _class_for(config: Any, transformers: Any) -> Any:
    named = (getattr(config, "architectures", None) or [None])[0]
    if named is not None:
        if not hasattr(transformers, named):
            raise InvalidInputError(
                f"the config names the architecture {named}, which transformers does not have.",
                remedy="hand in the model itself",
            )
        return getattr(transformers, named)
    try:
        return transformers.AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        raise InvalidInputError(
            f"{type(config).__name__} names no architecture and has no causal LM.",
            remedy='config.architectures = ["BertForMaskedLM"], or hand in the model itself',
        ) from None


def _builder(kind: Any, config: Any) -> Any:
    return lambda: kind(config).train()


def _image_batch(kind: Any, config: Any, transformers: Any, _: int) -> Any:
    import torch

    default = getattr(config, "image_size", _IMAGE_SIZE)

    def batch(n: int, image_size: Any = default) -> dict[str, torch.Tensor]:
        _check_labels(kind)
        if not _is_registered(kind, "IMAGE_CLASSIFICATION", transformers):
            raise InvalidInputError(
                f"{kind.__name__} takes pixel_values but is no image classifier, so no labels are made for it.",
                remedy="write batch= yourself",
            )
        height, width = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
        return {
            "pixel_values": torch.randn(n, getattr(config, "num_channels", 3), height, width),
            "labels": torch.randint(0, config.num_labels, (n,)),
        }

    return batch


def _text_batch(kind: Any, config: Any, transformers: Any, default: int) -> Any:
    import torch

    takes = inspect.signature(kind.forward).parameters
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = int(getattr(text, "vocab_size", 0))
    longest = getattr(text, "max_position_embeddings", None)

    def labels(n: int, length: int) -> dict[str, torch.Tensor]:
        if "start_positions" in takes and "labels" not in takes:
            return {name: torch.zeros(n, dtype=torch.long) for name in ("start_positions", "end_positions")}
        _check_labels(kind)
        for task, num_classes in (
            ("SEQUENCE_CLASSIFICATION", config.num_labels),
            ("MULTIPLE_CHOICE", _NUM_CHOICES),
            ("NEXT_SENTENCE_PREDICTION", 2),
        ):
            if _is_registered(kind, task, transformers):
                return {"labels": torch.randint(0, num_classes, (n,))}
        num_classes = config.num_labels if _is_registered(kind, "TOKEN_CLASSIFICATION", transformers) else vocabulary
        made = {"labels": torch.randint(0, num_classes, (n, length))}
        if "next_sentence_label" in takes:
            made["next_sentence_label"] = torch.zeros(n, dtype=torch.long)
        if "decoder_input_ids" in takes and getattr(config, "decoder_start_token_id", None) is None:
            # The model would make them from the labels, but does not know what they start with.
            made["decoder_input_ids"] = torch.randint(0, vocabulary, (n, length))
        return made

    def batch(n: int, seq_len: int = default) -> dict[str, torch.Tensor]:
        if kind.main_input_name != "input_ids":
            raise InvalidInputError(
                f"{kind.__name__} takes {kind.main_input_name}, for which no batch is made.",
                remedy="write batch= yourself",
            )
        if isinstance(longest, int) and seq_len > longest:
            raise InvalidInputError(
                f"{kind.__name__} takes sequences of up to {longest:,} tokens; received {seq_len:,}.",
                remedy=f"seq_len={longest}",
            )
        each = (_NUM_CHOICES, seq_len) if _is_registered(kind, "MULTIPLE_CHOICE", transformers) else (seq_len,)
        return {"input_ids": torch.randint(0, vocabulary, (n, *each)), **labels(n, seq_len)}

    return batch


def _check_labels(kind: Any) -> None:
    if "labels" not in inspect.signature(kind.forward).parameters:
        raise InvalidInputError(f"{kind.__name__} takes no labels, so it has no loss.", remedy="write loss= yourself")


def _is_registered(kind: Any, task: str, transformers: Any) -> bool:
    names = getattr(transformers.models.auto.modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {})
    return kind.__name__ in names.values()
