"""The bytes of a batch as a cost, from the probes of a fit over several sequence lengths.

Promises:
- coefficients are not negative, and no probe took more than the cost says: the fit is raised to the highest of them;
- a probe that ran out of memory is over the budget by the cost too.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from batchwright.errors import InvalidInputError
from batchwright.fitting.result import limited_peak
from batchwright.sampler.cost import BatchCost
from batchwright.units import format_bytes

if TYPE_CHECKING:
    from batchwright.fitting.result import Fit

_LEAST_SHAPES = 3


def length_name(fit: Fit) -> str:
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


def fitted_cost(fit: Fit) -> tuple[BatchCost, float]:
    """Return the bytes of a batch by samples and length, and the bytes that it may take."""
    name = length_name(fit)
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
    cost = BatchCost(*_not_negative(columns / peaks[:, None]))
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


def _not_negative(rows: np.ndarray[Any, Any]) -> list[float]:
    """Solve rows @ x = 1 in least squares with no coefficient below 0: every subset of three is tried."""
    best: tuple[float, list[float]] | None = None
    for subset in chain.from_iterable(combinations(range(3), size) for size in (1, 2, 3)):
        part, *_ = np.linalg.lstsq(rows[:, subset], np.ones(len(rows)), rcond=None)
        error = float(((rows[:, subset] @ part - 1) ** 2).sum())
        if (
            (part >= 0).all()
            and part[list(subset).index(max(subset))] > 0
            and (best is None or error < best[0] - 1e-15)
        ):
            found = [0.0, 0.0, 0.0]
            for index, value in zip(subset, part.tolist(), strict=True):
                found[index] = value
            if found[1] or found[2]:
                best = (error, found)
    assert best is not None, "one positive column always has a positive solution"
    return best[1]
