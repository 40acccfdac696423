"""An audit as text: the verdict, a row per split, and what is off and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchwright.auditing.audit_result import Audit, SplitAudit
from batchwright.report.display import draw_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType


_MOST_MODULES = 5


def summarize_audit(audit: Audit) -> str:
    """Say the verdict in one line.

    >>> from batchwright.auditing.audit_result import Audit, SplitAudit
    >>> twice = SplitAudit((2, 2), ratio=2.0, relative_error=1.0, exact=False)
    >>> summarize_audit(Audit("step", "the window", "fp32", (twice,), twice, (), "count ignored"))
    'step: the accumulated gradient is NOT that of the big batch: ratio 2, relative error 1 (count ignored)'
    """
    return f"{audit.name}: {verdict_of(audit)}"


def verdict_of(audit: Audit) -> str:
    """Say what was compared with what, and how it came out."""
    error, compared = _figure(audit.relative_error), audit.compared_with
    if (audit.is_random or audit.is_stateful) and not (audit.has_exact_gradient and audit.is_reference_right):
        reason = "is random" if audit.is_random else "differs from call to call"
        difference = f"it differs from that of {compared} (ratio {_figure(audit.ratio)}, relative error {error})"
        if audit.has_exact_gradient:
            difference = f"it is that of {compared}, which is not the big batch"
        return f"the accumulated gradient cannot be judged, for the loss {reason}: {difference}"
    if not audit.is_comparable:
        return f"the accumulated gradient was not compared with that of {compared}: {audit.explanation}"
    if not audit.has_exact_gradient:
        figures = f"ratio {_figure(audit.ratio)}, relative error {error} ({audit.cause or 'unknown'})"
        return f"the accumulated gradient is NOT that of {compared}: {figures}"
    verdict = f"the accumulated gradient is that of {compared} (relative error {error})"
    if not audit.is_reference_right:
        return f"{verdict}, which is NOT the big batch: relative error {_figure(audit.reference_error)} ({audit.cause})"
    if audit.defects:
        return f"{verdict}, but the loop is NOT right: {', '.join(defect.name for defect in audit.defects)}"
    if audit.condition is not None:
        verdict = (
            f"{verdict} in the FIRST window only; {audit.condition.name}: "
            "right only if the code around `window` calls zero_grad() between two windows"
        )
    return f"{verdict}; {audit.cause}" if audit.cause else verdict


def _second_window(audit: Audit) -> list[SplitAudit]:
    """A row for the second window, where nothing but zeroing is missing: its figures are beside the first."""
    if audit.condition is None or audit.second_window is None or not audit.has_exact_gradient:
        return []
    ratio, error = audit.second_window
    cause = audit.condition.name
    return [SplitAudit(audit.splits[0].sizes, ratio, error, False, cause, "the second, not zeroed")]


def _remarks(audit: Audit) -> Iterator[str]:
    """What has to be said below the table, a line each."""
    yield f"judged: {audit.what}, in {audit.dtype}, against {audit.compared_with}."
    if audit.cause:
        yield f"likely cause: {audit.cause}: {audit.explanation}."
        yield f"remedy: {audit.remedy}."
    elif audit.remedy:
        yield f"no cause is named: {audit.explanation}."
        yield f"remedy: {audit.remedy}."
    if not audit.has_exact_gradient and audit.modules:
        shown = [
            f"{m.name} {_figure(m.relative_error)} (ratio {_figure(m.ratio)})" for m in audit.modules[:_MOST_MODULES]
        ]
        rest = len(audit.modules) - len(shown)
        yield f"error by module, worst first: {', '.join(shown)}{f', and {rest} more' if rest else ''}."
    yield from (f"note: {note}." for note in audit.notes)


def draw_audit(audit: Audit) -> RenderableType:
    """Draw the audit, a row per split."""
    splits = [*audit.splits, *_second_window(audit)]
    exact = ["yes" if split.exact else "NO" for split in audit.splits]
    columns = [
        ("split", [split.name for split in splits]),
        ("window", [split.note or "full" for split in splits]),
        ("samples", [str(sum(split.sizes)) for split in splits]),
        ("ratio", [_figure(split.ratio) for split in splits]),
        ("relative error", [_figure(split.relative_error) for split in splits]),
        ("exact", [*exact, *["if zeroed"] * (len(splits) - len(exact))]),
        ("likely cause", [split.cause or "-" for split in splits]),
    ]
    return draw_table(summarize_audit(audit), columns, _remarks(audit), left=2)


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.4g}"
