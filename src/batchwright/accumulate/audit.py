"""`audit_workload`: the very same samples as one batch and as an accumulation, gradient against gradient.

Promises:
- nothing of the user's changes: the model is a copy, the optimizer never steps, random numbers come back;
- what is compared is in fp32 or fp64 with dropout off, or replayed micro-batch by micro-batch, so that what differs is
  the accumulation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from batchwright.accumulate.audit_result import TOLERANCES, Audit, SplitAudit
from batchwright.accumulate.audit_subject import Subject
from batchwright.accumulate.causes import BATCH_NORM, NO_STEP, TAIL_DROPPED, Cause, Evidence, likely_cause
from batchwright.accumulate.gradients import Gradient, compare_modules
from batchwright.accumulate.splits import read_splits
from batchwright.accumulate.synchronisations import judge_synchronisations
from batchwright.errors import InvalidInputError
from batchwright.memory.estimate import check_shape
from batchwright.units import whole_number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from batchwright.accumulate.caught_window import CaughtWindow
    from batchwright.workload import Workload


class Comparable(Protocol):
    """Samples that can be run as one batch and as an accumulation."""

    dtype: str
    notes: list[str]

    @property
    def has_batch_norm(self) -> bool:
        """Whether statistics are taken from each batch."""
        ...

    def open(self) -> AbstractContextManager[None]:
        """Compare inside of this."""
        ...

    def frozen_statistics(self) -> AbstractContextManager[None]:
        """Have batch normalization use its running statistics."""
        ...

    def micro_batches(self, sizes: Sequence[int]) -> list[Any]:
        """Return the samples as micro-batches."""
        ...

    def reference(self, sizes: Sequence[int]) -> Gradient:
        """Return the gradient of one batch of all samples of a split."""
        ...

    def of_loss(self, batch: Any) -> Gradient:
        """Return the gradient of the loss of one batch."""
        ...

    def accumulated(self, micro_batches: Sequence[Any]) -> CaughtWindow:
        """Return what the loop would step with."""
        ...


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
    >>> found = audit_workload(workload)
    >>> found.exact, round(found.ratio, 3), found.cause
    (False, 4.0, 'count ignored')
    """
    _check(workload, dtype, dropout)
    check_shape(workload, shape or {})
    sizes = read_splits(splits, whole_number(micro_batch, "micro_batch"), whole_number(accumulation, "accumulation"))
    subject = Subject(workload, max(map(sum, sizes)), dtype=dtype, dropout=dropout, shape=dict(shape or {}))
    has_window = workload.window is not None
    # A window of the user's own may hold fewer micro-batches at the end of an epoch; plain accumulation has no end.
    tails = [sizes[0][:1]] if has_window and len(sizes[0]) > 1 and splits is None else []
    if has_window and splits is not None:
        subject.notes.append("a last, incomplete window was not tried; leave out splits for that")
    what = "the workload's own window" if has_window else "the loss under plain accumulation (no window= was handed in)"
    found = audit_subject(subject, sizes, tails, name=workload.name, what=what)
    return judge_synchronisations(found, workload, subject, sizes[0])


def audit_subject(
    subject: Comparable, sizes: Sequence[tuple[int, ...]], tails: Sequence[tuple[int, ...]], *, name: str, what: str
) -> Audit:
    """Compare every split, and look for the cause where the worst of them is off."""
    accumulation = len(sizes[0])
    with subject.open():
        tried = [_try_split(subject, split, accumulation) for split in (*sizes, *tails)]
        causes = [None if one.result.exact else _find_cause(subject, one, accumulation) for one in tried]
    # What is wrong in every window comes before what is wrong in the last one.
    worst = max(range(len(tried)), key=lambda i: _how_bad(tried[i], is_tail=i >= len(sizes)))
    cause = causes[worst]
    splits = [replace(one.result, cause=why.name if why else None) for one, why in zip(tried, causes, strict=True)]
    others = {why.name: why for why in causes if why is not None and why is not cause}
    return Audit(
        name=name,
        what=what,
        dtype=subject.dtype,
        splits=tuple(splits),
        worst=splits[worst],
        modules=compare_modules(tried[worst].caught.gradient, tried[worst].reference),
        cause=cause.name if cause else None,
        remedy=cause.remedy if cause else None,
        explanation=cause.explanation if cause else "",
        notes=(
            *_nothing_accumulated(tried),
            *subject.notes,
            *(f"also {why.name}: {why.explanation}; {why.remedy}" for why in others.values()),
        ),
    )


def _nothing_accumulated(tried: Sequence[_Tried]) -> list[str]:
    if any(len(one.sizes) > 1 for one in tried):
        return []
    return ["nothing was accumulated: every split is one micro-batch, and proves nothing"]


def _how_bad(tried: _Tried, *, is_tail: bool) -> tuple[bool, bool, float]:
    return not tried.result.exact, not is_tail, tried.result.relative_error or 0.0


@dataclass(frozen=True)
class _Tried:
    sizes: tuple[int, ...]
    reference: Gradient
    caught: CaughtWindow
    result: SplitAudit


def _try_split(subject: Comparable, sizes: Sequence[int], accumulation: int) -> _Tried:
    reference = subject.reference(sizes)
    caught = subject.accumulated(subject.micro_batches(sizes))
    error = caught.gradient.error_to(reference)
    is_exact = error is not None and error <= TOLERANCES[subject.dtype] and caught.has_stepped
    note = "" if caught.has_stepped else "no step; what it left behind"
    if len(sizes) < accumulation:
        note = note or f"the last, {len(sizes)} of {accumulation}"
    result = SplitAudit(tuple(sizes), caught.gradient.ratio_to(reference), error, is_exact, note=note)
    return _Tried(tuple(sizes), reference, caught, result)


def _find_cause(subject: Comparable, worst: _Tried, accumulation: int) -> Cause:
    if not worst.caught.has_stepped:
        return TAIL_DROPPED if len(worst.sizes) < accumulation else NO_STEP
    if subject.has_batch_norm:
        with subject.frozen_statistics():
            again = _try_split(subject, worst.sizes, accumulation)
            if again.result.exact:
                return BATCH_NORM
            return _from_evidence(subject, again, accumulation)
    return _from_evidence(subject, worst, accumulation)


def _from_evidence(subject: Comparable, tried: _Tried, accumulation: int) -> Cause:
    parts = subject.micro_batches(tried.sizes)
    first = parts[0]
    singles = [subject.of_loss(part) for part in parts]
    return likely_cause(
        Evidence(
            accumulated=tried.caught.gradient,
            reference=tried.reference,
            parts=singles,
            repeated={n: subject.accumulated([first] * n).gradient for n in (1, 2)},
            single=singles[0],
            accumulation=accumulation,
            tolerance=TOLERANCES[subject.dtype],
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
