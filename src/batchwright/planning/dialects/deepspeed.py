"""DeepSpeed: the three numbers of its JSON config."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from batchwright.planning.batch_triangle import MICRO, STEPS, TOTAL
from batchwright.planning.dialects.wording import refuse_uneven

if TYPE_CHECKING:
    from batchwright.planning.plan import Plan


def settings(plan: Plan) -> dict[str, Any]:
    """The part of the config that speaks of the batch."""
    refuse_uneven(plan, "DeepSpeed", f"its config knows one {MICRO} for all")
    numbers = {TOTAL: plan.effective_batch, MICRO: plan.micro_batch, STEPS: plan.accumulation}
    return {**numbers, "dataloader_drop_last": True} if plan.drop_last else numbers


def snippet(plan: Plan) -> str:
    """The settings as JSON, which has no room for a comment."""
    return json.dumps(settings(plan), indent=2)
