"""`audit_workload`: the very same samples as one batch and as an accumulation, gradient against gradient.

Promises:
- nothing of the user's changes: a live model is compared in place and given back, the optimizer never steps;
- what is compared is in fp32 or fp64 with dropout off, or replayed micro-batch by micro-batch, so that what differs is
  the accumulation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from batchwright.accumulate.parallelism import find_parallelism
from batchwright.auditing.audit_result import BIG_BATCH, TOLERANCES, Audit, Cause, Compared, SplitAudit, split_name
from batchwright.auditing.audited_workload import AuditedWorkload, AuditSubject
from batchwright.auditing.causes import (
    BATCH_NORM,
    MISSING_NO_SYNC,
    NO_MEAN,
    NO_STEP,
    NOT_ZEROED,
    OTHER_DRAWS,
    OTHER_OPTIMIZER,
    RANDOM_LOSS,
    REPEATED,
    SCALED,
    SEVERAL_STEPS,
    STATEFUL_LOSS,
    STEPPED_BY_HAND,
    SYNC_LOST,
    TAIL_DROPPED,
    WINDOWS_DIFFER,
    Evidence,
    carried_over,
    defects_of,
    likely_cause,
    without_clip_by_hand,
)
from batchwright.auditing.gradients import Gradient, compare_modules
from batchwright.auditing.loop_recorder import RecordedWindow, record_window
from batchwright.device.step import build_optimizers, needing_larger_micro_batches
from batchwright.errors import InvalidInputError
from batchwright.state.process_state import kept_random_state
from batchwright.state.untouched import leaves_untouched
from batchwright.trace.run import check_shape
from batchwright.units import shortened, whole_number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from batchwright.workload import Workload


def read_splits(given: Any, micro_batch: int, accumulation: int) -> list[tuple[int, ...]]:
    """Return the splits that were asked for, by default the one that is trained with.

    >>> read_splits(None, 2, 4), read_splits("3+3+2,1x8", 2, 4)
    ([(2, 2, 2, 2)], [(3, 3, 2), (1, 1, 1, 1, 1, 1, 1, 1)])
    >>> read_splits([(1, 7), "4x2"], 2, 4)
    [(1, 7), (4, 4)]
    """
    if given is None:
        return [(micro_batch,) * accumulation]
    listed = given.split(",") if isinstance(given, str) else list(given)
    splits = [_read(one) for one in listed]
    if not splits:
        raise InvalidInputError("no split was named.", remedy="2x4, or 3+3+2")
    return splits


def _read(one: Any) -> tuple[int, ...]:
    if isinstance(one, str):
        if times := re.fullmatch(r"\s*([1-9]\d*)\s*x\s*([1-9]\d*)\s*", one):
            return (int(times[1]),) * int(times[2])
        if re.fullmatch(r"\s*[1-9]\d*(\s*\+\s*[1-9]\d*)*\s*", one):
            return tuple(int(size) for size in one.split("+"))
    elif isinstance(one, list | tuple) and one and all(isinstance(n, int) and n > 0 for n in one):
        return tuple(one)
    raise InvalidInputError(
        f"a split is MICRO_BATCHxACCUMULATION or sizes with + between; received {shortened(one)}.",
        remedy="2x4, or 3+3+2",
    )


def judge_synchronisations(audit: Audit, workload: Workload, subject: AuditedWorkload, sizes: Sequence[int]) -> Audit:
    """Return the audit with how often the loop synchronises, if there is a window and a `wrap` that can be counted.

    The gradient is the same whether one micro-batch synchronises or all do, so only the count tells; a group of one
    rank is enough for that.
    """
    if workload.wrap is None or workload.window is None or len(sizes) < 2:
        return audit
    if dist.is_initialized():
        return _noted(audit, "synchronisations were not counted: a process group is already there")
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with kept_random_state():
            # In place, as it is given back: an optimizer that was handed in holds these very weights.
            wrapped, window = workload.wrap(subject.model), workload.window
            count = find_parallelism(wrapped).count_synchronisations(
                lambda: record_window(
                    window, wrapped, build_optimizers(workload, wrapped), subject.micro_batches(sizes)
                )
            )
    finally:
        dist.destroy_process_group()
    if count is None:
        return _noted(audit, f"synchronisations were not counted: wrap= makes a {type(wrapped).__name__}")
    audit = _noted(audit, f"under DDP gradients are synchronised {count} times in a window of {len(sizes)}")
    if count == 1:
        return audit
    cause = SYNC_LOST if count == 0 else MISSING_NO_SYNC
    audit = replace(audit, is_synchronised=count > 0)
    if audit.cause is not None:
        return _noted(audit, f"also {cause.text}")
    return replace(audit, cause=cause.name, explanation=cause.explanation, remedy=cause.remedy)


def _noted(audit: Audit, note: str) -> Audit:
    return replace(audit, notes=(*audit.notes, note))


@leaves_untouched()
def audit_workload(
    workload: Workload,
    *,
    micro_batch: int = 2,
    accumulation: int = 4,
    splits: Any = None,
    dtype: str = "fp32",
    dropout: str = "off",
    shape: Mapping[str, Any] | None = None,
) -> Audit:
    """Compare a workload's accumulated gradient with that of the big batch.

    >>> import torch
    >>> from batchwright.workload import Workload
    >>> workload = Workload(
    ...     model=lambda: torch.nn.Linear(8, 1),
    ...     batch=lambda n: torch.randn(n, 8),
    ...     loss=lambda model, batch: model(batch).pow(2).mean(),
    ...     optimizer=torch.optim.SGD,
    ...     window=lambda model, optimizer, batches: [
    ...         *[model(batch).pow(2).mean().backward() for batch in batches], optimizer.step()
    ...     ],
    ... )
    >>> audit = audit_workload(workload)
    >>> audit.exact, round(audit.ratio, 3), audit.cause
    (False, 4.0, 'count ignored')
    """
    _check(workload, dtype, dropout)
    check_shape(workload, shape or {})
    sizes = read_splits(splits, whole_number(micro_batch, "micro_batch"), whole_number(accumulation, "accumulation"))
    subject = AuditedWorkload(workload, max(map(sum, sizes)), dtype=dtype, dropout=dropout, shape=dict(shape or {}))
    has_window = workload.window is not None
    # A window of the user's own may hold fewer micro-batches at the end of an epoch; plain accumulation has no end.
    tails = [sizes[0][:1]] if has_window and len(sizes[0]) > 1 and splits is None else []
    if has_window and splits is not None:
        subject.notes.append("a last, incomplete window was not tried; leave out splits for that")
    what = "the workload's own window" if has_window else "the loss under plain accumulation (no window= was handed in)"
    audit = audit_subject(subject, sizes, tails, name=workload.name, what=what)
    return judge_synchronisations(audit, workload, subject, sizes[0])


_NOTHING_ACCUMULATED = "nothing was accumulated: every split is one micro-batch, and proves nothing"


def audit_subject(
    subject: AuditSubject, sizes: Sequence[tuple[int, ...]], tails: Sequence[tuple[int, ...]], *, name: str, what: str
) -> Audit:
    """Compare every split, run a second window after the first, and look for the cause of what is off."""
    accumulation = len(sizes[0])
    named = ", ".join(dict.fromkeys(split_name(split) for split in (*sizes, *tails)))
    with needing_larger_micro_batches(f"the split {named}"), subject.open():
        windows = subject.twice(subject.micro_batches(sizes[0]))
        tried = [_try_split(subject, sizes[0], accumulation, windows[0])]
        tried += [_try_split(subject, split, accumulation) for split in (*sizes[1:], *tails)]
        tried = [_before_clip_by_hand(subject, one, sizes[0]) for one in tried]
        defects, condition = _defects(subject, tried[0], windows)
        causes = [
            None if one.result.exact or _is_unsteady(subject) else _find_cause(subject, one, accumulation, defects)
            for one in tried
        ]
        causes = _keep_repeated(causes)
        compared = subject.compared_with(sizes[0])
    # What is wrong in every window comes before what is wrong in the last one.
    misses = [(not one.result.exact, i < len(sizes), one.result.relative_error or 0.0) for i, one in enumerate(tried)]
    worst = misses.index(max(misses))
    first = _first_to_fix(subject, tried, compared, causes[worst], defects)
    splits = [replace(one.result, cause=its.name if its else None) for one, its in zip(tried, causes, strict=True)]
    named_causes = {cause.name: cause for cause in (*causes, *defects) if cause is not None}
    others = [cause for cause in named_causes.values() if first is None or cause.name != first.name]
    second = None
    if len(windows) > 1:
        mine, theirs = windows[1].gradient, windows[0].gradient
        second = mine.ratio_to(theirs), mine.error_to(theirs)
    return Audit(
        name=name,
        what=what,
        dtype=subject.dtype,
        splits=tuple(splits),
        worst=splits[worst],
        modules=compare_modules(tried[worst].judged, tried[worst].reference),
        cause=(first.name or None) if first else None,
        remedy=first.remedy if first else None,
        explanation=first.explanation if first else "",
        notes=(
            *(_NOTHING_ACCUMULATED,) * all(len(one.sizes) == 1 for one in tried),
            *(compared.note,) * bool(compared.note),
            *subject.notes,
            *dict.fromkeys(one.note for one in tried if one.note),
            *((condition.text,) if condition is not None else ()),
            *(f"also {cause.text}" for cause in others),
        ),
        defects=tuple(defects),
        condition=condition,
        second_window=second,
        is_random=subject.is_random if subject.is_random_known else False,
        is_stateful=subject.is_stateful,
        compared_with=compared.name,
        reference_error=compared.error,
        is_reference_right=compared.is_right,
    )


def _is_unsteady(subject: AuditSubject) -> bool:
    """Whether the loss of the same batch is not the same twice, so that no cause can be told from it."""
    return subject.is_stateful or subject.is_random


def _keep_repeated(causes: list[Cause | None]) -> list[Cause | None]:
    """One micro-batch alone cannot tell a factor from a repetition: the full window can."""
    repeated = next((cause for cause in causes if cause is not None and cause.name == REPEATED.name), None)
    if repeated is None:
        return causes
    return [repeated if cause is not None and cause.name == SCALED.name else cause for cause in causes]


def _first_to_fix(
    subject: AuditSubject,
    tried: Sequence[_Tried],
    compared: Compared,
    worst: Cause | None,
    defects: Sequence[Cause],
) -> Cause | None:
    """Return what to mend first: what nothing else can be judged without, then the gradient, then the loop's order."""
    is_off = any(not one.result.exact for one in tried)
    if (is_off or not compared.is_right) and _is_unsteady(subject):
        if subject.is_stateful:
            return STATEFUL_LOSS
        is_replay = compared.name != BIG_BATCH
        more = "" if is_replay else "; dropout='replayed' draws the same numbers for each micro-batch in both runs"
        return replace(RANDOM_LOSS, remedy=RANDOM_LOSS.remedy + more)
    if not compared.is_right:
        return NO_MEAN
    return worst or next(iter(defects), None)


