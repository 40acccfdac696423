"""`Workload`: what a user hands in, once, for every question.

Promises:
- it names no device: batchwright places model and batches;
- what is obviously wrong is refused when it is made; what only running shows is checked by the first small step;
- `from_transformers` makes batches by what the model's class takes (tokens, pixels) and the task it is registered for;
  a class that takes no labels, or other inputs, is refused by name when its batch is asked for, so that a `batch=` of
  the user's own can still replace it.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from batchwright.errors import InvalidInputError, import_extra
from batchwright.units import shortened, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn


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
        extra = {"labels": torch.randint(0, num_classes, (n, length))}
        if "next_sentence_label" in takes:
            extra["next_sentence_label"] = torch.zeros(n, dtype=torch.long)
        if "decoder_input_ids" in takes and getattr(config, "decoder_start_token_id", None) is None:
            # The model would make them from the labels, but does not know what they start with.
            extra["decoder_input_ids"] = torch.randint(0, vocabulary, (n, length))
        return extra

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
        size = (_NUM_CHOICES, seq_len) if _is_registered(kind, "MULTIPLE_CHOICE", transformers) else (seq_len,)
        return {"input_ids": torch.randint(0, vocabulary, (n, *size)), **labels(n, seq_len)}

    return batch


def _check_labels(kind: Any) -> None:
    if "labels" not in inspect.signature(kind.forward).parameters:
        raise InvalidInputError(f"{kind.__name__} takes no labels, so it has no loss.", remedy="write loss= yourself")


def _is_registered(kind: Any, task: str, transformers: Any) -> bool:
    names = getattr(transformers.models.auto.modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {})
    return kind.__name__ in names.values()


_CALLABLES = (
    "loss",
    "batch",
    "optimizer",
    "collate",
    "units",
    "wrap",
    "scaler",
    "generate",
    "evaluate",
    "window",
    "split",
)


class Program(ABC):
    """A program that trains by itself, where a workload would go: it is asked to answer."""

    @abstractmethod
    def answer_fit(self, request: Any, say: Callable[[str], None]) -> Any:
        """Return the `Fit` of a `FitRequest`."""

    @abstractmethod
    def answer_estimate(self, **settings: Any) -> Any:
        """Return what it takes; `settings` are those of `estimate` that were given."""


@dataclass(frozen=True)
class Workload:
    """A training step: how to build the model, make a batch, compute the loss and step the optimizer.

    >>> import torch
    >>> workload = Workload(
    ...     model=lambda: torch.nn.Linear(8, 1),
    ...     batch=lambda n: torch.randn(n, 8),
    ...     loss=lambda model, batch: model(batch).pow(2).mean(),
    ...     optimizer=lambda params: torch.optim.AdamW(params),
    ... )
    >>> workload.is_training
    True

    `model` is a module, or a function that builds one. `loss(model, batch)` is a scalar, the mean over the batch's
    units; if it yields it, the rest (the end of a `with`) runs after backward. `batch(n, **shape)` makes n samples of a
    shape; or instead `data` (a dataset) and `collate`. Without an `optimizer` the workload is inference only; it is a
    function of the parameters to train (`lambda params: ...`), of their names too (`lambda named_parameters: ...`, a
    list of pairs), or of the model (`lambda model: ...`). The
    other fields say what else the step does: `units` counts the loss units of a batch, `wrap` wraps the model on
    each rank (or makes a pipeline's schedule of it, which `loss` is then handed in place of the model), `scaler` makes
    a GradScaler, `generate` and `evaluate` run after the step, `window` is the user's own accumulation loop, `split`
    cuts a batch.
    """

    model: nn.Module | Callable[[], nn.Module]
    loss: Callable[..., torch.Tensor] | None = None
    batch: Callable[..., Any] | None = None
    optimizer: Callable[[Any], Any] | None = None
    data: Any = None
    collate: Callable[[list[Any]], Any] | None = None
    units: Callable[[Any], int] | None = None
    wrap: Callable[[nn.Module], Any] | None = None
    scaler: Callable[[], Any] | None = None
    generate: Callable[..., Any] | None = None
    evaluate: Callable[..., Any] | None = None
    window: Callable[..., Any] | None = None
    split: Callable[..., Any] | None = None
    name: str = field(default="workload", compare=False)

    def __post_init__(self) -> None:
        if not callable(self.model):
            raise InvalidInputError(
                f"a workload's model is a module or a function that builds one; received {shortened(self.model)}."
            )
        for name in _CALLABLES:
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise InvalidInputError(f"a workload's {name} is a function; received {shortened(value)}.")
        if (self.batch is None) == (self.data is None):
            raise InvalidInputError(
                "a workload makes its batches from `batch` (a function of n) or from `data` (a dataset): "
                f"exactly one of them; received {'both' if self.batch else 'neither'}.",
                remedy="batch=lambda n: torch.randn(n, 8)",
            )
        if self.data is not None and not (hasattr(self.data, "__len__") and hasattr(self.data, "__getitem__")):
            # A loader makes batches of one size; what is asked for here are samples, from which any size is made.
            is_loader = hasattr(self.data, "dataset") and hasattr(self.data, "collate_fn")
            raise InvalidInputError(
                f"a workload's data is a dataset with a length and samples by number; received {shortened(self.data)}.",
                remedy="data=loader.dataset, collate=loader.collate_fn" if is_loader else "",
            )
        if self.loss is None and self.generate is None and self.evaluate is None:
            raise InvalidInputError("a workload needs something to run: loss, or generate or evaluate for inference.")
        if self.optimizer is not None and self.loss is None:
            raise InvalidInputError(
                "a workload with an optimizer needs a loss.", remedy="loss=lambda model, batch: ..."
            )

    @property
    def is_training(self) -> bool:
        """Whether there is an optimizer; without one everything runs under no_grad."""
        return self.optimizer is not None

    @staticmethod
    def from_transformers(model_or_config: Any, *, seq_len: int = 1024, **changes: Any) -> Workload:
        """Make the workload of a transformers model with labels: random tokens, its own loss, AdamW.

        `changes` replace fields, such as `optimizer=...`. The model class follows from the config's architecture,
        causal LM where it names none.
        """
        return Workload(**{**transformers_parts(model_or_config, seq_len=seq_len), **changes})
