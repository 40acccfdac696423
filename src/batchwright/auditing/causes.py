"""Why an accumulated gradient is not that of the big batch: the likely cause by name, and the remedy.

A cause is not guessed from the size of the error. Each has a mark that an experiment shows: what every backward added
and what changed it in between, what each micro-batch counts for, what the loop makes of one micro-batch alone, twice
and three times, and whether it does the same twice. What no experiment tells apart is `unknown`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from batchwright.auditing.audit_result import Cause
from batchwright.auditing.gradients import Gradient, combine, fit_weights
from batchwright.units import counted as count_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from batchwright.auditing.loop_recorder import RecordedWindow, Trace


MEAN_OF_MEANS = Cause(
    "mean of means",
    "each micro-batch counts alike, however many units (tokens, samples) its loss is a mean over",
    "bw.Accumulator(...).micro_batches(loader, weight=count_loss_units), or divide sums by the units of the window",
)
SUM_DIVIDED = Cause(
    "sum divided",
    "the loss is a sum over its samples, and it is divided by the number of micro-batches as if it were a mean",
    "do not divide a sum, or make the loss a mean over its units; bw.Accumulator takes means",
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
SEVERAL_STEPS = Cause(
    "several steps",
    "the optimizer steps more than once in a window",
    "step once per window, at its end; if the loop accumulates fewer micro-batches than were handed to it, audit it "
    "with that accumulation",
)
SCALED = Cause(
    "constant factor",
    "the gradient is that of the big batch times a number that no count explains",
    "look for a factor on the loss or on the gradients",
)
WRONG_WEIGHTS = Cause(
    "wrong weights",
    "micro-batches do not count for their share of the window's units",
    "bw.Accumulator(...).micro_batches(loader, weight=count_loss_units), or divide sums by the units of the window",
)
REPEATED = Cause(
    "micro-batch repeated",
    "a micro-batch is in the gradient more than once",
    "run every micro-batch of a window once",
)
AUXILIARY = Cause(
    "auxiliary loss multiplied",
    "part of the loss is scaled right, and part is added once per micro-batch, so its share grows with accumulation",
    'bw.LossTerm(auxiliary, over="window") next to the main loss, or divide it by the number of micro-batches',
)
SHORT_WINDOW = Cause(
    "windows of different lengths",
    "the optimizer steps after a number of backwards that is not the accumulation",
    "step where (index + 1) % accumulation == 0, not where index % accumulation == 0; bw.Accumulator counts by itself",
)
DIVIDED_TWICE = Cause(
    "divided twice",
    "the gradient is divided by the number of micro-batches once more than it should be",
    "divide in one place: by the framework, or by the loop",
)
NOT_COMPARABLE = Cause(
    "cannot be compared",
    "the two runs did not train on the same samples",
    "a seed for the loader's order, and samples that do not depend on the batch they are drawn in",
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
NOT_A_MEAN = Cause(
    "not a mean",
    "the loss of the big batch is neither a mean nor a sum over its samples: what a sample counts for depends on the "
    "others, as in a maximum, a logsumexp or the root of a mean",
    "a loss that is a mean or a sum over samples, or bw.CachedLoss; no plain accumulation can be exact",
)
DROPPED = Cause(
    "gradients dropped",
    "only some of the micro-batches are in the gradient: it is zeroed within the window, or stepped before its end",
    "call step() and zero_grad() once per window, at its end",
)
PARTLY_ZEROED = Cause(
    "part zeroed",
    "the gradient of some weights is zeroed between the micro-batches of a window",
    "zero gradients once per window, all of them, after the step",
)
DETACHED = Cause(
    "part detached",
    "some weights get no gradient in some micro-batches",
    "look for detach(), no_grad() or requires_grad_(False) on the way to these weights",
)
FROZEN_BY_LOSS = Cause(
    "frozen by the loss",
    "the loss freezes or unfreezes weights, so that they have a gradient in some batches and none in others",
    "call requires_grad_() outside of the loss, between two windows",
)
CHANGED_BETWEEN = Cause(
    "gradient changed between micro-batches",
    "the loop changes the gradient between two backwards of a window",
    "leave gradients alone until the window is complete",
)
CHANGED_AFTER = Cause(
    "gradient changed after the last backward",
    "after the last backward the gradient is that of the big batch, and then the loop changes it",
    "look at what the loop does between its last backward and optimizer.step()",
)
RANDOM_GRADIENT = Cause(
    "random gradient",
    "the loop itself is random: two runs on the same samples differ, though the workload's loss does not",
    "fix that first: audit the loop without its noise; nothing else can be told as long as it is there",
)
CLIPPED_EARLY = Cause(
    "clipping per micro-batch",
    "gradients are clipped before the window is complete: each micro-batch is cut to size by itself, and what is added "
    "later to what was cut is not the gradient of the big batch",
    "clip once per window, between the last backward and optimizer.step()",
)
CLIPPED_LATE = Cause(
    "clipping after the step",
    "gradients are clipped after optimizer.step(), where it has no effect",
    "clip between the last backward and optimizer.step()",
)
CLIPPED_SCALED = Cause(
    "clipping before unscale",
    "gradients are clipped while they are still multiplied by the GradScaler's scale",
    "scaler.unscale_(optimizer) before clipping",
)
SCHEDULED_EARLY = Cause(
    "scheduler per micro-batch",
    "the learning rate is stepped between the micro-batches of a window: it moves faster than the optimizer steps",
    "scheduler.step() once per window, after optimizer.step()",
)
NOT_FINITE = Cause(
    "gradient not finite",
    "the accumulated gradient holds infinite or undefined values (inf, nan)",
    "look for a division by zero, a log or root of zero, or an overflow in the loop",
)
OTHER_DRAWS = Cause(
    "random numbers drawn elsewhere",
    "with dropout off the loop is right; with dropout it draws its numbers otherwise than micro-batch by micro-batch, "
    "so that a replay cannot judge it",
    "dropout='off'",
)
IDLE_OPTIMIZER = Cause(
    "optimizer without a step",
    "the loop steps one optimizer and leaves out another, whose weights have gradients",
    "step every optimizer once per window",
)
OTHER_OPTIMIZER = Cause(
    "another optimizer",
    "the loop steps an optimizer of its own",
    "step the optimizer that window(model, optimizer, micro_batches) receives",
)
STEPPED_BY_HAND = Cause(
    "weights changed by hand",
    "the loop changes the weights itself, without a step of the optimizer that it was handed",
    "step the optimizer that window(model, optimizer, micro_batches) receives, once, at its end",
)
PARTLY_CARRIED = Cause(
    "part never zeroed",
    "some gradients are not zeroed between two windows: the second window steps with what the first left",
    "optimizer.zero_grad() once per window, for all weights that it steps",
)
WINDOWS_DIFFER = Cause(
    "windows differ",
    "the same samples give another gradient in a second window: the loop carries something over from the first",
    "zero gradients, and empty buffers of the loop's own, once per window",
)
NOT_ZEROED = Cause(
    "gradients not zeroed",
    "`window` does not zero its gradients: run twice, it stepped with the sum of both windows the second time",
    "call optimizer.zero_grad() in the window, after step() or before the first backward; if the code around `window` "
    "calls it between two windows, nothing has to change",
)
NO_MEAN = Cause(
    "no mean over units",
    "with dropout off, the mean of the micro-batches' gradients by units is not the gradient of the big batch: the "
    "loss is no mean over these units, so that a replay does not compare with the big batch",
    "units=... if the loss is a mean over something else than samples, a mean if it is a sum; dropout='off' compares "
    "with the big batch itself",
)
RANDOM_LOSS = Cause(
    "",
    "the loss is random even without dropout, and no cause can be told from its draws",
    "fix that first: draw no random numbers in the loss while it is audited, or draw them from the batch",
)
STATEFUL_LOSS = Cause(
    "",
    "the loss differs from call to call with the same random numbers, and no cause can be told from that",
    "fix that first: while it is audited the loss may depend on the model and the batch alone, not on a counter, a "
    "queue or a random generator of its own",
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
_MOST_NAMES = 4


@dataclass(frozen=True)
class Evidence:
    """What was measured about a loop that is off, all on the very same samples."""

    accumulated: Gradient
    reference: Gradient
    parts: Sequence[Gradient]
    """The gradient of each micro-batch's own mean loss."""
    repeated: dict[int, Gradient]
    """The loop on the first micro-batch, repeated so often."""
    accumulation: int
    tolerance: float
    trace: Trace | None = None
    """What every backward of the loop added."""
    again: Gradient | None = None
    """The loop once more, with the same random numbers."""
    reseeded: Gradient | None = None
    """The loop once more, with other random numbers."""


