"""Lightning: the Trainer's devices and accumulation, and the loader of each process."""

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
    refuse_uneven(plan, "Lightning", "it divides every micro-batch's loss by the same count")
    return {
        "trainer": {"devices": plan.devices, "accumulate_grad_batches": plan.accumulation},
        "train_loader": loader_arguments(plan),
        "eval_loader": eval_loader_arguments(plan),
    }


def snippet(plan: Plan) -> str:
    """The loaders and the Trainer."""
    parts = settings(plan)
    return f"""\
{headline(plan)}
from lightning import Trainer
from torch.utils.data import DataLoader

train_loader = DataLoader(train_set, shuffle=True, {keywords(parts["train_loader"])})  # per device
eval_loader = DataLoader(eval_set, {keywords(parts["eval_loader"])})
trainer = {call("Trainer", parts["trainer"])}
trainer.fit(module, train_loader, eval_loader)"""
