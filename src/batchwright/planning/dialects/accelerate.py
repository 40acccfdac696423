"""accelerate: the Accelerator's accumulation and the loader of each process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchwright.planning.dialects.wording import (
    eval_loader_arguments,
    headline,
    keywords,
    loader_arguments,
    refuse_uneven,
)

if TYPE_CHECKING:
    from batchwright.planning.plan import Plan


def settings(plan: Plan) -> dict[str, Any]:
    """Keyword arguments of `Accelerator` and of the two loaders."""
    refuse_uneven(plan, "accelerate", "it divides every micro-batch's loss by the same count")
    return {
        "accelerator": {"gradient_accumulation_steps": plan.accumulation},
        "train_loader": loader_arguments(plan),
        "eval_loader": eval_loader_arguments(plan),
    }


def snippet(plan: Plan) -> str:
    """The set-up and the loop."""
    parts = settings(plan)
    return f"""\
{headline(plan)}
from accelerate import Accelerator
from torch.utils.data import DataLoader

accelerator = Accelerator({keywords(parts["accelerator"])})
train_loader = DataLoader(train_set, shuffle=True, {keywords(parts["train_loader"])})  # per process
eval_loader = DataLoader(eval_set, {keywords(parts["eval_loader"])})
model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)

for inputs, targets in train_loader:
    with accelerator.accumulate(model):
        accelerator.backward(loss_fn(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()

# start it: accelerate launch --num_processes {plan.devices} train.py"""