def likely_cause(evidence: Evidence) -> Cause:
    """Name the cause that the evidence fits."""
    near = _Near(evidence.tolerance)
    if not evidence.accumulated.is_finite:
        is_loss = not evidence.reference.is_finite
        return _explained(NOT_FINITE, ", and so does that of the big batch: the loss itself" if is_loss else "")
    if not evidence.accumulated.norm:
        return _explained(DROPPED, "; nothing was left of it at the step")
    if evidence.again is not None and not near.are_equal(evidence.again, evidence.accumulated, tightly=True):
        return WINDOWS_DIFFER
    if evidence.reseeded is not None and not near.are_equal(evidence.reseeded, evidence.accumulated, tightly=True):
        error = evidence.reseeded.error_to(evidence.accumulated)
        return _explained(RANDOM_GRADIENT, f" (relative difference {error:.2g})" if error is not None else "")
    for dtype in (torch.bfloat16, torch.float16):
        if evidence.accumulated.is_rounded_to(dtype) and not evidence.reference.is_rounded_to(dtype):
            return LOW_PRECISION
    traced = _by_trace(evidence, near)
    if traced is not None:
        return traced
    by_weights = cause_by_weights(evidence.accumulated, evidence.reference, evidence.parts, evidence.accumulation)
    if by_weights is not UNKNOWN and by_weights is not NOT_ADDITIVE:
        return by_weights
    by_count = _by_count(evidence, near)
    return by_count or by_weights


