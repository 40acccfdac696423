"""The learning rate that goes with the recommended batch: tuned by branches where there are any, else by a rule."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from batchwright.noise.learning_rate_change import learning_rate_change

if TYPE_CHECKING:
    from batchwright.tuning.known import Known
    from batchwright.tuning.recommendation import Choice

# Branches try factors of 2, so the best rate lies within half of one.
_HALF_OF_A_FACTOR = math.sqrt(2)


def learning_rate(known: Known, choice: Choice) -> dict[str, Any] | None:
    """Return the learning rate for the recommended batch, beside the workload's own; None where nothing tells it."""
    about = known.section("workload") or {}
    rate = about.get("learning_rate")
    if rate is None:
        return None
    return _by_branches(known, choice, rate) or _by_rule(known, choice, rate, about["optimizer"])


def _by_branches(known: Known, choice: Choice, rate: float) -> dict[str, Any] | None:
    branches = (known.section("branches") or {}).get("branches", ())
    tuned = {
        branch["batch"]: branch["learning_rate_factor"]
        for branch in branches
        if branch["mean_steps"] is not None and branch["learning_rate_factor"]
    }
    if not tuned:
        return None
    batch = choice.plan.effective_batch
    outside = batch < min(tuned) or batch > max(tuned)
    factor = _on_line(tuned, min(max(batch, min(tuned)), max(tuned)))
    told = ", ".join(f"{rate * each:.3g} at batch {size:,}" for size, each in tuned.items())
    return {
        "source": "measured",
        "now": rate,
        "at_batch": None,
        "factor": factor,
        "recommended": rate * factor,
        "low": rate * factor / _HALF_OF_A_FACTOR,
        "high": rate * factor * _HALF_OF_A_FACTOR,
        "rule": f"tuned by factors of 2 in short branches: {told}"
        + (f"; batch {batch:,} is outside, and takes the end of their line" if outside else "; on their line"),
    }


def _on_line(tuned: dict[int, float], batch: float) -> float:
    """Return the factor at a batch on the power law through those tuned, between constant and proportional.

    Each was found to a factor of 2, on one seed: all of them together tell more than the two beside the batch.

    >>> round(_on_line({16: 1.0, 64: 2.0}, 32), 3), round(_on_line({16: 2.0, 64: 1.0}, 64), 3)
    (1.414, 1.414)
    """
    sizes, factors = np.log(list(tuned)), np.log(list(tuned.values()))
    spread = float(np.square(sizes - sizes.mean()).sum())
    slope = float(((sizes - sizes.mean()) * factors).sum()) / spread if spread else 0.0
    return math.exp(factors.mean() + min(max(slope, 0.0), 1.0) * (math.log(batch) - sizes.mean()))


def _by_rule(known: Known, choice: Choice, rate: float, optimizer: str | None) -> dict[str, Any] | None:
    noise = known.section("noise")
    if optimizer is None or noise is None or choice.critical is None:
        return None
    tuned_at = noise["effective_batch"]
    change = learning_rate_change(optimizer, tuned_at, choice.plan.effective_batch, choice.critical, learning_rate=rate)
    if change.factor is None:
        return None
    return {
        "source": "formula",
        "now": rate,
        "at_batch": tuned_at,
        "factor": change.factor.value,
        "recommended": rate * change.factor.value,
        "low": rate * change.factor.low,
        "high": rate * change.factor.high,
        "rule": change.reason,
    }
