"""What there is for transformers: fit a Trainer, watch it, batches by budget, heads and the item count."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchwright.integrations.accelerate import prepare_loader, use_batch_sampler
from batchwright.integrations.transformers.exact_loss import ExactLoss, HeadCheck, check_head, exact_loss
from batchwright.integrations.transformers.trainer import fit_trainer

if TYPE_CHECKING:
    from batchwright.integrations.transformers.callback import BatchwrightCallback


__all__ = [
    "BatchwrightCallback",
    "ExactLoss",
    "HeadCheck",
    "check_head",
    "exact_loss",
    "fit_trainer",
    "prepare_loader",
    "use_batch_sampler",
]


def __getattr__(name: str) -> object:
    # A subclass of transformers' own class: the others can be imported without transformers.
    if name == "BatchwrightCallback":
        from batchwright.integrations.transformers.callback import BatchwrightCallback

        return BatchwrightCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
