"""One branch after another: a batch trained from one place of a run at one learning rate, and judged on the way.

Promises:
- every branch of a seed begins at the same weights, optimizer state and random numbers; what comes before branches is
  kept on disk where there is room and the same loss comes back, and trained again elsewhere;
- a seed, a batch and a rate make one curve, which is trained once; all seeds are judged on the same samples;
- a branch ends at its loss, where its loss is no longer a number, or at its last step.
"""

from __future__ import annotations

import itertools
import math
import pickle
import shutil
import tempfile
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import Subset, default_collate

from batchwright.accumulate.accumulator import Accumulator
from batchwright.accumulate.micro_batches import SizedBatches
from batchwright.device.batches import make_batch, move_batch
from batchwright.device.step import checked_loss, evaluating, needing_larger_micro_batches, scalar_loss
from batchwright.errors import InvalidInputError
from batchwright.noise.noise_run import Trained, fitting_split, split_of, training
from batchwright.noise.noise_scale import NoiseScale
from batchwright.state.held_objects import held_objects
from batchwright.state.process_state import put_back_of_generator, random_sources
from batchwright.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from batchwright.planning.critical_batch import CriticalBatch
    from batchwright.workload import Workload

Curve = list[tuple[int, float]]
"""Steps, and the held-out loss after them."""


def steps_to(target: float, curve: Sequence[tuple[int, float]]) -> float | None:
    """Return the steps at which the best loss so far reached the target, between two looks; None if it did not.

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


def smoothed(curve: Sequence[tuple[int, float]], looks: int) -> Curve:
    """Return the first look, which progress is measured from, and the mean of each so many in a row at the middle one.

    >>> smoothed([(0, 3.0), (10, 2.0), (20, 2.5), (30, 1.5), (40, 2.0)], 3)
    [(0, 3.0), (20, 2.0), (30, 2.0)]
    """
    later = list(curve[1:])
    number = min(looks, len(later))
    rows = [later[first : first + number] for first in range(len(later) - number + 1)] if later else []
    return [curve[0], *((row[number // 2][0], sum(loss for _, loss in row) / number) for row in rows)]


# How often a branch is judged on its way: as often as that costs no more than the training, within these.
_LEAST_LOOKS, _MOST_LOOKS = 20, 40
# Forward and backward of a sample, in forwards.
_COST_OF_TRAINING = 3
_HELD_OUT_SEED = 20_011
# Times the weights: those, two moments, and some room.
_LEAST_FREE = 5
# What a loss may be off by that is computed again.
_SAME_LOSS = 1e-5


@dataclass(frozen=True)
class BranchRequest:
    """One branch: its batch, how long to train, at what learning rate, and where it may stop."""

    batch: int
    steps: int
    """By which the spacing of looks is set."""
    most: int
    factor: float = 1.0
    """Of the workload's own learning rate."""
    rate: float | None = None
    """Instead of that."""
    target: float | None = None
    looks: int = 1
    """How many looks are averaged: one alone may be lucky, the more the higher the rate."""
    looked_from: int = 0
    """No look before this step, but for the first."""
    watches_noise: bool = False


class _Checkpoint:
    """Where the branches of a seed begin, on disk, and the loss there, by which a return to it is checked."""

    def __init__(self, trained: Trained, accelerator: torch.device | None) -> None:
        self.loss = math.nan
        held = [tensor.detach() for tensor in _tensors_of(trained)]
        # Not load_state_dict(): it turns states of another format into that of their weights.
        states = [_state_of(optimizer) for optimizer in trained.optimizers]
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the branches
        try:
            if shutil.disk_usage(tempfile.gettempdir()).free < _LEAST_FREE * sum(tensor.nbytes for tensor in held):
                raise OSError("too little room for a checkpoint")
            torch.save((held, states), self._file)
        except BaseException:
            self.close()
            raise
        work = trained.workload
        functions = [each for each in (work.batch, work.loss, work.collate, work.units) if each is not None]
        own = (put_back_of_generator(thing) for function in functions for thing in held_objects(function).values())
        self._random = (*random_sources(accelerator).values(), *(put_back for put_back in own if put_back))

    def restore(self, trained: Trained) -> None:
        self._file.seek(0)
        held, states = torch.load(self._file, map_location=trained.device, weights_only=False)
        with torch.no_grad():
            for tensor, before in zip(_tensors_of(trained), held, strict=True):
                tensor.copy_(before)
        for optimizer, (groups, settings) in zip(trained.optimizers, states, strict=True):
            for group, kept, options in zip(optimizer.param_groups, groups, settings, strict=True):
                group.update(options)
                optimizer.state.update(
                    (weight, state) for weight, state in zip(group["params"], kept, strict=True) if state is not None
                )
        for put_back in self._random:
            put_back()

    def close(self) -> None:
        self._file.close()


def _tensors_of(trained: Trained) -> list[torch.Tensor]:
    return [*trained.model.parameters(), *trained.model.buffers()]


