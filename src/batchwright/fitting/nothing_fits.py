"""What is said where nothing fits: what was tried, what it would need by parts, and what would help.

Promises:
- with several shapes the one that needs least speaks for all: it is the nearest to fitting.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchwright.errors import NothingFitsError
from batchwright.fitting.result import name_shape
from batchwright.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchwright.fitting.budget import Budget
    from batchwright.fitting.forecast import Forecast
    from batchwright.fitting.result import Fit


@dataclass(frozen=True)
class Refusal:
    """One shape at which nothing fits, the smallest size tried there, and what is known of its need."""

    shape: str
    micro_batch: int
    need_bytes: float
    details: tuple[str, ...]
    remedy: str


def refuse(found: Fit, forecast: Forecast) -> Refusal:
    """Gather what there is to say about a shape, while the forecast still speaks of it."""
    trials = found.trials
    smallest = min(trials, key=lambda trial: trial.micro_batch)
    too_small = next((trial for trial in trials if trial.is_too_small), None)
    tried = min((t for t in trials if not t.is_too_small), key=lambda trial: trial.micro_batch, default=smallest)
    details = [f"tried {', '.join(f'{t.micro_batch:,}' for t in trials)}; the smallest said: {tried.error}"]
    if too_small is not None:
        details.append(f"micro-batch {too_small.micro_batch} is no way out: {too_small.error}")
    parts = forecast.parts_needed(tried.micro_batch)
    if tried.doubt:
        parts.append(f"doubt: {tried.doubt}")
    return Refusal(
        shape=name_shape(found.shape),
        micro_batch=tried.micro_batch,
        need_bytes=forecast.need(tried.micro_batch),
        details=(*details, *parts),
        remedy=forecast.remedy() or "more memory, a smaller model or shape, or an optimizer that keeps less state",
    )


def nothing_fits(refusals: Sequence[Refusal], *, on: str, budget: Budget) -> NothingFitsError:
    """Make the error for a search that found nothing at any of its shapes."""
    within = "" if budget.probe_bytes is None else f" ({format_bytes(budget.probe_bytes)})"
    if len(refusals) == 1:
        (only,) = refusals
        problem = f"micro-batch {only.micro_batch:,} does not fit on {on}{within}."
        return NothingFitsError(problem, details=list(only.details), remedy=only.remedy)
    nearest = min(refusals, key=lambda refusal: refusal.need_bytes)
    is_known = nearest.need_bytes < math.inf
    # A shape that refused a smaller size refuses this one too.
    size = max(refusal.micro_batch for refusal in refusals)
    return NothingFitsError(
        f"micro-batch {size:,} fits on {on} at none of the {len(refusals)} shapes{within}.",
        details=[f"{'least is needed at' if is_known else 'the first is'} {nearest.shape}", *nearest.details],
        remedy=nearest.remedy,
    )
