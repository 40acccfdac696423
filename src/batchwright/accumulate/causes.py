"""Why an accumulated gradient is not that of the big batch: the likely cause by name, and the remedy.

A cause is not guessed from the size of the error. Each has a mark that an experiment shows: the loop runs again on one
micro-batch, alone and twice. What a right loop returns does not depend on the count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from batchwright.accumulate.gradients import best_weights, combined

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchwright.accumulate.gradients import Gradient


@dataclass(frozen=True)
class Cause:
    """A defect by name, what it does, and what to do about it."""

    name: str
    explanation: str
    remedy: str


MEAN_OF_MEANS = Cause(
    "mean of means",
    "each micro-batch counts alike, however many units (tokens, samples) its loss is a mean over",
    "bw.Accumulator(...).micro_batches(loader, weight=count_loss_units), or divide sums by the units of the window",
)
COUNT_IGNORED = Cause(
    "count ignored",
    "losses are added up without being divided: the gradient is multiplied by the number of micro-batches",
    "divide each loss by the number of micro-batches, or use bw.Accumulator; for a transformers Trainer "
    "bw.integrations.transformers.exact_loss(trainer)",
)
TAIL_SCALE = Cause(
    "tail scale",
    "losses are divided by the configured count, also in the last window, which holds fewer micro-batches",
    "divide by the number of micro-batches that the window really holds, or use bw.Accumulator",
)
TAIL_DROPPED = Cause(
    "tail dropped",
    "a window with fewer micro-batches than configured never comes to an optimizer step",
    "step once more at the end of an epoch (bw.Accumulator does), or drop_last=True",
)
NO_STEP = Cause(
    "no step seen",
    "the loop came to no step of the optimizer that it was handed",
    "step the optimizer that window(model, optimizer, micro_batches) receives, once, at its end",
)
SCALED = Cause(
    "constant factor",
    "the gradient is that of the big batch times a number that no count explains",
    "look for a factor on the loss, or for clipping that is not torch's own",
)
AUXILIARY = Cause(
    "auxiliary loss multiplied",
    "part of the loss is scaled right, and part is added once per micro-batch, so its share grows with accumulation",
    'bw.LossTerm(auxiliary, over="window") next to the main loss, or divide it by the number of micro-batches',
)
BATCH_NORM = Cause(
    "BatchNorm",
    "batch normalization takes its statistics from each micro-batch; with frozen statistics the gradients are equal",
    "GroupNorm or LayerNorm, or freeze the statistics; no accumulation can be exact otherwise",
)
LOW_PRECISION = Cause(
    "low-precision buffer",
    "every value of the accumulated gradient is one that 16 bits can hold: it was added up in a narrow buffer",
    "bw.Accumulator(..., precise=True), or keep the sum in fp32",
)
NOT_ADDITIVE = Cause(
    "not additive",
    "the loss of the big batch is no weighted sum of the losses of its parts: its samples look at each other",
    "bw.CachedLoss for contrastive losses; no plain accumulation can be exact",
)
DROPPED = Cause(
    "gradients dropped",
    "only some of the micro-batches are in the gradient: it is zeroed within the window, or stepped before its end",
    "call step() and zero_grad() once per window, at its end",
)
MISSING_NO_SYNC = Cause(
    "missing no_sync",
    "gradients are synchronised in every micro-batch, not only in the last: right, but slow",
    "model.no_sync() around forward and backward of all but the last micro-batch, or use bw.Accumulator",
)
SYNC_LOST = Cause(
    "synchronisation lost",
    "no backward of the window synchronises gradients: every rank trains on its own samples",
    "no_sync() must not cover the forward of the last micro-batch, or use bw.Accumulator",
)
UNKNOWN = Cause("unknown", "none of the known marks fits", "bw.Accumulator, or an issue with the workload")


_TOLERANCE_OF_ONE_WINDOW = 1e-5


@dataclass(frozen=True)
class Evidence:
    """What was measured about a loop that is off, all on the very same samples."""

    accumulated: Gradient
    reference: Gradient
    parts: Sequence[Gradient]
    """The gradient of each micro-batch's own mean loss."""
    repeated: dict[int, Gradient]
    """The loop on one micro-batch, repeated so often."""
    single: Gradient
    """The gradient of that micro-batch's own mean loss."""
    accumulation: int
    tolerance: float


def likely_cause(evidence: Evidence) -> Cause:
    """Name the cause that the evidence fits."""
    near = _Near(evidence.tolerance)
    for dtype in (torch.bfloat16, torch.float16):
        if evidence.accumulated.is_rounded_to(dtype) and not evidence.reference.is_rounded_to(dtype):
            return LOW_PRECISION
    by_weights = cause_by_weights(evidence.accumulated, evidence.reference, evidence.parts, evidence.accumulation)
    if by_weights is not UNKNOWN and by_weights is not NOT_ADDITIVE:
        return by_weights
    growing, constant = _by_count(evidence)
    if near.is_nothing(growing, evidence.single):
        return by_weights
    if not near.is_nothing(constant, evidence.single):
        return AUXILIARY
    whole = growing.times(evidence.accumulation)
    return TAIL_SCALE if near.are_equal(whole, evidence.single) else COUNT_IGNORED


def cause_by_weights(accumulated: Gradient, reference: Gradient, parts: Sequence[Gradient], accumulation: int) -> Cause:
    """Name the cause from one window alone, by what each micro-batch counts for in it."""
    near = _Near(_TOLERANCE_OF_ONE_WINDOW)
    counted = best_weights(reference, parts)
    if not near.are_equal(combined(parts, counted), reference):
        return NOT_ADDITIVE
    weights = best_weights(accumulated, parts)
    if not near.are_equal(combined(parts, weights), accumulated):
        return UNKNOWN
    if any(abs(weight) < 1e-3 * abs(right) for weight, right in zip(weights, counted, strict=True)):
        return DROPPED
    if _all_are(weights, 1.0) and len(weights) > 1:
        return COUNT_IGNORED
    if _all_are(weights, 1 / len(weights)):
        return MEAN_OF_MEANS
    ratio = accumulated.ratio_to(reference) or 1.0
    share_of_all = [weight * accumulation / len(weights) for weight in weights]
    is_tail = len(weights) < accumulation and near.are_equal(combined(parts, share_of_all), reference)
    if is_tail or _all_are(weights, 1 / accumulation):
        return TAIL_SCALE
    return SCALED if near.are_equal(reference.times(ratio), accumulated) else UNKNOWN


def _all_are(weights: Sequence[float], value: float) -> bool:
    return all(abs(weight / value - 1) < 1e-2 for weight in weights)


def _by_count(evidence: Evidence) -> tuple[Gradient, Gradient]:
    """Split what the loop returns into a part that grows with the count and one that does not."""
    once, twice = evidence.repeated[1], evidence.repeated[2]
    growing = twice.minus(once)
    return growing, once.minus(growing)


@dataclass(frozen=True)
class _Near:
    tolerance: float

    def are_equal(self, one: Gradient, other: Gradient) -> bool:
        error = one.error_to(other)
        return error is not None and error <= 100 * self.tolerance

    def is_nothing(self, one: Gradient, scale: Gradient) -> bool:
        return one.norm <= 100 * self.tolerance * scale.norm
