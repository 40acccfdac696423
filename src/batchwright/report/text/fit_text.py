"""A fit as text: the answer and what the next size did, every probe or a row per shape, and what has to be said."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchwright.fitting.fit_result import Fit, NextSize, limited_peak, name_shape
from batchwright.report.display import Columns, draw_table, or_dash
from batchwright.report.text.plan_text import summarize_plan
from batchwright.units import counted, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from batchwright.device.outcome import Outcome


def summarize_fit(fit: Fit) -> str:
    """Say the answer in one line."""
    if not fit.shapes:
        at_shape = f" at {name_shape(fit.shape)}" if fit.shape else ""
        return f"{fit.name}{at_shape}: {_answer(fit)}"
    where = f"on {_place(fit)}{_within(fit)}"
    nothing = [name_shape(row.shape) for row in fit.shapes if row.micro_batch is None]
    fitting = len(fit.shapes) - len(nothing)
    smallest = (
        f"{fit.name}: micro-batch {fit.micro_batch:,} at {name_shape(fit.shape)} "
        f"is the smallest of {counted(fitting, 'shape')} {where}"
    )
    return f"{smallest}; nothing fits at {', '.join(nothing)}" if nothing else smallest


def fit_remarks(fit: Fit) -> Iterator[str]:
    """What has to be said below the table, a line each."""
    if not fit.shapes:
        yield from _remarks_of_one(fit)
    num_compilations = sum(trial.num_compilations for trial in _all_trials(fit))
    if num_compilations:
        yield f"torch.compile: compiled {counted(num_compilations, 'time')}; its seconds are not counted."
    if fit.restored.untouched:
        yield f"state: untouched ({fit.restored.untouched})."
    else:
        yield f"restored: {', '.join(fit.restored.covered) or 'nothing had to be'}."
    if fit.restored.not_covered:
        yield f"not restored: {', '.join(fit.restored.not_covered)}."
    yield from (f"doubt: {doubt}." for doubt in dict.fromkeys(trial.doubt for trial in _all_trials(fit) if trial.doubt))
    yield from (f"note: {note}." for note in _notes(fit))


def draw_fit(fit: Fit) -> RenderableType:
    """Draw the fit: every probe as it ran, or a row for each of several shapes; the row of the answer stands out."""
    columns = _shape_columns(fit) if fit.shapes else _trial_columns(fit)
    rows: Sequence[Fit | Outcome] = fit.shapes or fit.trials
    answers = [
        number
        for number, row in enumerate(rows)
        if row.micro_batch == fit.micro_batch and (not fit.shapes or row.shape == fit.shape)
    ]
    return draw_table(summarize_fit(fit), columns, fit_remarks(fit), bold=answers)


def _place(fit: Fit) -> str:
    place = fit.on if fit.source == "measured" else f"{fit.on} (simulated)"
    return place if fit.ranks == 1 else f"{place}, {fit.ranks} ranks"


def _within(fit: Fit) -> str:
    return "" if fit.limit_bytes is None else f" within {format_bytes(fit.limit_bytes)}"


def _answer(fit: Fit) -> str:
    if fit.micro_batch is None:
        return f"nothing fits on {_place(fit)}{_within(fit)}"
    text = f"micro-batch {fit.micro_batch:,} fits on {_place(fit)}"
    if fit.peak is None:
        text += _within(fit)
    elif fit.limit_bytes is None or fit.headroom_bytes is None:
        text += f": peak {format_bytes(fit.peak)}"
    else:
        text += (
            f": peak {format_bytes(fit.peak)} of {format_bytes(fit.limit_bytes)}, "
            f"headroom {format_bytes(fit.headroom_bytes)}"
        )
    return f"{text}; {_next(fit)}"


def _next(fit: Fit) -> str:
    after = fit.next_size
    if after is None:
        return fit.reason
    if after.outcome is None:
        return f"micro-batch {after.micro_batch:,} was {after.why}"
    return f"micro-batch {after.micro_batch:,} {_PAST.get(after.outcome, after.outcome)}{_origin_of(fit, after)}"


def _origin_of(fit: Fit, after: NextSize) -> str:
    """Say that a next size was not probed this time: an answer that is remembered is certified by one probe."""
    return "" if any(trial.micro_batch == after.micro_batch for trial in fit.trials) else " in an earlier run"


_PAST = {"out_of_memory": "ran out of memory", "failed": "failed", "fits": "fits"}
_OUTCOMES = {"out_of_memory": "out of memory", "failed": "failed", "fits": "fits"}


def _trial_columns(fit: Fit) -> Columns:
    trials = fit.trials
    return [
        ("micro-batch", [f"{trial.micro_batch:,}" for trial in trials]),
        _words("outcome", ["too small" if t.is_too_small else _OUTCOMES[t.verdict] for t in trials]),
        ("peak", [or_dash(format_bytes, limited_peak(trial)) for trial in trials]),
        ("seconds\n/step", [or_dash("{:,.3g}".format, trial.step_seconds) for trial in trials]),
        ("samples\n/s", [or_dash(_speed, trial.samples_per_second) for trial in trials]),
    ]


def _shape_columns(fit: Fit) -> Columns:
    rows = fit.shapes
    columns = [(name, [str(row.shape[name]) for row in rows]) for name in rows[0].shape]
    columns += [
        ("micro-batch", [or_dash("{:,}".format, row.micro_batch) for row in rows]),
        ("peak", [or_dash(format_bytes, row.peak) for row in rows]),
        ("headroom", [or_dash(format_bytes, row.headroom_bytes) for row in rows]),
    ]
    if fit.plan is not None:
        columns.append((f"accumulated\nto {fit.plan.requested_batch:,}", [_accumulated(row) for row in rows]))
    if fit.evaluation is not None:
        sizes = {name_shape(row.shape): row.micro_batch for row in fit.evaluation.shapes}
        columns.append(("evaluation", [or_dash("{:,}".format, sizes.get(name_shape(row.shape))) for row in rows]))
    columns.append(("probes", [str(len(row.trials)) for row in rows]))
    return [*columns, _words("next size", [_next_in_short(row) for row in rows])]


def _next_in_short(fit: Fit) -> str:
    if fit.micro_batch is None or fit.next_size is None:
        return fit.reason
    after = fit.next_size
    if after.outcome is None:
        return f"{after.micro_batch:,} {after.why}"
    return f"{after.micro_batch:,} {_OUTCOMES.get(after.outcome, after.outcome)}{_origin_of(fit, after)}"


def _accumulated(fit: Fit) -> str:
    if fit.plan is None:
        return "-"
    split = fit.plan.split
    size = f"{split.largest:,}" if split.smallest == split.largest else f"{split.smallest:,}-{split.largest:,}"
    return f"{size} x {split.accumulation:,} x {split.devices:,} = {split.samples:,}"


def _remarks_of_one(fit: Fit) -> Iterator[str]:
    fastest = fit.fastest_micro_batch
    if fastest is not None and fit.micro_batch is not None and fastest < 0.9 * fit.micro_batch:
        speeds = {t.micro_batch: t.samples_per_second for t in fit.trials if t.fits and t.samples_per_second}
        own = speeds.get(fit.micro_batch)
        beside = f", {_speed(own)} at {fit.micro_batch:,}" if own else ""
        yield f"speed: {_speed(speeds[fastest])} samples/s at micro-batch {fastest:,} already{beside}."
    if fit.line is not None:
        yield (
            f"memory: {format_bytes(fit.line.fixed_bytes)} fixed + {format_bytes(fit.line.bytes_per_sample)} "
            f"per sample near the answer (slope {fit.line.source})."
        )
    if fit.plan is not None:
        yield f"plan: {summarize_plan(fit.plan)}."
    if fit.evaluation is not None:
        yield f"evaluation: {_answer(fit.evaluation)}."


def _notes(fit: Fit) -> Iterator[str]:
    others = (*fit.shapes, *([fit.evaluation] if fit.evaluation else []))
    yield from dict.fromkeys(note for one in (fit, *others) for note in one.notes)


def _all_trials(fit: Fit) -> Iterator[Outcome]:
    """The probes of every shape, and of evaluation."""
    if fit.shapes:
        for row in fit.shapes:
            yield from row.trials
    else:
        yield from fit.trials
    if fit.evaluation is not None:
        yield from _all_trials(fit.evaluation)


def _speed(samples_per_second: float) -> str:
    return f"{samples_per_second:,.0f}" if samples_per_second >= 100 else f"{samples_per_second:.3g}"


def _words(heading: str, cells: list[str]) -> tuple[str, list[str]]:
    """Return a column of words: numbers stand to the right of theirs, words to the left."""
    width = max(map(len, [heading, *cells]))
    return heading.ljust(width), [cell.ljust(width) for cell in cells]