def _defects(
    subject: AuditSubject, first: _Tried, windows: Sequence[RecordedWindow]
) -> tuple[list[Cause], Cause | None]:
    """Return what is wrong with the loop whatever its gradient is, and what must be true outside of it."""
    defects = defects_of(first.caught, len(first.sizes))
    condition = None
    if len(windows) > 1:
        carried = carried_over(windows[0], windows[1], subject.stepped_names, TOLERANCES[subject.dtype])
        if _is_unsteady(subject) and carried is not None and carried.name == WINDOWS_DIFFER.name:
            carried = None
        if carried is not None and carried.name == NOT_ZEROED.name:
            condition = carried
        elif carried is not None:
            defects.append(carried)
    return defects, condition


@dataclass(frozen=True)
class _Tried:
    sizes: tuple[int, ...]
    reference: Gradient
    caught: RecordedWindow
    judged: Gradient
    """What is compared: the gradient at the step, or before a clip by hand."""
    result: SplitAudit
    note: str = ""


def _try_split(
    subject: AuditSubject, sizes: Sequence[int], accumulation: int, caught: RecordedWindow | None = None
) -> _Tried:
    reference = subject.reference(sizes)
    caught = caught or subject.accumulated(subject.micro_batches(sizes))
    return _judge(subject, sizes, accumulation, reference, caught, caught.gradient)


