"""What the dialects share: the comment on top, loader arguments, and how keyword arguments are laid out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchwright.errors import NotExpressibleError

if TYPE_CHECKING:
    from batchwright.planning.plan import Plan


def headline(plan: Plan) -> str:
    """Comment that says what the settings below come to."""
    sizes = "" if plan.split.is_even else f"{plan.split.smallest} or "
    return (
        f"# micro-batch {sizes}{plan.micro_batch} x accumulation {plan.accumulation} x devices {plan.devices} "
        f"= effective batch {plan.effective_batch}"
    )


def loader_arguments(plan: Plan, batch_size: int | None = None) -> dict[str, Any]:
    """Keyword arguments of the training DataLoader, apart from dataset and order."""
    return {
        "batch_size": plan.micro_batch if batch_size is None else batch_size,
        "num_workers": plan.workers,
        "drop_last": plan.drop_last,
    }


def eval_loader_arguments(plan: Plan) -> dict[str, Any]:
    """Keyword arguments of the evaluation DataLoader."""
    return {"batch_size": eval_micro_batch(plan), "num_workers": plan.workers}


def eval_micro_batch(plan: Plan) -> int:
    """Evaluation keeps no activations for a backward, so what fits in training fits there."""
    return plan.micro_batch if plan.eval_micro_batch is None else plan.eval_micro_batch


def keywords(arguments: dict[str, Any]) -> str:
    """Lay out keyword arguments on one line.

    >>> keywords({"batch_size": 8, "drop_last": True})
    'batch_size=8, drop_last=True'
    """
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def call(name: str, arguments: dict[str, Any], *, first: str = "") -> str:
    """Lay out a call with one keyword argument a line.

    >>> print(call("Trainer", {"accumulate_grad_batches": 6}))
    Trainer(
        accumulate_grad_batches=6,
    )
    """
    lines = [f"    {argument}={value!r}," for argument, value in arguments.items()]
    return "\n".join([f"{name}(", *([f"    {first},"] if first else []), *lines, ")"])


def refuse_uneven(plan: Plan, framework: str, why: str) -> None:
    """Refuse a plan whose micro-batches differ, with the reason and the two ways out."""
    if plan.split.is_even:
        return
    raise NotExpressibleError(
        f"{framework} cannot run this plan: micro-batches of {plan.split.smallest:,} and {plan.split.largest:,} "
        f"(policy 'exact'), and {why}.",
        remedy=f"policy 'nearest', 'at-least' or 'at-most'; or run {plan.effective_batch:,} exactly "
        "with --for pytorch, whose loop takes plan.batch_sampler(rank)",
    )
