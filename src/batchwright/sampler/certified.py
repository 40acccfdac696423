"""A sampler whose costliest batch has run: the budget comes from a fit, and a probe has the last word."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from batchwright.errors import NothingFitsError
from batchwright.fitting.fit import fit as run_fit
from batchwright.sampler.fitted_cost import fitted_cost, length_name
from batchwright.units import counted, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchwright.fitting.result import Fit
    from batchwright.sampler.token_batch_sampler import TokenBatchSampler

_MOST_TRIES = 6


def certified_sampler(
    make: Callable[..., TokenBatchSampler], fit: Fit, lengths: Any, workload: Any, **options: Any
) -> TokenBatchSampler:
    """Make a sampler by the bytes of a fit, probe its costliest batch, and lower the budget until that runs."""
    name, (cost, limit) = length_name(fit), fitted_cost(fit)
    budget = limit
    for _ in range(_MOST_TRIES):
        sampler = make(lengths, budget, cost=cost, **options)
        samples, length = costliest_batch(sampler)
        if not samples:
            return sampler
        shape = {**{key: value for key, value in fit.shape.items() if key != name}, name: length}
        found = run_fit(workload, on=fit.on, memory=int(limit), limit=samples, shapes=shape, cache=False)
        if found.micro_batch is not None and found.micro_batch >= samples:
            sampler.certified = (
                f"the costliest batch, {counted(samples, 'sample')} of {length:,}, ran on {fit.on} within "
                f"{format_bytes(limit)}"
            )
            return sampler
        ran = found.micro_batch or 0
        # What ran is the new bound at this length, and the cost carries it to the others.
        budget = min(float(cost.of(np.array([max(ran, 0)]), np.array([length]))[0]), budget * 0.98)
        if budget <= cost.fixed:
            break
    raise NothingFitsError(
        f"no budget was found under which the costliest batch runs within {format_bytes(limit)} on {fit.on}.",
        details=[f"the last tried: {counted(samples, 'sample')} of {length:,}"],
        remedy="a fit over lengths up to the longest sample",
    )


def costliest_batch(sampler: TokenBatchSampler) -> tuple[int, int]:
    """Return samples and padded length of the costliest batch of an epoch; 0 where there is none."""
    plan = sampler.planned
    if not plan.costs.size:
        return 0, 0
    index = np.unravel_index(int(plan.costs.argmax()), plan.costs.shape)
    return int(plan.sizes[index]), int(plan.longest[index])