def _by_trace(evidence: Evidence, near: _Near) -> Cause | None:
    """Name a cause by what every backward added to each weight, and what happened in between."""
    trace = evidence.trace
    if trace is None or trace.last is None or not trace.contributions:
        return None
    last, step = trace.last, evidence.accumulated
    if near.are_equal(last, evidence.reference, tightly=True):
        factor = last.dot(step) / last.dot(last) if last.norm else 0.0
        is_whole = near.are_equal(last.times(factor), step)
        unlike = [
            name for name in step.by_name if not near.are_equal(step.only([name]), last.only([name]), tightly=True)
        ]
        how = f"all of it times {factor:.4g}" if is_whole else _named(unlike)
        return _explained(CHANGED_AFTER, f": {how}")
    factor = last.dot(step) / last.dot(last) if last.norm else 0.0
    if not near.are_equal(last.times(factor), step):
        return None  # the loop puts the gradient together elsewhere
    changes = [change for changed in trace.changes for change in changed]
    whole = combine(trace.contributions, [factor] * len(trace.contributions))
    if changes and near.are_equal(whole, evidence.reference):
        # Without the changes in between the gradient would be right, so they are the cause.
        names = {change.name for change in changes}
        if all(not bool(change.after.any()) for change in changes):
            everything = {name for name, value in whole.by_name.items() if bool(value.any())}
            return DROPPED if names >= everything else _explained(PARTLY_ZEROED, f": {_named(names)}")
        return CLIPPED_EARLY if _looks_clipped(trace) else _explained(CHANGED_BETWEEN, f": {_named(names)}")
    return None if changes else _detached(evidence, trace, near)