def _judge(
    subject: AuditSubject,
    sizes: Sequence[int],
    accumulation: int,
    reference: Gradient,
    caught: RecordedWindow,
    gradient: Gradient,
) -> _Tried:
    error = gradient.error_to(reference)
    is_exact = error is not None and error <= TOLERANCES[subject.dtype] and caught.has_stepped
    note = "" if caught.has_stepped else "no step; what it left behind"
    if len(sizes) < accumulation:
        note = note or f"the last, {len(sizes)} of {accumulation}"
    result = SplitAudit(tuple(sizes), gradient.ratio_to(reference), error, is_exact, note=note)
    return _Tried(tuple(sizes), reference, caught, gradient, result)


def _before_clip_by_hand(subject: AuditSubject, tried: _Tried, full: Sequence[int]) -> _Tried:
    """Return the split judged before a clip that the loop makes by hand, where two windows show one."""
    caught = tried.caught
    if tried.result.exact or not caught.is_followed or not caught.has_stepped or len(full) < 2 or _is_unsteady(subject):
        return tried
    # Another window beside it, with other samples.
    others = subject.micro_batches(full)[:1] if len(tried.sizes) > 1 else subject.micro_batches(full)[1:2]
    mine = subject.accumulated(subject.micro_batches(tried.sizes), detailed=True)
    before = without_clip_by_hand(mine, subject.accumulated(others, detailed=True), TOLERANCES[subject.dtype])
    if before is None:
        return tried
    # Sums that the loop divides by their units itself, before it clips, are that much longer.
    units = subject.num_units(tried.sizes)
    ratio = before.ratio_to(tried.reference)
    if ratio is not None and units > 1 and abs(ratio / units - 1) <= TOLERANCES[subject.dtype]:
        before = before.times(1 / units)
    judged = _judge(subject, tried.sizes, len(full), tried.reference, tried.caught, before)
    return replace(judged, note="the loop clips by hand; it was judged before its clipping")


