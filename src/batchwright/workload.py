"""`Workload`: what a user hands in, once, for every question.

Promises:
- it names no device: batchwright places model and batches;
- what is obviously wrong is said when it is made; what only running shows is checked by the first small step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from batchwright.errors import InvalidInputError
from batchwright.ready_made import transformers_parts
from batchwright.units import shortened

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

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
    units. `batch(n, **shape)` makes n samples of a shape; or instead `data` (a dataset) and `collate`. Without an
    `optimizer` the workload is inference only; it is a function of the parameters to train (`lambda params: ...`),
    of their names too (`lambda named_parameters: ...`, a list of pairs), or of the model (`lambda model: ...`). The
    other fields say what else the step does: `units` counts the loss units of a batch, `wrap` wraps the model on
    each rank, `scaler` makes a GradScaler, `generate` and `evaluate` run after the step, `window` is the user's own
    accumulation loop, `split` cuts a batch.
    """

    model: nn.Module | Callable[[], nn.Module]
    loss: Callable[..., torch.Tensor] | None = None
    batch: Callable[..., Any] | None = None
    optimizer: Callable[[Any], Any] | None = None
    data: Any = None
    collate: Callable[[list[Any]], Any] | None = None
    units: Callable[[Any], int] | None = None
    wrap: Callable[[nn.Module], nn.Module] | None = None
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
