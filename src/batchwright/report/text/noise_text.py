"""Noise as text: a run of `noise`, the best batch, and branches at several batches."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from batchwright.planning.critical_batch import CriticalBatch, figure, steps_over_minimum
from batchwright.report.display import draw_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from batchwright.noise.branches import MeasuredCriticalBatch
    from batchwright.noise.noise_result import NoiseRun
    from batchwright.planning.soonest import BestBatch


def summarize_best_batch(best: BestBatch) -> str:
    """Say the answer in one line.

    >>> from batchwright.planning.soonest import best_batch
    >>> summarize_best_batch(best_batch(400, {16: 0.12, 64: 0.24, 256: 0.72}))
    'effective batch 113 reaches the loss soonest; 67 to 192 are within 5 % of its time'
    """
    first, last = best.range_within_5_percent
    ends = f"{best.low:,} or more" if best.high is None else f"{best.low:,} to {best.high:,}"
    interval = "" if best.low == best.value == best.high else f" [{ends}]"
    answer = f"effective batch {best.value:,}{interval} reaches the loss soonest"
    return f"{answer}; {first:,} to {last:,} are within 5 % of its time"


def draw_best_batch(best: BestBatch) -> RenderableType:
    """Draw a row per batch: the best, then in order the ends of the range and the batches that were timed."""
    step = best.step_seconds
    others = {*best.range_within_5_percent, *(batch for batch, _ in step.points)} - {best.value}
    batches = [best.value, *sorted(others)]
    columns = [
        ("effective\nbatch", [f"{'' if step.covers(batch) else '~'}{batch:,}" for batch in batches]),
        ("step\nseconds", [f"{step.at(batch):.3g}" for batch in batches]),
        ("steps over\nthe minimum", [f"{steps_over_minimum(batch, best.noise_scale):.3g}x" for batch in batches]),
        ("time to\nthe loss", [f"{best.time_ratio(batch):.3g}x" for batch in batches]),
    ]
    remarks = [f"{words}." for words in best.words]
    if not all(map(step.covers, batches)):
        remarks.append("~ is outside the batches that were timed.")
    return draw_table(summarize_best_batch(best), columns, remarks)


def summarize_branches(measured: MeasuredCriticalBatch) -> str:
    """Say the answer in one line."""
    critical = measured.critical_batch
    span = str(critical) if critical.resolved else f"{figure(critical.value)} samples"
    proxy = "" if measured.ratio is None else f", {measured.ratio:.2g} times the noise scale"
    return f"critical batch by training: {span}{proxy}"


def _remarks_on_branches(measured: MeasuredCriticalBatch) -> Iterator[str]:
    """What has to be said below the table, a line each."""
    yield f"steps to a held-out loss of {measured.target_loss:.4g}, mean of {len(measured.branches[0].steps)} seeds."
    yield f"at least {measured.min_steps:,.0f} steps at any batch, at least {measured.min_examples:,.0f} examples."
    if measured.noise_scale is not None:
        yield f"noise scale along the smallest batch's run: {measured.noise_scale}."
    yield from (f"note: {note}." for note in measured.notes)


def draw_branches(measured: MeasuredCriticalBatch) -> RenderableType:
    """Draw the measurement, a row per batch."""
    rows, least, examples = measured.branches, measured.min_steps, measured.min_examples
    columns = [
        ("batch", [f"{row.batch:,}" for row in rows]),
        ("learning\nrate x", ["-" if math.isnan(f := row.learning_rate_factor) else f"{f:.3g}" for row in rows]),
        ("steps", ["not reached" if row.mean_steps is None else f"{row.mean_steps:,.0f}" for row in rows]),
        ("by the\ncurve", [f"{least + examples / row.batch:,.0f}" for row in rows]),
        ("examples", ["-" if row.mean_steps is None else f"{row.mean_steps * row.batch:,.0f}" for row in rows]),
    ]
    return draw_table(summarize_branches(measured), columns, _remarks_on_branches(measured))


def summarize_noise(run: NoiseRun) -> str:
    """Say the answer in one line."""
    verdict, position = run.verdict, run.verdict.position
    in_use = f"{figure(verdict.effective_batch)} {verdict.critical.unit}"
    beside = "not yet comparable with" if position == "unresolved" else position
    return f"{run.name}: critical batch {run.critical_batch}; the batch in use, {in_use}, is {beside} it"


def _remarks_on_run(run: NoiseRun) -> Iterator[str]:
    """What has to be said below the table, a line each."""
    split = f"micro-batch {run.micro_batch:,} x accumulation {run.accumulation:,}"
    yield f"trained {run.steps:,} steps of {run.effective_batch:,} samples ({split} x devices {run.ranks}) on {run.on}."
    yield f"trend: {_trend(run)}."
    samples = run.critical_batch.in_samples()
    if samples is not None and samples is not run.critical_batch:
        yield f"in samples: {samples}."
    if len(run.by_group) > 1:
        yield "by parameter group: " + "; ".join(f"{name} {critical}" for name, critical in run.by_group.items()) + "."
    if not run.critical_batch.resolved:
        yield f"the upper end is not resolved: {_further(run.critical_batch)}."
    yield f"verdict: {run.verdict.recommendation}."
    yield f"wasted: {run.verdict.waste.percent} of the samples, compared with a tiny batch."
    for words in run.verdict.words[1:]:
        if words not in run.verdict.recommendation:
            yield f"{words}."
    if run.best is not None:
        yield f"by the step times: {run.recommendation}."
    if run.gamma is not None:
        yield (
            f"gamma {run.gamma:.2f}: a batch that followed the trend would need {100 * run.gamma:.0f} % of the samples "
            "above the least possible, in as many steps; near 1 a fixed batch is as good."
        )
    for reason, number in (run.skipped or {}).items():
        yield f"left out: {number:,} of {run.steps:,} steps: {reason}."
    yield from (f"note: {note}." for note in run.notes)


def draw_noise(run: NoiseRun) -> RenderableType:
    """Draw the run, a row per point of the trend."""
    points = run.history
    criticals = [point.critical_batch for point in points]
    columns = [
        ("step", [f"{point.step:,}" for point in points]),
        ("samples", [f"{point.samples:,}" for point in points]),
        ("loss", ["-" if math.isnan(point.loss) else f"{point.loss:.4g}" for point in points]),
        (f"critical batch\n({run.critical_batch.unit})", [_value(critical) for critical in criticals]),
        ("95 %\nfrom", [figure(critical.low) for critical in criticals]),
        ("to", ["not resolved" if critical.high == math.inf else figure(critical.high) for critical in criticals]),
        ("steps\naveraged", [f"{critical.observations:,}" for critical in criticals]),
    ]
    return draw_table(summarize_noise(run), columns, _remarks_on_run(run))


def _trend(run: NoiseRun) -> str:
    if len(run.history) < 2:
        return "too few steps to show one"
    first, last = run.history[0], run.history[-1]
    is_known = not math.isnan(first.loss + last.loss)
    losses = f", while the loss went from {first.loss:.4g} to {last.loss:.4g}" if is_known else ""
    before, after = first.critical_batch, last.critical_batch
    if after.low > before.high:
        return f"the critical batch rose from {before} to {after}{losses}"
    if after.high < before.low:
        return f"the critical batch fell from {before} to {after}{losses}"
    return f"no change beyond the intervals ({_value(before)} to {_value(after)} {after.unit}){losses}"


def _further(critical: CriticalBatch) -> str:
    if critical.steps_needed is None:
        return (
            "the signal is not yet clearly above 0, so the number of steps is unknown; a larger batch shows it sooner"
        )
    return f"about {critical.steps_needed:,} more steps of this batch would, or fewer of a larger one"


def _value(critical: CriticalBatch) -> str:
    return "-" if critical.value == float("inf") else figure(critical.value)