def _detached(evidence: Evidence, trace: Trace, near: _Near) -> Cause | None:
    """Look for weights without a gradient in micro-batches whose loss has one for them."""
    if len(trace.contributions) != len(evidence.parts):
        return None
    missing: dict[str, int] = {}
    for added, part in zip(trace.contributions, evidence.parts, strict=True):
        if added.by_name.keys() != part.by_name.keys():
            return None  # weights were frozen or unfrozen on the way
        without = {n for n, v in part.by_name.items() if bool(v.any()) and not bool(added.by_name[n].any())}
        with_it = [n for n in part.by_name if n not in without]
        mine, theirs = added.only(with_it), part.only(with_it)
        weight = mine.dot(theirs) / theirs.dot(theirs) if theirs.norm else 0.0
        if not near.are_equal(theirs.times(weight), mine):
            return None
        for name in without:
            missing[name] = missing.get(name, 0) + 1
    if not missing or len(missing) == len(evidence.reference.by_name):
        return None
    return _explained(DETACHED, f": {_named(missing)} in {max(missing.values())} of {len(evidence.parts)}")


def _looks_clipped(trace: Trace) -> bool:
    """Whether what changed gradients in between had one limit each time: of the norm, or of every value."""
    groups = [changed for changed in trace.changes if changed]
    if len(groups) < 2:
        return False
    norms, largest, are_scaled, are_clamped = [], [], True, True
    for changed in groups:
        before = Gradient({c.name: c.before for c in changed})
        after = Gradient({c.name: c.after for c in changed})
        norms.append(after.norm)
        largest.append(max(float(c.after.abs().max()) for c in changed))
        factor = after.dot(before) / before.dot(before)
        are_scaled &= 0 < factor < 1 and (after.error_to(before.times(factor)) or 0) < 1e-3
        limit = largest[-1]
        clamped = Gradient({c.name: c.before.clamp(-limit, limit) for c in changed})
        are_clamped &= (after.error_to(clamped) or 0) < 1e-5
    return (are_scaled and _are_alike(norms)) or (are_clamped and _are_alike(largest))


def without_clip_by_hand(full: RecordedWindow, first: RecordedWindow, tolerance: float) -> Gradient | None:
    """Return the gradient before a clip by hand, where the loop clips so once, after its last backward; else None.

    A clip is told from a constant factor by two windows: the factor differs, and the limit does not.
    """
    pairs = [(w.trace.last, w.gradient) for w in (full, first) if w.trace is not None and w.trace.last is not None]
    if len(pairs) < 2 or any(not last.norm or not step.norm for last, step in pairs):
        return None
    factors = [last.dot(step) / last.dot(last) for last, step in pairs]
    norms = [step.norm for _, step in pairs]
    is_scaled = all(
        (step.error_to(last.times(f)) or 0) <= 100 * tolerance for (last, step), f in zip(pairs, factors, strict=True)
    )
    if is_scaled and max(factors) <= 1 + tolerance and abs(factors[0] - factors[1]) > 1e-3 * max(factors):
        is_one_limit = _are_alike(norms) or (factors[1] > 1 - tolerance and norms[1] <= norms[0])
        return pairs[0][0] if is_one_limit else None
    limits = [max(float(v.abs().max()) for v in step.by_name.values()) for _, step in pairs]
    clamped = [
        Gradient({n: v.clamp(-limit, limit) for n, v in last.by_name.items()})
        for (last, _), limit in zip(pairs, limits, strict=True)
    ]
    is_clamped = all((step.error_to(c) or 0) <= 100 * tolerance for (_, step), c in zip(pairs, clamped, strict=True))
    is_cut = (pairs[0][1].error_to(pairs[0][0]) or 0) > tolerance
    if is_clamped and is_cut and (_are_alike(limits) or limits[1] < limits[0]):
        return pairs[0][0]
    return None


def _are_alike(values: Sequence[float]) -> bool:
    return max(values) <= min(values) * (1 + 1e-3)


