"""Plain PyTorch: the loader's arguments, and a loop that is right for the incomplete last window too.

The loop reads one window ahead, so that it knows how many samples the window holds before the first backward,
and weights each micro-batch's mean by its share of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchwright.planning.dialects.wording import eval_loader_arguments, headline, keywords, loader_arguments

if TYPE_CHECKING:
    from batchwright.planning.plan import Plan


def settings(plan: Plan) -> dict[str, Any]:
    """Arguments of the two loaders, and the loop's count."""
    train = loader_arguments(plan)
    if not plan.split.is_even:
        # A batch sampler replaces batch_size, shuffle and drop_last; it is made per rank, so it is named, not built.
        train = {"batch_sampler": "plan.batch_sampler(rank)", "num_workers": plan.workers}
    return {
        "train_loader": train,
        "eval_loader": eval_loader_arguments(plan),
        "accumulation": plan.accumulation,
    }


def snippet(plan: Plan) -> str:
    """The loader and the loop."""
    return _even_loop(plan) if plan.split.is_even else _uneven_loop(plan)


def _even_loop(plan: Plan) -> str:
    parallel = plan.devices > 1
    order = "sampler=sampler" if parallel else "shuffle=True"
    setup = [f"sampler = DistributedSampler(train_set, drop_last={plan.drop_last})"] if parallel else []
    setup.append(f"loader = DataLoader(train_set, {order}, {keywords(loader_arguments(plan))})")
    windows = ["batches = iter(loader)", f"while window := list(islice(batches, {plan.accumulation})):"]
    windows.append("    samples = sum(len(targets) for _, targets in window)")
    windows += _passes(
        plan, item="inputs, targets", window="window", count="len(window)", weight="len(targets) / samples"
    )
    imports = "DataLoader, DistributedSampler" if parallel else "DataLoader"
    return _script(plan, f"from torch.utils.data import {imports}", setup, windows, has_sampler=parallel)


def _uneven_loop(plan: Plan) -> str:
    rank = "torch.distributed.get_rank()" if plan.devices > 1 else "0"
    asked = {"micro_batch": plan.max_micro_batch, "devices": plan.devices, "policy": plan.policy}
    setup = [
        f"plan = bw.plan({plan.requested_batch}, {keywords({**asked, 'drop_last': plan.drop_last})})",
        f"sampler = plan.batch_sampler(rank={rank}, samples=len(train_set))",
        f"loader = DataLoader(train_set, batch_sampler=sampler, num_workers={plan.workers})",
    ]
    windows = ["batches = zip(loader, sampler.weights(), strict=True)", "for window in sampler.windows():"]
    windows += _passes(
        plan,
        item="(inputs, targets), weight",
        window="islice(batches, window.accumulation)",
        count="window.accumulation",
        # The weights sum to one over all ranks, and the ranks average their gradients.
        weight=f"weight * {plan.devices}" if plan.devices > 1 else "weight",
    )
    imports = "from torch.utils.data import DataLoader\n\nimport batchwright as bw"
    return _script(plan, imports, setup, windows, has_sampler=True)


def _script(plan: Plan, imports: str, setup: list[str], windows: list[str], *, has_sampler: bool) -> str:
    parallel = plan.devices > 1
    return "\n".join(
        [
            headline(plan),
            *(["import contextlib"] if parallel else []),
            "from itertools import islice",
            "",
            *(["import torch"] if parallel else []),
            imports,
            "",
            *(
                [f"torch.distributed.init_process_group()  # torchrun --nproc-per-node {plan.devices}"]
                if parallel
                else []
            ),
            *(["model = torch.nn.parallel.DistributedDataParallel(model)"] if parallel else []),
            *setup,
            f"eval_loader = DataLoader(eval_set, {keywords(eval_loader_arguments(plan))})",
            "",
            "for epoch in range(epochs):",
            *(["    sampler.set_epoch(epoch)"] if has_sampler else []),
            *(f"    {line}" for line in windows),
        ]
    )


def _passes(plan: Plan, *, item: str, window: str, count: str, weight: str) -> list[str]:
    step = ["    optimizer.step()", "    optimizer.zero_grad()"]
    passes = ["loss = loss_fn(model(inputs), targets)", f"(loss * {weight}).backward()"]
    if plan.devices == 1:
        return [f"    for {item} in {window}:", *(f"        {line}" for line in passes), *step]
    return [
        f"    for number, ({item}) in enumerate({window}, 1):",
        "        # Only the last pass synchronises; the forward belongs inside, or the synchronisation is lost.",
        f"        with contextlib.nullcontext() if number == {count} else model.no_sync():",
        *(f"            {line}" for line in passes),
        *step,
    ]
