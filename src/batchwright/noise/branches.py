"""`measure_critical_batch`: the critical batch itself, by training short branches at B, 2B, 4B, ...

The noise scale is only a proxy: it equals the critical batch where the loss curves alike in all directions (McCandlish
et al. 2018). Here the curve that defines the latter is measured: the steps S that each batch takes to the same loss,
fitted by S = Smin (1 + Bc/B).

Promises:
- all branches of a seed begin at the same weights, are judged on the same held-out samples and reach the same loss;
- the learning rate follows the batch by the rule of the optimizer, or as it is handed in; the factor is told;
- a branch that does not get there is left out and named.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Subset

from batchwright.accumulate.accumulator import Accumulator
from batchwright.device.batches import make_batch, move_batch
from batchwright.device.device import open_device
from batchwright.errors import BatchwrightError, InvalidInputError
from batchwright.noise.branch_curve import Branch, MeasuredCriticalBatch, fit_branches, steps_to
from batchwright.noise.learning_rate_change import learning_rate_change
from batchwright.noise.noise_scale import NoiseScale
from batchwright.noise.training import Trained, split_of, training
from batchwright.units import counted, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from batchwright.noise.critical_batch import CriticalBatch
    from batchwright.workload import Workload

# How often a branch is judged on its way, and how much longer than the first one may take.
_LOOKS = 40
_PATIENCE = 2


def measure_critical_batch(
    workload: Workload,
    *,
    batches: Sequence[int] = (16, 32, 64, 128),
    steps: int = 200,
    seeds: int = 5,
    warm_up: int = 0,
    learning_rates: Mapping[int, float] | None = None,
    evaluate_samples: int = 256,
    on: str = "cpu",
    shape: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> MeasuredCriticalBatch:
    """Train branches at several batches to the loss that the smallest reaches in `steps`, and fit the critical batch.

    >>> from batchwright.workload import Workload
    >>> workload = Workload(
    ...     model=lambda: torch.nn.Linear(4, 1),
    ...     batch=lambda n: torch.randn(n, 4),
    ...     loss=lambda model, batch: (model(batch) - batch.sum(1, keepdim=True)).pow(2).mean(),
    ...     optimizer=lambda params: torch.optim.SGD(params, lr=0.02),
    ... )
    >>> found = measure_critical_batch(workload, batches=(2, 8, 32), steps=40, seeds=2)
    >>> [branch.batch for branch in found.branches], found.noise_scale.unit
    ([2, 8, 32], 'samples')

    `warm_up` steps at the smallest batch come before, so that branches begin in the middle of training.
    `learning_rates` names the rate of a batch; others follow from the optimizer's rule. `seeds` are repeats; from 5 on
    there is an interval.
    """
    sizes = sorted({whole_number(size, "batch") for size in batches})
    if len(sizes) < 2:
        raise InvalidInputError(f"a curve needs two batches or more; received {list(batches)}.", remedy="(16, 32, 64)")
    whole_number(steps, "steps")
    device = open_device(on).torch_device  # type: ignore[attr-defined]  # a simulated card cannot train
    runs = [
        _Run(workload, device, shape or {}, seed, evaluate_samples, warm_up)
        for seed in range(whole_number(seeds, "seeds"))
    ]
    rates = dict(learning_rates or {})
    base = []
    for run in runs:
        progress(f"seed {run.seed}: batch {sizes[0]}, {counted(_PATIENCE * steps, 'step')}")
        base.append(run.train(sizes[0], steps=steps, most=_PATIENCE * steps, rate=rates.get(sizes[0]), noise=True))
    # Each of them was there at the end of its `steps`, if not at every look before.
    target = sum(min(loss for at, loss in curve if at <= steps) for curve in base) / len(base)
    scale = runs[0].noise_scale(runs)
    branches = [Branch(sizes[0], 1.0, tuple(steps_to(target, curve) for curve in base))]
    for size in sizes[1:]:
        factor = _factor(runs[0].optimizer, sizes[0], size, scale)
        reached = []
        for run in runs:
            progress(f"seed {run.seed}: batch {size}, to a loss of {target:.4g}")
            curve = run.train(
                size, steps=steps, most=_PATIENCE * steps, rate=rates.get(size), factor=factor, target=target
            )
            reached.append(steps_to(target, curve))
        branches.append(Branch(size, factor if size not in rates else math.nan, tuple(reached)))
    found = fit_branches(branches, target=target, noise_scale=scale)
    if found is None:
        raise BatchwrightError(
            f"fewer than two batches reached a loss of {target:.4g} within {_PATIENCE * steps} steps.",
            remedy="more steps, or learning_rates={batch: rate} that were tuned",
        )
    return found


class _Run:
    """One seed: the same beginning and the same held-out samples for every branch."""

    def __init__(
        self, workload: Workload, device: torch.device, shape: Mapping[str, Any], seed: int, held_out: int, warm_up: int
    ) -> None:
        self._whole = workload
        self._device, self._shape, self.seed = device, shape, seed
        self._warm_up = warm_up
        self._train_on = workload
        self._held_out: Any = None
        if workload.data is not None:
            size = min(held_out, len(workload.data) // 5)
            if size < 1:
                raise InvalidInputError(
                    f"data= holds {counted(len(workload.data), 'sample')}: too few to hold some out."
                )
            order = torch.randperm(len(workload.data), generator=torch.Generator().manual_seed(0)).tolist()
            self._held_out = Subset(workload.data, order[:size])
            self._train_on = replace(workload, data=Subset(workload.data, order[size:]))
        self._num_held_out = held_out
        self.observed: CriticalBatch | None = None
        self.optimizer = ""

    def train(
        self,
        batch: int,
        *,
        steps: int,
        most: int,
        rate: float | None = None,
        factor: float = 1.0,
        target: float | None = None,
        noise: bool = False,
    ) -> list[tuple[int, float]]:
        """Train a branch, and return the held-out loss at every look; stop where the target is reached."""
        with training(self._train_on, device=self._device, shape=self._shape, seed=self.seed) as trained:
            self.optimizer = type(trained.optimizers[0]).__name__
            judged = self._held_out_batch(trained)
            size, accumulation = split_of(batch, None, trained.ranks)
            if self._warm_up:
                self._train(trained, size, accumulation, self._warm_up)
            for optimizer in trained.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate if rate is not None else group["lr"] * factor
            accumulator = Accumulator(trained.model, list(trained.optimizers), accumulation)
            scale = NoiseScale(accumulator, window=float("inf"), population=self._population()) if noise else None
            curve = [(0, self._judge(trained, judged))]
            every = max(steps // _LOOKS, 1)
            loader = itertools.islice(trained.batches(size), most * accumulation)
            for micro in accumulator.micro_batches(loader, weight=self._whole.units):
                step = accumulator.backward(self._whole.loss(trained.model, micro))  # type: ignore[misc]
                if step is None or step.number % every:
                    continue
                curve.append((step.number, self._judge(trained, judged)))
                if scale is not None and step.number >= steps:
                    self.observed = scale.critical_batch
                    scale.close()
                    scale = None
                if target is not None and curve[-1][1] <= target:
                    break
            return curve

    def noise_scale(self, runs: Sequence[_Run]) -> CriticalBatch | None:
        """The noise scale along the first branches, of the seed whose estimate is the median one."""
        seen = [run.observed for run in runs if run.observed is not None]
        return sorted(seen, key=lambda each: each.value)[len(seen) // 2] if seen else None

    def _train(self, trained: Trained, size: int, accumulation: int, steps: int) -> None:
        accumulator = Accumulator(trained.model, list(trained.optimizers), accumulation)
        loader = itertools.islice(trained.batches(size), steps * accumulation)
        for micro in accumulator.micro_batches(loader, weight=self._whole.units):
            accumulator.backward(self._whole.loss(trained.model, micro))  # type: ignore[misc]

    def _population(self) -> int | None:
        return None if self._train_on.data is None else len(self._train_on.data)

    def _held_out_batch(self, trained: Trained) -> Any:
        if self._held_out is None:
            return make_batch(self._whole, self._num_held_out, self._shape, self._device)
        samples = [self._held_out[index] for index in range(len(self._held_out))]
        collate = self._whole.collate or torch.utils.data.default_collate
        return move_batch(collate(samples), self._device)

    def _judge(self, trained: Trained, batch: Any) -> float:
        model = trained.model
        assert self._whole.loss is not None
        model.eval()
        with torch.no_grad():
            loss = float(self._whole.loss(model, batch))
        model.train()
        return loss


def _factor(optimizer: str, before: int, after: int, scale: CriticalBatch | None) -> float:
    in_samples = None if scale is None else scale.in_samples()
    if in_samples is None or not math.isfinite(in_samples.value):
        return 1.0
    found = learning_rate_change(optimizer, before, after, in_samples).factor
    return 1.0 if found is None else found.value