def cause_by_weights(accumulated: Gradient, reference: Gradient, parts: Sequence[Gradient], accumulation: int) -> Cause:
    """Name the cause from one window alone, by what each micro-batch counts for in it."""
    near = _Near(_TOLERANCE_OF_ONE_WINDOW)
    if not accumulated.norm:
        return _explained(DROPPED, "; nothing was left of it at the step")
    flipped = {name for part in parts for name in part.by_name.keys() ^ reference.by_name.keys()}
    if flipped:
        return _explained(FROZEN_BY_LOSS, f": {_named(flipped)}")
    right = fit_weights(reference, parts)
    if not near.are_equal(combine(parts, right), reference):
        return NOT_ADDITIVE
    are_known = _can_be_told_apart(parts)
    if are_known and not _is_mean_or_sum(right, reference, parts):
        return NOT_A_MEAN
    num_parts = len(parts)
    ratio = accumulated.dot(reference) / reference.dot(reference) if reference.norm else 0.0
    is_proportional = near.are_equal(reference.times(ratio), accumulated, tightly=True)
    is_sum = num_parts > 1 and near.are_equal(combine(parts, [1.0] * num_parts), reference)
    if num_parts > 1 and not is_sum and near.are_equal(combine(parts, [1.0] * num_parts), accumulated):
        return COUNT_IGNORED
    if is_sum and is_proportional and abs(ratio * num_parts - 1) < 1e-3:
        return SUM_DIVIDED
    share_of_all = num_parts / accumulation
    if num_parts < accumulation and is_proportional and abs(ratio / share_of_all - 1) < 1e-3:
        return TAIL_SCALE
    if is_proportional:
        return SCALED
    if num_parts > 1 and near.are_equal(combine(parts, [1 / num_parts] * num_parts), accumulated):
        # Where shares are not unique, any loss that is no plain mean looks so.
        return MEAN_OF_MEANS if are_known else UNKNOWN
    if num_parts < accumulation and near.are_equal(combine(parts, [1 / accumulation] * num_parts), accumulated):
        return TAIL_SCALE
    if not are_known:
        return UNKNOWN
    weights = fit_weights(accumulated, parts)
    if not near.are_equal(combine(parts, weights), accumulated):
        return UNKNOWN
    return _by_shares(weights, right)


def _is_mean_or_sum(weights: Sequence[float], reference: Gradient, parts: Sequence[Gradient]) -> bool:
    """Whether what parts count for in the big batch can be their shares of its units, or 1 each, by loss and gradient.

    A maximum leaves parts out; the shares of a root do not add up to 1; those of a logsumexp do, but its value is not
    the mean by them.
    """
    if all(abs(weight - 1) < 1e-3 for weight in weights):
        return True
    if min(weights) < 1e-3 / len(weights) or abs(sum(weights) - 1) > 1e-3:
        return False
    losses = [part.loss for part in parts]
    if reference.loss is None or None in losses:
        return True
    known = [loss for loss in losses if loss is not None]
    mean = sum(weight * loss for weight, loss in zip(weights, known, strict=True))
    return abs(mean - reference.loss) <= 1e-3 * max(map(abs, (*known, reference.loss)))


def _by_shares(weights: Sequence[float], right: Sequence[float]) -> Cause:
    """Name what is wrong with the shares of micro-batches, which were measured."""
    shares = [weight / wanted if wanted else 1.0 for weight, wanted in zip(weights, right, strict=True)]
    of_all = f"of {len(shares)}"
    lost = [number for number, share in enumerate(shares, 1) if abs(share) < 1e-3]
    if lost:
        return _explained(DROPPED, f"; micro-batch {', '.join(map(str, lost))} {of_all} is not in it")
    times = [round(share) for share in shares]
    are_whole = all(abs(share - n) < 1e-2 and n >= 1 for share, n in zip(shares, times, strict=True))
    if are_whole and 1 in times:
        again = [f"{number} ({n} times)" for number, n in enumerate(times, 1) if n > 1]
        return _explained(REPEATED, f": micro-batch {', '.join(again)} {of_all}")
    measured, wanted = (", ".join(f"{value:.3g}" for value in values) for values in (weights, right))
    return _explained(WRONG_WEIGHTS, f": they count for {measured}, and in the big batch for {wanted}")


