"""Why a plan is as it is, in words: the reason it carries, and what its reader should know besides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchwright.planning.split import Split, least_accumulation
from batchwright.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchwright.planning.plan import Plan
    from batchwright.planning.split import Policy

_ROUNDING = {
    "nearest": "comes nearest",
    "at-least": "is the least that reaches it",
    "at-most": "is the most that stays within",
}


def give_reason(requested: int, max_micro_batch: int, split: Split, policy: Policy) -> str:
    """Say how the split follows from what was asked.

    >>> give_reason(1024, 48, Split(1032, 6, 4), "nearest")
    '1,024 samples over 4 devices, at most 48 at a time: 6 micro-batches per step; 43 each comes nearest'
    """
    least = least_accumulation(requested, max_micro_batch=max_micro_batch, devices=split.devices)
    over = f" over {counted(split.devices, 'device')}" if split.devices > 1 else ""
    asked = f"{counted(requested, 'sample')}{over}, at most {max_micro_batch:,} at a time"
    if split.accumulation < least:
        return f"{asked}: {least:,} passes would exceed it, so {split.accumulation:,} per step"
    passes = f"{asked}: {counted(least, 'micro-batch')} per step"
    if split.samples != requested:
        return f"{passes}; {split.largest:,} each {_ROUNDING[policy]}"
    if split.is_even:
        return f"{passes}, {counted(split.largest, 'sample')} each"
    return f"{passes}, of {split.smallest:,} and {split.largest:,} samples, which sum to it exactly"


def give_notes(plan: Plan) -> Iterator[str]:
    """Say what else is worth knowing about a plan."""
    if plan.difference and plan.requested_batch >= plan.devices:
        least = least_accumulation(plan.requested_batch, max_micro_batch=plan.max_micro_batch, devices=plan.devices)
        exact = Split(plan.requested_batch, least, plan.devices)
        sizes = f"{exact.smallest:,} and {exact.largest:,}"
        yield f"policy 'exact' reaches {plan.requested_batch:,} with micro-batches of {sizes}"
    if plan.split.smallest == 0:
        empty = counted(plan.weights[-1].count, "micro-batch")
        yield f"{empty} of 0 samples at weight 0, so that every device runs as many passes"
    if plan.epoch and plan.epoch.updates == 0:
        have = counted(plan.epoch.samples, "sample")
        yield f"no update in an epoch: {have} do not fill one micro-batch on every device"
