"""Composer: the loader gives a device its whole share of the step, and the Trainer cuts it into micro-batches.

The other way round than the rest: accumulation is not set, it follows. Composer weights a smaller last piece
by its samples, so it can run a target that does not divide, as long as it divides over the devices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchwright.planning.dialects.wording import (
    call,
    eval_loader_arguments,
    headline,
    keywords,
    loader_arguments,
    refuse_uneven,
)

if TYPE_CHECKING:
    from batchwright.planning.plan import Plan


def settings(plan: Plan) -> dict[str, Any]:
    """Keyword arguments of `Trainer` and of the two loaders."""
    if plan.effective_batch % plan.devices:
        refuse_uneven(plan, "Composer", "its loader gives every device the same number of samples")
    return {
        "trainer": {"device_train_microbatch_size": plan.micro_batch},
        "train_loader": loader_arguments(plan, batch_size=plan.effective_batch // plan.devices),
        "eval_loader": eval_loader_arguments(plan),
    }


def snippet(plan: Plan) -> str:
    """The loaders and the Trainer."""
    parts = settings(plan)
    rest = "model=model, optimizers=optimizer, train_dataloader=train_loader, eval_dataloader=eval_loader"
    return f"""\
{headline(plan)}
from composer import Trainer
from composer.utils import dist
from torch.utils.data import DataLoader

# batch_size is what one device takes in a whole step; the Trainer cuts it into micro-batches.
train_order = dist.get_sampler(train_set, shuffle=True)
train_loader = DataLoader(train_set, sampler=train_order, {keywords(parts["train_loader"])})
eval_loader = DataLoader(eval_set, sampler=dist.get_sampler(eval_set), {keywords(parts["eval_loader"])})
trainer = {call("Trainer", parts["trainer"], first=rest)}
trainer.fit()"""
