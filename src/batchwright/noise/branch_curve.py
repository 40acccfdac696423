"""The steps-examples curve through branches at several batches: S = Smin (1 + Bc/B), fitted and told.

Promises:
- steps to a loss are read off the best loss so far, between two looks;
- the fit is linear in 1/B and weighs by relative error, seed by seed; from five seeds on there is an interval.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from batchwright.errors import InvalidInputError
from batchwright.noise.interval import LEAST_OBSERVATIONS, fieller
from batchwright.planning.critical_batch import CriticalBatch
from batchwright.printed_result import PrintedResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType


@dataclass(frozen=True)
class Branch:
    """One batch: the steps that each seed took to the loss, None where it was not reached."""

    batch: int
    learning_rate_factor: float
    """Of the workload's own rate; not a number where the rate was handed in."""
    steps: tuple[float | None, ...]

    @property
    def mean_steps(self) -> float | None:
        """Over the seeds; None where one did not get there."""
        known = [each for each in self.steps if each is not None]
        return sum(known) / len(known) if known and len(known) == len(self.steps) else None


@dataclass(frozen=True, repr=False)
class MeasuredCriticalBatch(PrintedResult):
    """The critical batch from the steps-examples curve, beside the noise scale that stands in for it."""

    in_repr = ("critical_batch", "noise_scale", "target_loss")

    critical_batch: CriticalBatch
    min_steps: float
    """Smin: what no batch could beat."""
    min_examples: float
    """Emin: what the smallest batches need."""
    target_loss: float
    branches: tuple[Branch, ...]
    noise_scale: CriticalBatch | None
    notes: tuple[str, ...] = ()

    @property
    def ratio(self) -> float | None:
        """The critical batch over the noise scale; None where one of them is not finite."""
        scale = None if self.noise_scale is None else self.noise_scale.in_samples()
        values = (self.critical_batch.value, scale.value if scale else math.inf)
        return values[0] / values[1] if all(0 < value < math.inf for value in values) else None

    def calibrated(self, noise_scale: CriticalBatch) -> CriticalBatch:
        """Return the critical batch that a noise scale stands for, by the ratio of the two that was measured here.

        A noise scale can be averaged over a whole run, where branches were short. Its interval is that of the product,
        taken by its ends: wider than need be.
        """
        here, there = None if self.noise_scale is None else self.noise_scale.in_samples(), noise_scale.in_samples()
        ratio = self.ratio
        if here is None or there is None or ratio is None:
            raise InvalidInputError(
                f"nothing to calibrate by: critical batch {self.critical_batch}, noise scale {self.noise_scale}.",
                remedy="more steps or more seeds",
            )
        ends = self.critical_batch.low / here.value, self.critical_batch.high / here.value
        return replace(
            there, value=there.value * ratio, low=there.low * ends[0], high=there.high * ends[1], trace=math.nan
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the measurement as plain data."""
        return {
            "schema": 1,
            "source": "measured",
            "critical_batch": self.critical_batch.to_dict(),
            "noise_scale": None if self.noise_scale is None else self.noise_scale.to_dict(),
            "ratio": self.ratio,
            "min_steps": self.min_steps,
            "min_examples": self.min_examples,
            "target_loss": self.target_loss,
            "branches": [
                {
                    **asdict(branch),
                    "learning_rate_factor": None
                    if math.isnan(branch.learning_rate_factor)
                    else branch.learning_rate_factor,
                    "steps": list(branch.steps),
                    "mean_steps": branch.mean_steps,
                }
                for branch in self.branches
            ],
            "notes": list(self.notes),
        }

    def __rich__(self) -> RenderableType:
        from batchwright.report.text.noise_text import draw_branches

        return draw_branches(self)

    def _repr_html_(self) -> str:
        from batchwright.report.display import table_to_html
        from batchwright.report.text.noise_text import branches_columns, branches_remarks, summarize_branches

        return table_to_html(summarize_branches(self), branches_columns(self), branches_remarks(self))


def steps_to(target: float, curve: Sequence[tuple[int, float]]) -> float | None:
    """Return the steps at which the best loss so far reached the target, between two looks; None where it did not.

    >>> steps_to(1.5, [(0, 3.0), (10, 2.0), (20, 2.5), (30, 1.0)])
    25.0
    """
    before, best = curve[0]
    for step, loss in curve[1:]:
        if loss <= target:
            share = (best - target) / (best - loss) if best > loss else 1.0
            return before + max(share, 0.0) * (step - before) if best > target else float(before)
        if loss < best:
            best = loss
        before = step
    return None


def fit_branches(
    branches: Sequence[Branch], *, target: float, noise_scale: CriticalBatch | None
) -> MeasuredCriticalBatch | None:
    """Fit the curve through the branches that all seeds finished; None where there are fewer than two.

    >>> exact = [Branch(b, 1.0, tuple(100 * (1 + 50 / b) for _ in range(5))) for b in (10, 50, 250)]
    >>> found = fit_branches(exact, target=1.0, noise_scale=None)
    >>> round(found.critical_batch.value, 6), round(found.min_steps, 6), round(found.min_examples, 6)
    (50.0, 100.0, 5000.0)
    """
    whole = [branch for branch in branches if branch.mean_steps is not None]
    missing = [branch.batch for branch in branches if branch.mean_steps is None]
    if len(whole) < 2:
        return None
    table = np.array([branch.steps for branch in whole], float)
    weights = 1 / table.mean(axis=1)
    design = np.stack([np.ones(len(whole)), [1 / branch.batch for branch in whole]], axis=1)
    solved, *_ = np.linalg.lstsq(design * weights[:, None], table * weights[:, None], rcond=None)
    smallest, examples = solved
    steps, samples = float(smallest.mean()), float(examples.mean())
    interval = fieller(examples, smallest, drifts=False) if table.shape[1] >= LEAST_OBSERVATIONS else None
    value = math.inf if steps <= 0 else max(samples, 0.0) / steps
    notes = [f"batch {batch} did not reach the loss on every seed, and was left out" for batch in missing]
    if steps <= 0:
        notes.append(
            f"up to batch {whole[-1].batch:,} every doubling halves the steps: the critical batch is larger; try more"
        )
    if interval is None:
        notes.append(f"{table.shape[1]} seeds give no interval; {LEAST_OBSERVATIONS} do")
    return MeasuredCriticalBatch(
        critical_batch=CriticalBatch(
            value=value,
            low=interval.low if interval else 0.0,
            high=interval.high if interval else math.inf,
            unit="samples",
            observations=table.shape[1],
        ),
        min_steps=max(steps, 0.0),
        min_examples=max(samples, 0.0),
        target_loss=target,
        branches=tuple(branches),
        noise_scale=noise_scale,
        notes=tuple(notes),
    )
