"""`measure_critical_batch`: the critical batch itself, by training short branches at B, 2B, 4B, ...

The noise scale is only a proxy: it equals the critical batch if the loss curves alike in all directions (McCandlish
et al. 2018). Here the curve that defines the latter is measured: the steps S that a batch takes to the same loss,
fitted by S = Smin (1 + Bc/B).

Promises:
- every branch of a seed begins at the same weights, optimizer state and learning rate, and is judged on the same
  samples;
- the learning rate is tuned for each batch, by factors of 2 and then of the root of 2, on the first two seeds: at a
  rate that merely follows a rule the answer would be the rule's own;
- steps to a loss are read off the best loss so far, between two looks;
- the fit is linear in 1/B and weighs by relative error, seed by seed; from five seeds on there is an interval;
- a branch that does not get there, or whose loss is no longer a number, is left out and named.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from batchwright.device.device import open_device
from batchwright.errors import BatchwrightError, InvalidInputError
from batchwright.noise.branch_training import BranchRequest, SeedBranches, steps_to
from batchwright.noise.interval import LEAST_OBSERVATIONS, fieller
from batchwright.planning.critical_batch import CriticalBatch
from batchwright.planning.learning_rate import checked_learning_rate, learning_rate_change
from batchwright.printed_result import PrintedResult
from batchwright.state.untouched import untouched
from batchwright.units import counted, shortened, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from batchwright.workload import Workload


@dataclass(frozen=True)
class Branch:
    """One batch: the steps that each seed took to the loss, None if it did not reach it."""

    batch: int
    learning_rate_factor: float
    """Of the workload's own rate; not a number if the rate was handed in."""
    steps: tuple[float | None, ...]

    @property
    def mean_steps(self) -> float | None:
        """Over the seeds; None if one did not get there."""
        known = [steps for steps in self.steps if steps is not None]
        return sum(known) / len(known) if known and len(known) == len(self.steps) else None


@dataclass(frozen=True, repr=False)
class MeasuredCriticalBatch(PrintedResult):
    """The critical batch from the steps-examples curve, beside the noise scale that stands in for it."""

    in_repr = ("critical_batch", "noise_scale", "target_loss")
    drawn_by = "training_text.draw_branches"

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
        """The critical batch over the noise scale; None if one of them is not finite."""
        scale = None if self.noise_scale is None else self.noise_scale.in_samples()
        values = (self.critical_batch.value, scale.value if scale else math.inf)
        return values[0] / values[1] if all(0 < value < math.inf for value in values) else None

    def calibrated(self, noise_scale: CriticalBatch) -> CriticalBatch:
        """Return the critical batch that a noise scale stands for, by the ratio of the two that was measured here.

        A noise scale can be averaged over a whole run, where branches were short. Its interval is that of the product,
        taken by its ends: wider than need be.
        """
        measured = None if self.noise_scale is None else self.noise_scale.in_samples()
        other, ratio = noise_scale.in_samples(), self.ratio
        if measured is None or other is None or ratio is None:
            raise InvalidInputError(
                f"nothing to calibrate by: critical batch {self.critical_batch}, noise scale {self.noise_scale}.",
                remedy="more steps or more seeds",
            )
        low, high = self.critical_batch.low / measured.value, self.critical_batch.high / measured.value
        wide = replace(other, value=other.value * ratio, low=other.low * low, high=other.high * high, trace=math.nan)
        return replace(wide, evidence="branches")

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


