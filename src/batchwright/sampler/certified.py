"""A sampler whose largest batches have run: the budget comes from a fit, and probes have the last word."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from batchwright.errors import InvalidInputError, NothingFitsError
from batchwright.fitting.fit import fit as run_fit
from batchwright.sampler.fitted_cost import fitted_cost, length_name
from batchwright.sampler.lengths import lengths_of
from batchwright.sampler.place import place_of
from batchwright.units import counted, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchwright.fitting.result import Fit
    from batchwright.sampler.token_batch_sampler import TokenBatchSampler

_MOST_TRIES = 6


def certified_sampler(
    make: Callable[..., TokenBatchSampler], fit: Fit, lengths: Any, workload: Any, **options: Any
) -> TokenBatchSampler:
    """Make a sampler by the bytes of a fit, probe its largest batches, and lower the budget until they run."""
    if "max_tokens" in options or "cost" in options:
        raise InvalidInputError(
            "from_fit takes budget and cost from the fit; max_tokens= and cost= have no place beside it.",
            remedy="TokenBatchSampler(lengths, max_tokens=...) for a budget of your own",
        )
    table = lengths_of(lengths, options.get("dataset"), options.get("progress"), options.pop("remember", None))
    if table.shape[1] == 2:
        raise InvalidInputError("from_fit knows one length per sample, the one its fit varied; these have two.")
    name, (cost, limit) = length_name(fit), fitted_cost(fit)
    place = place_of(options.get("rank"), options.get("world_size"))
    budget = limit
    for _ in range(_MOST_TRIES):
        sampler = make(table, budget, cost=cost, **options)
        batches = extreme_batches(sampler)
        for samples, length in batches:
            shape = {**{key: value for key, value in fit.shape.items() if key != name}, name: length}
            found = run_fit(workload, on=fit.on, memory=int(limit), limit=samples, shapes=shape, cache=False)
            ran = found.micro_batch or 0
            if ran < samples:
                break
        else:
            check_that_ranks_agree(budget, place)
            said = " and ".join(f"{counted(samples, 'sample')} of {length:,}" for samples, length in batches)
            sampler.certified = f"{said} ran on {fit.on} within {format_bytes(limit)}" if batches else None
            return sampler
        # What ran is the new bound at this length, and the cost carries it to the others.
        budget = min(float(cost.of(np.array([ran]), np.array([length]))[0]), budget * 0.98)
        if samples == 1 or budget <= cost.fixed:
            break
    raise NothingFitsError(
        f"no budget was found under which every batch runs within {format_bytes(limit)} on {fit.on}.",
        details=[f"the last tried: {counted(samples, 'sample')} of {length:,}"],
        remedy='a fit over lengths up to the longest sample; oversize="drop" leaves out what is too long',
    )


def check_that_ranks_agree(budget: float, place: tuple[int, int]) -> None:
    """Refuse budgets that differ between ranks: each would deal other batches, and samples would be lost."""
    import torch
    import torch.distributed as dist

    if place[1] == 1 or not (dist.is_available() and dist.is_initialized()):
        return
    device = torch.device("cpu") if "gloo" in dist.get_backend() else torch.accelerator.current_accelerator()
    mine = torch.tensor([budget], dtype=torch.float64, device=device)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    budgets = [float(row) for row in rows]
    if len(set(budgets)) > 1:
        told = ", ".join(format_bytes(one) for one in budgets)
        raise InvalidInputError(
            f"ranks have measured different budgets: {told}.", remedy="one fit, handed to all ranks, and its smallest"
        )


def extreme_batches(sampler: TokenBatchSampler) -> list[tuple[int, int]]:
    """Return the batches that no epoch goes beyond, as samples and padded length, the costliest first.

    Of the lengths there are: the one whose fullest batch costs most, the longest, the shortest, and the middle one. A
    batch of a length has at most the samples that fit, and at most those that are no longer.
    """
    lengths = np.sort(sampler.planned.lengths[sampler.planned.samples, 0])
    if not len(lengths):
        return []
    each, counts = np.unique(lengths, return_counts=True)
    most = np.minimum(np.maximum(sampler.budget.most_samples(each), 1), np.cumsum(counts))
    costliest = int(np.argmax(sampler.budget.cost.of(most, each)))
    chosen = dict.fromkeys((costliest, len(each) - 1, len(each) // 2, 0))
    return [(int(most[index]), int(each[index])) for index in chosen]
