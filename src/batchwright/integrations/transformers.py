"""What there is for transformers: fit a Trainer, ask whether a head uses the item count, make one right."""

from __future__ import annotations

from batchwright.integrations.exact_loss import ExactLoss, exact_loss
from batchwright.integrations.fit_trainer import fit_trainer
from batchwright.integrations.transformers_heads import HeadCheck, check_head

__all__ = ["ExactLoss", "HeadCheck", "check_head", "exact_loss", "fit_trainer"]
