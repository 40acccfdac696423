"""Short trainings that begin alike: one seed, the same held-out samples, any batch and learning rate.

Promises:
- every branch of a seed begins at the same weights, optimizer state and learning rate, and is judged on the same
  samples;
- a branch whose loss is no longer a number ends there, and has not reached anything;
- a branch that was trained before is not trained again: a seed, a batch and a rate make one curve.
"""

from __future__ import annotations

import itertools
import math
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Subset, default_collate

from batchwright.accumulate.accumulator import Accumulator
from batchwright.accumulate.read_ahead import SizedBatches
from batchwright.device.batches import make_batch, move_batch
from batchwright.device.step import evaluating
from batchwright.device.step_checks import checked_loss, needing_larger_micro_batches, scalar_loss
from batchwright.errors import InvalidInputError
from batchwright.noise.branch_curve import steps_to
from batchwright.noise.noise_scale import NoiseScale
from batchwright.noise.training import Trained, fitting_split, split_of, training
from batchwright.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from batchwright.noise.critical_batch import CriticalBatch
    from batchwright.workload import Workload

    Curve = list[tuple[int, float]]
    """Steps, and the held-out loss after them."""

# How often a branch is judged on its way: as often as that costs no more than the training, within these.
_LEAST_LOOKS, _MOST_LOOKS = 20, 40
# Forward and backward of a sample, in forwards.
_COST_OF_TRAINING = 3


@dataclass(frozen=True)
class Ask:
    """One branch: its batch, how long, at what learning rate, and where it may stop."""

    batch: int
    steps: int
    """By which the spacing of looks is set."""
    most: int
    factor: float = 1.0
    """Of the workload's own learning rate."""
    rate: float | None = None
    """Instead of that."""
    target: float | None = None
    watches_noise: bool = False


class SeedBranches:
    """The branches of one seed."""

    def __init__(
        self,
        workload: Workload,
        device: torch.device,
        shape: Mapping[str, Any],
        seed: int,
        held_out: int,
        warm_up: int,
        largest: int | None = None,
    ) -> None:
        self.seed = seed
        self.optimizer = ""
        self.noise_scale: CriticalBatch | None = None
        self._workload, self._device, self._shape = workload, device, shape
        self._warm_up, self._num_held_out, self._largest = warm_up, held_out, largest
        self._held_out: Any = None
        self._kept: dict[tuple[int, float, float | None], tuple[Curve, CriticalBatch | None]] = {}
        self._loss: Any = workload.loss
        if workload.data is not None:
            size = min(held_out, len(workload.data) // 5)
            if size < 1:
                number = counted(len(workload.data), "sample")
                raise InvalidInputError(f"data= holds {number}: too few to hold some out.")
            order = torch.randperm(len(workload.data), generator=torch.Generator().manual_seed(0)).tolist()
            self._held_out = Subset(workload.data, order[:size])
            self._workload = replace(workload, data=Subset(workload.data, order[size:]))

    def known(self, ask: Ask) -> Curve | None:
        """Return the curve of a branch that was trained before, as far as it is asked for."""
        curve, scale = self._kept.get((ask.batch, ask.factor, ask.rate), ([], None))
        if not curve or (ask.watches_noise and scale is None):
            return None
        last, loss = curve[-1]
        reached = ask.target is not None and steps_to(ask.target, curve) is not None
        return curve if reached or last >= ask.most or not math.isfinite(loss) else None

    def train(self, ask: Ask, *, first_batch: int) -> Curve:
        """Train a branch, and return the held-out loss at every look; `first_batch` is that of the warm-up."""
        curve, key = self.known(ask), (ask.batch, ask.factor, ask.rate)
        if curve is None:
            self.noise_scale = None
            curve = self._train(ask, first_batch)
            self._kept[key] = (curve, self.noise_scale)
        self.noise_scale = self._kept[key][1]
        return curve

    def _train(self, ask: Ask, first_batch: int) -> Curve:
        with training(self._workload, device=self._device, shape=self._shape, seed=self.seed) as trained:
            self.optimizer = type(trained.optimizers[0]).__name__
            judged = self._held_out_batches()
            for _ in self._stepped(trained, first_batch, self._warm_up):
                pass
            for optimizer in trained.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = ask.rate if ask.rate is not None else group["lr"] * ask.factor
            curve = [(0, self._judge(trained, judged))]
            looks = _COST_OF_TRAINING * ask.steps * ask.batch // self._num_held_out
            every = max(ask.steps // min(max(looks, _LEAST_LOOKS), _MOST_LOOKS), 1)
            for number in self._stepped(trained, ask.batch, ask.most, watch_until=ask.steps * ask.watches_noise):
                if number % every and number != ask.most:
                    continue
                curve.append((number, self._judge(trained, judged)))
                if not math.isfinite(curve[-1][1]) or (ask.target is not None and curve[-1][1] <= ask.target):
                    break
            return curve

    def _stepped(self, trained: Trained, batch: int, steps: int, *, watch_until: int = 0) -> Iterator[int]:
        """Train so many steps, and yield the number of each; end where the loss is no number."""
        split_of(batch, None, trained.ranks)  # refuses what ranks cannot share
        size, accumulation = fitting_split(batch // trained.ranks, self._largest)
        accumulator = Accumulator(trained.model, list(trained.optimizers), accumulation)
        population = None if self._workload.data is None else len(self._workload.data)
        noise = NoiseScale(accumulator, window=math.inf, population=population) if watch_until else None
        loader = SizedBatches(itertools.islice(trained.batches(size, accumulation), steps * accumulation), size)
        split = f"batch {batch}, as {size}x{accumulation},"
        with nullcontext() if noise is None else closing(noise), needing_larger_micro_batches(split):
            for micro in accumulator.micro_batches(loader, weight=self._workload.units):
                loss = checked_loss(self._loss(trained.model, micro))
                is_bad = not bool(torch.isfinite(loss.detach()).all())
                if trained.summed(float(is_bad))[0]:  # all ranks end a branch, or none
                    return
                step = accumulator.backward(loss)
                if step is None:
                    continue
                if noise is not None and step.number == watch_until:
                    self.noise_scale = noise.critical_batch
                    noise.close()
                yield step.number

    def _held_out_batches(self) -> list[tuple[Any, int]]:
        """Return what branches are judged on, in pieces that fit, each with its number of samples."""
        number = self._num_held_out if self._held_out is None else len(self._held_out)
        each = min(self._largest or number, number)
        sizes = [min(each, number - start) for start in range(0, number, each)]
        if self._held_out is None:
            return [(make_batch(self._workload, size, self._shape, self._device), size) for size in sizes]
        samples, collate = iter(self._held_out), self._workload.collate or default_collate
        return [(move_batch(collate(list(itertools.islice(samples, size))), self._device), size) for size in sizes]

    def _judge(self, trained: Trained, batches: list[tuple[Any, int]]) -> float:
        total = units = 0.0
        with torch.no_grad(), evaluating(trained.model):
            for batch, size in batches:
                weight = float(size if self._workload.units is None else self._workload.units(batch))
                total, units = total + weight * float(scalar_loss(self._loss(trained.model, batch))), units + weight
        # Samples that are made differ from rank to rank. Judged apart, ranks would end a branch at different steps, or
        # tune to different rates, and wait for each other for ever.
        total, units = trained.summed(total, units)
        return total / units if math.isfinite(total) else math.inf
