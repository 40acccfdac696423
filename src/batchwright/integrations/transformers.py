"""What there is for transformers: fit a Trainer, batches by budget, heads and the item count."""

from __future__ import annotations

from batchwright.integrations.exact_loss import ExactLoss, exact_loss
from batchwright.integrations.fit_trainer import fit_trainer
from batchwright.integrations.token_batches import use_batch_sampler
from batchwright.integrations.transformers_heads import HeadCheck, check_head

__all__ = ["ExactLoss", "HeadCheck", "check_head", "exact_loss", "fit_trainer", "use_batch_sampler"]
