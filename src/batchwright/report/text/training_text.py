"""What training showed, as text: an audit, the noise and the best batch, branches, and a whole run of `tune`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from batchwright.auditing.audit_result import Audit, SplitAudit
from batchwright.planning.critical_batch import CriticalBatch, figure, steps_over_minimum
from batchwright.report.display import Columns, draw_table, or_dash
from batchwright.report.page.run_reading import in_one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from batchwright.noise.measure_critical_batch import MeasuredCriticalBatch
    from batchwright.noise.noise_result import NoiseRun
    from batchwright.planning.best_batch import BestBatch
    from batchwright.tuning.tune import Tuned


_MOST_MODULES, _NODE = 5, 8


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
    error, compared = _brief(audit.relative_error), audit.compared_with
    if (audit.is_random or audit.is_stateful) and not (audit.has_exact_gradient and audit.is_reference_right):
        reason = "is random" if audit.is_random else "differs from call to call"
        difference = f"it differs from that of {compared} (ratio {_brief(audit.ratio)}, relative error {error})"
        if audit.has_exact_gradient:
            difference = f"it is that of {compared}, which is not the big batch"
        return f"the accumulated gradient cannot be judged, for the loss {reason}: {difference}"
    if not audit.is_comparable:
        return f"the accumulated gradient was not compared with that of {compared}: {audit.explanation}"
    if not audit.has_exact_gradient:
        figures = f"ratio {_brief(audit.ratio)}, relative error {error} ({audit.cause or 'unknown'})"
        return f"the accumulated gradient is NOT that of {compared}: {figures}"
    verdict = f"the accumulated gradient is that of {compared} (relative error {error})"
    if not audit.is_reference_right:
        return f"{verdict}, which is NOT the big batch: relative error {_brief(audit.reference_error)} ({audit.cause})"
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


def _remarks_on_audit(audit: Audit) -> Iterator[str]:
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
            f"{m.name} {_brief(m.relative_error)} (ratio {_brief(m.ratio)})" for m in audit.modules[:_MOST_MODULES]
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
        ("ratio", [_brief(split.ratio) for split in splits]),
        ("relative error", [_brief(split.relative_error) for split in splits]),
        ("exact", [*exact, *["if zeroed"] * (len(splits) - len(exact))]),
        ("likely cause", [split.cause or "-" for split in splits]),
    ]
    return draw_table(summarize_audit(audit), columns, _remarks_on_audit(audit), left=2)


def _brief(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.4g}"


def summarize_best_batch(best: BestBatch) -> str:
    """Say the answer in one line.

    >>> from batchwright.planning.best_batch import best_batch
    >>> summarize_best_batch(best_batch(400, {16: 0.12, 64: 0.24, 256: 0.72}))
    'effective batch 113 reaches the loss soonest; 67 to 192 are within 5 %'
    """
    ends = f"{best.low:,} or more" if best.high is None else f"{best.low:,} to {best.high:,}"
    interval = "" if best.low == best.value == best.high else f" [{ends}]"
    answer = f"effective batch {best.value:,}{interval} reaches the loss soonest"
    return f"{answer}; {best.how_good}"


def draw_best_batch(best: BestBatch) -> RenderableType:
    """Draw a row per batch: the best, then in order the ends of the range and the batches that were timed."""
    step = best.step_seconds
    others = {*(best.range_within_5_percent or ()), *(batch for batch, _ in step.points)} - {best.value}
    batches = [best.value, *sorted(others)]
    columns = [
        ("effective\nbatch", [f"{'' if step.covers(batch) else '~'}{batch:,}" for batch in batches]),
        ("step\nseconds", [f"{step.at(batch):.3g}" for batch in batches]),
        (
            "steps over\nthe minimum",
            [f"{steps_over_minimum(batch, best.noise_scale, best.bend):.3g}x" for batch in batches],
        ),
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


def summarize_tuned(tuned: Tuned) -> str:
    """Say the answer in one line."""
    advised = tuned.run["recommendation"]
    if "skipped" in advised:
        return f"no recommendation: {advised['skipped']}"
    split = (
        f"micro-batch {advised['micro_batch']:,} x accumulation {advised['accumulation']:,} x devices "
        f"{advised['devices']:,} = effective batch {advised['effective_batch']:,}"
    )
    good = advised["range_within_5_percent"]
    text = f"{split} ({advised['source']})"
    if good is None:
        chance = advised.get("chance_within_5_percent")
        return text if chance is None else f"{text}; within 5 % of the best with a chance of {100 * chance:.0f} % only"
    if not good[0] <= advised["effective_batch"] <= good[1]:
        return f"{text}; {advised['best_effective_batch']:,} would be soonest"
    return text if good[0] == good[1] else f"{text}; {good[0]:,} to {good[1]:,} are as good"


def tuned_columns(tuned: Tuned) -> Columns:
    """What the answer is, and what other set-ups would give."""
    advised = tuned.run["recommendation"]
    if "skipped" in advised:
        return []
    rows = [{"change": "recommended", "time_ratio": 1.0 if advised["seconds_per_step"] else None, **advised}]
    rows += advised["changes"]
    return [
        ("set-up", [row["change"] for row in rows]),
        *((name.replace("_", " "), [or_dash("{:,}".format, row[name]) for row in rows]) for name in _SIZES),
        ("time to\nthe loss", [or_dash("{:.2f}x".format, row["time_ratio"]) for row in rows]),
    ]


_SIZES = ("micro_batch", "accumulation", "effective_batch")


def tuned_remarks(tuned: Tuned) -> Iterator[str]:
    """What the answer rests on, a line each, and what is missing."""
    run = tuned.run
    advised = run["recommendation"]
    if "skipped" not in advised:
        if "in_short" in advised:  # a run of an older version has none
            yield f"in short: {advised['in_short']}."
        if "command" in advised:
            yield f"type: {advised['command']}"
        rate = advised["learning_rate"]
        if rate is not None:
            line = f"{rate['now']:g} -> {rate['recommended']:.3g} [{rate['low']:.3g}, {rate['high']:.3g}]"
            if rate["at_batch"]:
                line += f" if {rate['now']:g} suits batch {rate['at_batch']:,}; another is named as the noise batch"
            yield f"learning rate: {line}."
        yield from (f"why: {reason}." for reason in advised["reasons"])
        yield from (f"assumed: {text}." for text in advised["assumes"])
        yield from (f"{change['change']}: {change['note']}." for change in advised["changes"] if change["note"])
        yield from _run_and_devices(advised)
        yield from (f"note: {note}." for note in advised["notes"])
    yield from (f"throughput: {note}." for note in run["throughput"].get("notes", ()))
    if "how" in run["noise"]:
        yield f"noise: {run['noise']['how']}."
    if not_covered := run["fit"].get("restored", {}).get("not_covered"):
        yield f"not restored: {', '.join(not_covered)}."
    audit = run["audit"]
    if isinstance(audit.get("exact"), bool):
        verdict = (
            "exact" if audit["exact"] else f"NOT the gradient of the big batch ({audit['cause'] or 'cause unknown'})"
        )
        yield f"accumulation: {verdict}, for {audit['what']}."
        if not audit["exact"] and audit.get("remedy"):
            yield f"accumulation: {audit['remedy']}"
    for name, section in run.items():
        why = section.get("skipped") if isinstance(section, dict) else None
        # Without a recommendation its reason is the summary, and the plan's is the same.
        if isinstance(why, str) and why != "not asked for" and name not in ("plan", "recommendation"):
            yield f"{name}: {in_one_line(why)}"


def _run_and_devices(advised: dict[str, Any]) -> Iterator[str]:
    """How long the run takes, what it costs, on how many devices it pays; older runs have neither."""
    whole, devices = advised.get("run"), advised.get("by_devices")
    if whole:
        low, high = whole["hours_interval"]
        line = f"the run: {whole['hours']:.3g} h [{low:.3g}, {high:.3g}]"
        if whole["cost"] is not None:
            least, most = whole["cost_interval"]
            price = f"{whole['price_per_hour']:g} for a device and hour"
            line += f", at {price} {whole['cost']:.3g} [{least:.3g}, {most:.3g}]"
        yield f"{line}."
    if devices:
        times = ", ".join(f"{row['devices']}: {row['time_over_one']:.2f}" for row in devices["rows"])
        nodes = "one node" if devices["rows"][-1]["devices"] <= _NODE else "beyond 8 a model of the network"
        yield f"time to the loss by devices (predicted, {nodes}): {times}; up to {devices['worth']} pay."


def draw_tuned(tuned: Tuned) -> RenderableType:
    """Draw the answer for a terminal."""
    return draw_table(summarize_tuned(tuned), tuned_columns(tuned), tuned_remarks(tuned), left=1)