def _state_of(optimizer: Any) -> tuple[list[list[Any]], list[dict[str, Any]]]:
    groups = [[optimizer.state.get(weight) for weight in group["params"]] for group in optimizer.param_groups]
    settings = [{name: group[name] for name in group if name != "params"} for group in optimizer.param_groups]
    return groups, settings


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
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.seed = seed
        self.optimizer = ""
        self.noise_scale: CriticalBatch | None = None
        self._workload, self._device, self._shape, self._progress = workload, device, shape, progress
        self._warm_up, self._num_held_out, self._largest = warm_up, held_out, largest
        self._held_out: Any = None
        self._checkpoint: _Checkpoint | None = None
        self._keeps_checkpoint = True
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

    def close(self) -> None:
        """Let go of what is kept on disk."""
        if self._checkpoint is not None:
            self._checkpoint.close()
            self._checkpoint = None

    def known(self, request: BranchRequest) -> Curve | None:
        """Return the curve of a branch that was trained before, as far as it is requested."""
        curve, scale = self._kept.get((request.batch, request.factor, request.rate), ([], None))
        if not curve or (request.watches_noise and scale is None):
            return None
        last, loss = curve[-1]
        reached = request.target is not None and steps_to(request.target, smoothed(curve, request.looks)) is not None
        return curve if reached or last >= request.most or not math.isfinite(loss) else None

    def train(self, request: BranchRequest, *, first_batch: int) -> Curve:
        """Train a branch, and return the held-out loss at every look; `first_batch` is that of the warm-up."""
        curve, key = self.known(request), (request.batch, request.factor, request.rate)
        if curve is None:
            self.noise_scale = None
            curve = self._train(request, first_batch) or self._train(request, first_batch)
            self._kept[key] = (curve, self.noise_scale)
        self.noise_scale = self._kept[key][1]
        return curve

    def _train(self, request: BranchRequest, first_batch: int) -> Curve:
        """Return the curve; none if the checkpoint is not where branches began, which is then done without."""
        with training(self._workload, device=self._device, shape=self._shape, seed=self.seed) as trained:
            self.optimizer = type(trained.optimizers[0]).__name__
            judged = self._held_out_batches()
            self._go_to_the_beginning(trained, first_batch)
            for optimizer in trained.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = request.rate if request.rate is not None else group["lr"] * request.factor
            curve = [(0, self._judge(trained, judged))]
            if self._checkpoint is not None:
                if math.isnan(self._checkpoint.loss):
                    self._checkpoint.loss = curve[0][1]
                elif not math.isclose(self._checkpoint.loss, curve[0][1], rel_tol=_SAME_LOSS):
                    # Something is the user's that is in no weight, such as a teacher in the loss.
                    self._keeps_checkpoint = False
                    self.close()
                    return []
            looks = _COST_OF_TRAINING * request.steps * request.batch // self._num_held_out
            every = max(request.steps // min(max(looks, _LEAST_LOOKS), _MOST_LOOKS), 1)
            for number in self._stepped(
                trained, request.batch, request.most, watch_until=request.steps * request.watches_noise
            ):
                if number != request.most and (number % every or number < request.looked_from):
                    continue
                curve.append((number, self._judge(trained, judged)))
                if not math.isfinite(curve[-1][1]):
                    break
                if request.target is not None and smoothed(curve, request.looks)[-1][1] <= request.target:
                    break
            return curve

    def _go_to_the_beginning(self, trained: Trained, first_batch: int) -> None:
        """Train up to where branches begin; the second time only go back to there."""
        if not self._warm_up:
            return
        if self._checkpoint is not None:
            self._checkpoint.restore(trained)
            return
        self._progress(f"seed {self.seed}: {counted(self._warm_up, 'step')} at batch {first_batch} before branches")
        for _ in self._stepped(trained, first_batch, self._warm_up):
            pass
        # Ranks that do not agree on what is kept would wait for each other for ever.
        if self._keeps_checkpoint and trained.ranks == 1:
            try:
                self._checkpoint = _Checkpoint(trained, None if self._device.type == "cpu" else self._device)
            except (OSError, RuntimeError, TypeError, AttributeError, pickle.PicklingError):
                self._keeps_checkpoint = False  # no room, or a state that cannot be written: it is trained again

    def _stepped(self, trained: Trained, batch: int, steps: int, *, watch_until: int = 0) -> Iterator[int]:
        """Train so many steps, and yield the number of each; end if the loss is no number."""
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
        piece = min(self._largest or number, number)
        sizes = [min(piece, number - start) for start in range(0, number, piece)]
        if self._held_out is None:
            # The same for every seed: the loss that one set is brought to, another may never be.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(_HELD_OUT_SEED)
                return [(make_batch(self._workload, size, self._shape, self._device), size) for size in sizes]
        samples, collate = iter(self._held_out), self._workload.collate or default_collate
        return [(move_batch(collate(list(itertools.islice(samples, size))), self._device), size) for size in sizes]

    def _judge(self, trained: Trained, batches: list[tuple[Any, int]]) -> float:
        total = units = 0.0
        with torch.no_grad(), evaluating(trained.model):
            for batch, size in batches:
                weight = float(size if self._workload.units is None else self._workload.units(batch))
                total, units = total + weight * float(scalar_loss(self._loss(trained.model, batch))), units + weight
        # A root that FSDP2 left whole after this forward shows an optimizer none of its weights.
        for module in trained.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        # Samples that are made differ from rank to rank. Judged apart, ranks would end a branch at different steps, or
        # tune to different rates, and wait for each other for ever.
        total, units = trained.summed(total, units)
        return total / units if math.isfinite(total) else math.inf