def fit_branches(
    branches: Sequence[Branch], *, target: float, noise_scale: CriticalBatch | None
) -> MeasuredCriticalBatch | None:
    """Fit the curve through the branches that all seeds finished; None if there are fewer than two.

    >>> exact = [Branch(b, 1.0, tuple(100 * (1 + 50 / b) for _ in range(5))) for b in (10, 50, 250)]
    >>> measured = fit_branches(exact, target=1.0, noise_scale=None)
    >>> round(measured.critical_batch.value, 6), round(measured.min_steps, 6), round(measured.min_examples, 6)
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
            evidence="branches",
        ),
        min_steps=max(steps, 0.0),
        min_examples=max(samples, 0.0),
        target_loss=target,
        branches=tuple(branches),
        noise_scale=noise_scale,
        notes=tuple(notes),
    )


# How many times as long as the smallest batch may any other take.
_PATIENCE = 2
# A rate must be better by this to be worth another try beyond it.
_BETTER = 0.98
# One seed alone may like a rate by chance.
_TUNED_ON = 2
_MOST_DOUBLINGS = 10


def measure_critical_batch(
    workload: Workload,
    *,
    batches: Sequence[int] = (16, 32, 64, 128),
    steps: int = 200,
    seeds: int = 5,
    warm_up: int = 0,
    learning_rates: Mapping[int, float] | None = None,
    evaluate_samples: int = 256,
    largest: int | None = None,
    on: str | None = None,
    shape: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> MeasuredCriticalBatch:
    """Train branches at several batches to the loss that the smallest reaches in `steps`, and fit the critical batch.

    >>> import torch
    >>> from batchwright.workload import Workload
    >>> workload = Workload(
    ...     model=lambda: torch.nn.Linear(4, 1),
    ...     batch=lambda n: torch.randn(n, 4),
    ...     loss=lambda model, batch: (model(batch) - batch.sum(1, keepdim=True)).pow(2).mean(),
    ...     optimizer=lambda params: torch.optim.SGD(params, lr=0.02),
    ... )
    >>> measured = measure_critical_batch(workload, batches=(2, 8), steps=10, seeds=1)
    >>> [branch.batch for branch in measured.branches], measured.noise_scale.unit
    ([2, 8], 'samples')

    - `batches`: the effective batches to train at.
    - `steps`: optimizer steps of the smallest batch; the loss it reaches is the target of all.
    - `seeds`: repeats; from 5 on there is an interval.
    - `warm_up`: steps at the smallest batch before, so that branches begin in the middle of training.
    - `learning_rates`: the rate of a batch, which is then not tuned.
    - `evaluate_samples`: held-out samples that branches are judged on.
    - `largest`: the largest micro-batch that fits.
    - `on`, `shape`: the device, and what else `batch` takes.
    """
    sizes = _sizes(batches)
    rates = _rates(learning_rates or {}, sizes)
    whole_number(steps, "steps")
    whole_number(warm_up, "warm_up", least=0)
    whole_number(evaluate_samples, "evaluate_samples")
    device = open_device(on).torch_device
    # Once for all branches: each begins and ends at what is kept here.
    with untouched(workload, accelerator=None if device.type == "cpu" else device) as keep, ExitStack() as open_files:
        runs = [
            SeedBranches(workload, device, shape or {}, seed, evaluate_samples, warm_up, largest, progress)
            for seed in range(whole_number(seeds, "seeds"))
        ]
        for run in runs:
            open_files.callback(run.close)
        first = sizes[0]

        def train(
            run: SeedBranches, size: int, factor: float, target: float | None = None, within: float = math.inf
        ) -> list[tuple[int, float]]:
            to = "" if target is None else f" to a loss of {target:.4g}"
            most = steps if target is None else math.ceil(min(within, _PATIENCE * steps))
            request = BranchRequest(size, steps, most, factor, rates.get(size), target, watches_noise=target is None)
            if run.known(request) is None:
                progress(f"seed {run.seed}: batch {size}, learning rate x {factor:.3g}{to}")
            return run.train(request, first_batch=first)

        factor = 1.0
        tuned_on = runs[:_TUNED_ON]
        if first not in rates:
            factor = tune_factor(
                1.0, lambda factor, least: sum(lack_of_progress(train(run, first, factor)) for run in tuned_on)
            )
        base = [train(run, first, factor) for run in runs]
        # What every seed of the smallest batch comes down to.
        target = max(min(loss for _, loss in curve) for curve in base)
        if not math.isfinite(target):
            raise BatchwrightError(
                f"the held-out loss of batch {first} is no number: there is no loss that branches could reach.",
                remedy="a loss that is finite on the first samples; learning_rates={batch: rate} if training diverges",
            )
        scale = _median([run.noise_scale for run in runs])
        branches = []
        for size in sizes:
            if size != first and size not in rates:
                guess = factor * _guess_factor(runs[0].optimizer, first, size, scale)

                def steps_at(factor: float, least: float, size: int = size) -> float:
                    total = 0.0
                    for run in tuned_on:
                        total += steps_or_more(target, train(run, size, factor, target, within=least - total))
                        if total >= least:
                            break
                    return total

                own = tune_factor(guess, steps_at)
            else:
                own = factor
            reached = tuple(steps_to(target, train(run, size, own, target)) for run in runs)
            branches.append(Branch(size, math.nan if size in rates else own, reached))
        notes = keep.notes
    measured = fit_branches(branches, target=target, noise_scale=scale)
    if measured is None:
        raise BatchwrightError(
            f"fewer than two batches reached a loss of {target:.4g} within {_PATIENCE * steps} steps.",
            remedy="more steps, or learning_rates={batch: rate} that were tuned",
        )
    return replace(measured, notes=(*measured.notes, *notes))


def tune_factor(guess: float, cost_of: Callable[[float, float], float]) -> float:
    """Return the factor with the least cost among doublings and halvings of a guess, then half of such a stride.

    >>> round(tune_factor(1.0, lambda factor, least: abs(factor - 5)), 2)
    5.66

    `cost_of` receives the least cost so far: what is beyond it need not be known. While it is infinite, the factor is
    halved.

    >>> round(tune_factor(64.0, lambda factor, least: abs(factor - 5) if factor < 10 else math.inf), 2)
    5.66
    """
    best, least = guess, cost_of(guess, math.inf)
    for _ in range(_MOST_DOUBLINGS):  # a rate at which the loss grows has no neighbour that is better by a little
        if math.isfinite(least):
            break
        guess = best = guess / 2
        least = cost_of(best, math.inf)
    for step in (2.0, 0.5):
        factor = guess * step
        for _ in range(_MOST_DOUBLINGS):
            cost = cost_of(factor, least)
            if not cost < _BETTER * least:
                break
            best, least, factor = factor, cost, factor * step
        if best != guess:
            break
    for factor in (best * math.sqrt(2), best / math.sqrt(2)):
        cost = cost_of(factor, least)
        if cost < _BETTER * least:
            return factor
    return best


def steps_or_more(target: float, curve: Sequence[tuple[int, float]]) -> float:
    """The steps to the target; if it was not reached, more than any that did, the less progress the more."""
    reached = steps_to(target, curve)
    return 1e12 * lack_of_progress(curve) if reached is None else reached


def lack_of_progress(curve: Sequence[tuple[int, float]]) -> float:
    """The inverse of how far the loss came down: halved if it came down twice as far, however little that is."""
    decrease = curve[0][1] - min(loss for _, loss in curve)
    return 1 / decrease if decrease > 0 and math.isfinite(curve[-1][1]) else math.inf


def _guess_factor(optimizer: str, before: int, after: int, scale: CriticalBatch | None) -> float:
    in_samples = None if scale is None else scale.in_samples()
    if in_samples is None or not math.isfinite(in_samples.value):
        return 1.0
    factor = learning_rate_change(optimizer, before, after, in_samples).factor
    return 1.0 if factor is None else factor.value


def _median(scales: Iterable[CriticalBatch | None]) -> CriticalBatch | None:
    known = sorted((scale for scale in scales if scale is not None), key=lambda scale: scale.value)
    return known[len(known) // 2] if known else None


def _sizes(batches: Any) -> list[int]:
    given = list(batches) if hasattr(batches, "__iter__") and not isinstance(batches, str) else [batches]
    sizes = sorted({whole_number(size, "batch") for size in given})
    if len(sizes) < 2:
        raise InvalidInputError(f"a curve needs two batches or more; received {shortened(batches)}.", remedy="(16, 64)")
    return sizes


def _rates(given: Mapping[int, float], sizes: Sequence[int]) -> dict[int, float]:
    unknown = [size for size in given if size not in sizes]
    if unknown:
        raise InvalidInputError(
            f"learning_rates names {counted(len(unknown), 'batch')} that {list(sizes)} does not have: {unknown}."
        )
    return {size: checked_learning_rate(rate) for size, rate in given.items()}
