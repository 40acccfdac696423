"""A sampler whose largest batches have run: the budget comes from a fit, and probes have the last word.

The cost of a batch in bytes is fitted to the probes of a fit over several sequence lengths.

Promises:
- coefficients are not negative, and no probe took more than the cost says: the fit is raised to the highest of them;
- a probe that ran out of memory is over the budget by the cost too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from batchwright.errors import InvalidInputError, NothingFitsError
from batchwright.fitting.fit import fit as run_fit
from batchwright.fitting.fit_result import Fit, limited_peak
from batchwright.planning.times import solve_not_negative
from batchwright.sampler.cost import BatchCost, gather_lengths
from batchwright.sampler.token_batch_sampler import TokenBatchSampler, read_rank
from batchwright.units import counted, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable


_LEAST_SHAPES = 3
# Of the columns of a cost; the fixed part alone would not grow with the tokens.
_SUBSETS = ((1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2))


def find_length_name(fit: Fit) -> str:
    """Return the one name of a shape that varies over the fit: the length of a sample."""
    rows = fit.shapes or (fit,)
    names = {name for row in rows for name in row.shape}
    varying = [name for name in sorted(names) if len({row.shape.get(name) for row in rows}) >= _LEAST_SHAPES]
    if len(varying) != 1:
        raise InvalidInputError(
            f"a cost by length needs a fit over at least {_LEAST_SHAPES} lengths of one shape; this one has "
            f"{', '.join(str(row.shape) for row in rows[:4]) or 'none'}.",
            remedy='bw.fit(workload, shapes={"seq_len": [128, 512, 2048]}, memory=...)',
        )
    return varying[0]


def fit_cost(fit: Fit) -> tuple[BatchCost, float]:
    """Return the bytes of a batch by samples and length, and the bytes that it may take."""
    name = find_length_name(fit)
    rows = fit.shapes or (fit,)
    trials = [(t.micro_batch, int(row.shape[name]), t) for row in rows for t in row.trials]
    ran = [(n, length, limited_peak(t)) for n, length, t in trials if t.fits]
    known = np.array([(n, length, peak) for n, length, peak in ran if peak is not None], float)
    if len({length for _, length, _ in known.tolist()}) < _LEAST_SHAPES:
        raise InvalidInputError(
            "the probes of this fit do not tell their peaks at enough lengths to fit a cost.",
            remedy="a fit under a memory budget, memory=..., over three lengths or more",
        )
    samples, lengths, peaks = known.T
    limit = float(fit.limit_bytes or peaks.max())
    columns = np.stack([np.ones_like(samples), samples * lengths, samples * lengths**2], axis=1)
    cost = BatchCost(*solve_not_negative((columns / peaks[:, None]).tolist(), _SUBSETS))
    # The highest probe above the fit lifts all of it.
    lift = float((peaks - cost.of(samples, lengths)).max())
    failed = [(n, length) for n, length, t in trials if t.verdict == "out_of_memory"]
    for n, length in failed:
        lift = max(lift, float(limit - cost.of(np.array([n]), np.array([length]))[0]) * (1 + 1e-9))
    raised = replace(cost, fixed=cost.fixed + max(lift, 0.0))
    if raised.fixed >= limit:
        raise InvalidInputError(
            f"by the probes of this fit no batch stays within {format_bytes(limit)}: {format_bytes(raised.fixed)} are "
            "taken before the first sample."
        )
    return raised, limit


_MOST_TRIES = 6


def build_certified_sampler(
    make: Callable[..., TokenBatchSampler], fit: Fit, lengths: Any, workload: Any, **options: Any
) -> TokenBatchSampler:
    """Make a sampler by the bytes of a fit, probe its largest batches, and lower the budget until they run."""
    if "max_tokens" in options or "cost" in options:
        raise InvalidInputError(
            "from_fit takes budget and cost from the fit; max_tokens= and cost= have no place beside it.",
            remedy="TokenBatchSampler(lengths, max_tokens=...) for a budget of your own",
        )
    table = gather_lengths(lengths, options.get("dataset"), options.get("progress"), options.pop("remember", None))
    if table.shape[1] == 2:
        raise InvalidInputError("from_fit knows one length per sample, the one its fit varied; these have two.")
    name, (cost, limit) = find_length_name(fit), fit_cost(fit)
    place = read_rank(options.get("rank"), options.get("world_size"))
    budget = limit
    for _ in range(_MOST_TRIES):
        sampler = make(table, budget, cost=cost, **options)
        batches = find_extreme_batches(sampler)
        for samples, length in batches:
            shape = {**{key: value for key, value in fit.shape.items() if key != name}, name: length}
            answer = run_fit(workload, on=fit.on, memory=int(limit), limit=samples, shapes=shape, cache=False)
            ran = answer.micro_batch or 0
            if ran < samples:
                break
        else:
            check_that_ranks_agree(budget, place)
            proof = " and ".join(f"{counted(samples, 'sample')} of {length:,}" for samples, length in batches)
            sampler.certified = f"{proof} ran on {fit.on} within {format_bytes(limit)}" if batches else None
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
        amounts = ", ".join(format_bytes(one) for one in budgets)
        raise InvalidInputError(
            f"ranks have measured different budgets: {amounts}.",
            remedy="one fit, handed to all ranks, and its smallest",
        )


def find_extreme_batches(sampler: TokenBatchSampler) -> list[tuple[int, int]]:
    """Return the batches that no epoch goes beyond, as samples and padded length, the costliest first.

    Of the lengths there are: the one whose fullest batch costs most, the longest, the shortest, and the middle one. A
    batch of a length has at most the samples that fit, and at most those that are no longer.
    """
    lengths = np.sort(sampler.planned.lengths[sampler.planned.samples, 0])
    if not len(lengths):
        return []
    values, counts = np.unique(lengths, return_counts=True)
    most = np.minimum(np.maximum(sampler.budget.most_samples(values), 1), np.cumsum(counts))
    costliest = int(np.argmax(sampler.budget.cost.of(most, values)))
    chosen = dict.fromkeys((costliest, len(values) - 1, len(values) // 2, 0))
    return [(int(most[index]), int(values[index])) for index in chosen]