def _find_cause(subject: AuditSubject, worst: _Tried, accumulation: int, defects: Sequence[Cause]) -> Cause:
    if not worst.caught.has_stepped:
        by_hand = next((d for d in defects if d.name in (OTHER_OPTIMIZER.name, STEPPED_BY_HAND.name)), None)
        return by_hand or (TAIL_DROPPED if len(worst.sizes) < accumulation else NO_STEP)
    if worst.caught.steps > 1 and not worst.caught.steps_alike:
        return next(d for d in defects_of(worst.caught, len(worst.sizes)) if d.name == SEVERAL_STEPS.name)
    with subject.without_draws() as were_replayed:
        if were_replayed:
            # Parts that draw other numbers cannot be compared with each other.
            worst = _try_split(subject, worst.sizes, accumulation)
            if worst.result.exact:
                return OTHER_DRAWS
        return _cause_of_gradient(subject, worst, accumulation)


def _cause_of_gradient(subject: AuditSubject, worst: _Tried, accumulation: int) -> Cause:
    if not subject.has_batch_norm:
        return _from_evidence(subject, worst, accumulation)
    with subject.frozen_statistics():
        again = _try_split(subject, worst.sizes, accumulation)
        return BATCH_NORM if again.result.exact else _from_evidence(subject, again, accumulation)


def _from_evidence(subject: AuditSubject, tried: _Tried, accumulation: int) -> Cause:
    parts = subject.micro_batches(tried.sizes)
    again = subject.accumulated(parts, detailed=True) if tried.caught.is_followed else None
    can_run_again = again is not None and tried.judged is tried.caught.gradient
    return likely_cause(
        Evidence(
            accumulated=tried.judged,
            reference=tried.reference,
            parts=[subject.of_loss(part) for part in parts],
            repeated={n: subject.accumulated([parts[0]] * n).gradient for n in (1, 2, 3)},
            accumulation=accumulation,
            tolerance=TOLERANCES[subject.dtype],
            trace=again.trace if again is not None else None,
            again=again.gradient if again is not None and can_run_again else None,
            reseeded=subject.accumulated(parts, seed=1).gradient if can_run_again else None,
        )
    )


def _check(workload: Workload, dtype: str, dropout: str) -> None:
    if dtype not in TOLERANCES:
        raise InvalidInputError(f"dtype is {' or '.join(TOLERANCES)}; received {dtype!r}.")
    if dropout not in ("off", "replayed"):
        raise InvalidInputError(f'dropout is "off" or "replayed"; received {dropout!r}.')
    if workload.loss is None or workload.optimizer is None:
        raise InvalidInputError(
            "an audit compares gradients, and this workload only infers.", remedy="loss=... and optimizer=..."
        )