def _can_be_told_apart(parts: Sequence[Gradient]) -> bool:
    """Whether gradients are independent: in a model with fewer weights than micro-batches shares are not unique."""
    norms = [part.norm or 1.0 for part in parts]
    products = torch.tensor(
        [[a.dot(b) / (x * y) for b, y in zip(parts, norms, strict=True)] for a, x in zip(parts, norms, strict=True)],
        dtype=torch.float64,
    )
    return bool(torch.linalg.eigvalsh(products)[0] > 1e-9)


def _by_count(evidence: Evidence, near: _Near) -> Cause | None:
    """Name a cause by what the loop makes of one micro-batch, alone, twice and three times."""
    single = evidence.parts[0]
    once, twice, thrice = (evidence.repeated[n] for n in (1, 2, 3))
    growing = twice.minus(once)
    constant = once.minus(growing)
    # Only where it grows in a straight line is it a part that is added once per micro-batch.
    expected = combine([constant, growing], [1.0, 3.0])
    if near.is_nothing(growing, single) or not near.are_equal(expected, thrice):
        return None
    if not near.is_nothing(constant, single):
        return AUXILIARY
    whole = growing.times(evidence.accumulation)
    return TAIL_SCALE if near.are_equal(whole, single) else COUNT_IGNORED


def defects_of(caught: RecordedWindow, num_micro_batches: int) -> list[Cause]:
    """Name what is wrong with the order of things in a window, whatever its gradient is."""
    habits, defects = caught.habits, []
    if caught.other_optimizer is not None:
        defects.append(_explained(OTHER_OPTIMIZER, f" ({caught.other_optimizer})"))
    elif not caught.has_stepped and caught.has_changed_weights:
        defects.append(STEPPED_BY_HAND)
    if caught.steps > 1:
        where = f"in a window of {num_micro_batches} micro-batches"
        how = "with the same gradient each time" if caught.steps_alike else where
        defects.append(_explained(SEVERAL_STEPS, f": {caught.steps} times {how}"))
    if caught.idle:
        defects.append(_explained(IDLE_OPTIMIZER, f" ({'; '.join(caught.idle)})"))
    if habits.clips_before_backward:
        defects.append(_explained(CLIPPED_EARLY, f" ({count_of(habits.num_clips, 'call')} in one window)"))
    if habits.clips_before_unscale:
        defects.append(CLIPPED_SCALED)
    if habits.clips_after_step:
        defects.append(CLIPPED_LATE)
    if habits.schedules_before_backward:
        defects.append(SCHEDULED_EARLY)
    return defects


def carried_over(first: RecordedWindow, second: RecordedWindow, stepped: set[str], tolerance: float) -> Cause | None:
    """Name what a second window on the same samples shows: gradients of the first that are still there."""
    mine, theirs = (Gradient({n: v for n, v in w.gradient.by_name.items() if n in stepped}) for w in (first, second))
    error = theirs.error_to(mine)
    if (error is not None and error <= tolerance) or not mine.is_finite:
        return None
    held = {name for name, value in mine.by_name.items() if bool(value.any())}
    left = second.habits.left_over & stepped
    ratio = theirs.ratio_to(mine)
    shown = f" (on the same samples its gradient is {ratio:.4g} times as long)" if ratio is not None else ""
    if left and left >= held:
        return _explained(NOT_ZEROED, shown)
    if left:
        return _explained(PARTLY_CARRIED, f": {_named(left)}")
    return _explained(WINDOWS_DIFFER, shown)


def _explained(cause: Cause, more: str) -> Cause:
    return replace(cause, explanation=cause.explanation + more)


def _named(names: Iterable[str]) -> str:
    """Write weights as the modules they belong to."""
    modules = sorted({name.rpartition(".")[0] or name for name in names})
    rest = len(modules) - _MOST_NAMES
    return ", ".join(modules[:_MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")


@dataclass(frozen=True)
class _Near:
    tolerance: float

    def are_equal(self, one: Gradient, other: Gradient, *, tightly: bool = False) -> bool:
        error = one.error_to(other)
        return error is not None and error <= (3 if tightly else 100) * self.tolerance

    def is_nothing(self, one: Gradient, scale: Gradient) -> bool:
        return one.norm <= 100 * self.tolerance * scale.norm
