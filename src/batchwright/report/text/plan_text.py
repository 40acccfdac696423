"""Plans as text: a plan, the check of a config, advice, and an epoch of batches by token budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchwright.report.display import draw_table
from batchwright.units import counted, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from batchwright.planning.advice import Advice, Option, Setting
    from batchwright.planning.config_check import ConfigCheck
    from batchwright.planning.plan import Plan
    from batchwright.planning.times import TimeModel
    from batchwright.sampler.epoch_plan import SamplerStats


def summarize_plan(plan: Plan) -> str:
    """Say the plan in one line.

    >>> from batchwright.planning.plan import plan
    >>> summarize_plan(plan(1024, micro_batch=48, devices=4))
    'micro-batch 43 x accumulation 6 x devices 4 = effective batch 1,032 (8 more than the 1,024 asked for)'
    """
    size = _size(plan.split.smallest, plan.split.largest)
    line = (
        f"micro-batch {size} x accumulation {plan.accumulation:,} x devices {plan.devices:,} "
        f"= effective batch {plan.effective_batch:,}"
    )
    if not plan.difference:
        return line
    direction = "more" if plan.difference > 0 else "fewer"
    return f"{line} ({abs(plan.difference):,} {direction} than the {plan.requested_batch:,} asked for)"


def _remarks_on_plan(plan: Plan) -> Iterator[str]:
    """What has to be said below the table, a line each."""
    yield f"why: {plan.reason}."
    if plan.epoch:
        yield from _epoch_remarks(plan)
    yield _times_remark(plan.times, any(row.is_extrapolated for row in plan.table))
    yield from (f"note: {note}." for note in plan.notes)


def draw_plan(plan: Plan) -> RenderableType:
    """Draw the comparison table; columns that nothing is known about are left out."""
    rows = plan.table
    columns = [
        ("micro-batch", [_size(row.smallest_micro_batch, row.micro_batch) for row in rows]),
        ("accumulation", [f"{row.accumulation:,}" for row in rows]),
        ("effective\nbatch", [f"{row.effective_batch:,}" for row in rows]),
    ]
    if plan.epoch:
        columns.append(("forwards\n/epoch", [f"{row.forwards_per_epoch:,}" for row in rows]))
        columns.append(("updates\n/epoch", [f"{row.updates_per_epoch:,}" for row in rows]))
    times = [f"{'~' if row.is_extrapolated else ''}{row.relative_time:.2f}" for row in rows]
    columns += [("relative\ntime", times), ("activations", [f"{row.relative_activations:.3g}x" for row in rows])]
    if any(row.peak_bytes is not None for row in rows):
        columns.append(("peak", [format_bytes(row.peak_bytes or 0) for row in rows]))
    return draw_table(summarize_plan(plan), columns, _remarks_on_plan(plan))


def _size(smallest: int, largest: int) -> str:
    return f"{largest:,}" if smallest == largest else f"{smallest:,}-{largest:,}"


def _epoch_remarks(plan: Plan) -> Iterator[str]:
    assert plan.epoch is not None
    last = plan.epoch.last_window
    if plan.epoch.dropped:
        dropped = counted(plan.epoch.dropped, "sample")
        yield f"dropped: {dropped} of {plan.epoch.samples:,} each epoch, an incomplete micro-batch."
    if last is None:
        return
    window = (
        f"last window: {last.samples:,} of {counted(plan.effective_batch, 'sample')} "
        f"in {last.micro_batches:,} of {counted(plan.accumulation, 'micro-batch')}"
    )
    yield f"{window}; it updates once, its mean taken over {last.samples:,}."


def _times_remark(times: TimeModel, is_extrapolated: bool) -> str:
    if not times.points:
        return (
            "times: a model, not measured: a sample always costs the same, a pass and an optimizer step nothing; "
            "measured `times` replace it."
        )
    remark = (
        f"times: alpha {times.alpha:.3g} s a pass, beta {times.beta:.3g} s a sample, sigma {times.sigma:.3g} s a step, "
        f"fitted to {counted(len(times.points), 'point')} within {times.largest_error:.1%}"
    )
    if times.unknown:
        remark += f"; these points cannot tell {' and '.join(times.unknown)}, so the simplest fit was taken"
    return remark + ("; ~ is outside the sizes measured." if is_extrapolated else ".")


_KINDS = {"deepspeed": "DeepSpeed config", "transformers": "TrainingArguments"}


def summarize_check(check: ConfigCheck) -> str:
    """Say the verdict in one line."""
    verdict = "agrees" if check.agrees else "disagrees"
    return f"{check.path}: {_KINDS[check.kind]} {verdict} for {counted(check.devices, 'device')}"


def check_remarks(check: ConfigCheck) -> Iterator[str]:
    """Say what the verdict rests on and what to change, a line each."""
    yield from (f"  {finding}" for finding in check.findings)
    if check.changes:
        # DeepSpeed's three numbers agree again after any one of the changes; arguments need all of theirs.
        yield "change one of these:" if check.kind == "deepspeed" and len(check.changes) > 1 else "change:"
    yield from (f"  {change}" for change in check.changes)


def draw_check(check: ConfigCheck) -> RenderableType:
    """Draw the check for a terminal."""
    from rich.console import Group
    from rich.text import Text

    return Group(Text(summarize_check(check), style="bold"), *(Text(remark) for remark in check_remarks(check)))


def _remarks_on_advice(advice: Advice) -> Iterator[str]:
    """Why each option helps, what to type for it, and what else there is."""
    for option in advice.options:
        yield f"{option.title}: {option.why}."
        yield f"    {_flags(option.after, advice.before)}"
    if any(option.follows_rule for option in advice.options):
        rule = advice.rule
        yield f"learning rate: {rule.name} rule ({rule.source}); {rule.limits}."
    if advice.further:
        yield "also:" if advice.options else "a micro-batch of 1 cannot be split; what is left:"
        yield from (f"  - {further}" for further in advice.further)


def draw_advice(advice: Advice) -> RenderableType:
    """Draw the settings before and after."""
    now, options = advice.before, advice.options
    settings = [now, *(option.after for option in options)]
    summary = (
        f"{advice.problem} at micro-batch {now.micro_batch:,} x accumulation {now.accumulation:,} "
        f"x devices {now.devices:,} = effective batch {now.effective_batch:,}"
    )
    columns = [
        ("", ["now", *(option.title for option in options)]),
        ("micro-batch", [f"{setting.micro_batch:,}" for setting in settings]),
        ("accumulation", [f"{setting.accumulation:,}" for setting in settings]),
        ("effective\nbatch", [_effective(setting, now) for setting in settings]),
        ("learning\nrate", [_rate(now), *(_rate(option.after, option) for option in options)]),
    ]
    return draw_table(summary, columns, _remarks_on_advice(advice), left=1)


def _effective(setting: Setting, before: Setting) -> str:
    if setting is before:
        return f"{setting.effective_batch:,}"
    kept = "kept" if setting.effective_batch == before.effective_batch else "changed"
    return f"{setting.effective_batch:,} ({kept})"


def _rate(setting: Setting, option: Option | None = None) -> str:
    factor = option.learning_rate_factor if option else 1.0
    if setting.learning_rate is not None:
        return f"{setting.learning_rate:.3g}"
    return "as it is" if factor == 1.0 else f"x {factor:.3g}"


def _flags(after: Setting, before: Setting) -> str:
    flags = f"--per_device_train_batch_size {after.micro_batch} --gradient_accumulation_steps {after.accumulation}"
    if after.learning_rate is not None and after.learning_rate != before.learning_rate:
        flags += f" --learning_rate {after.learning_rate:.3g}"
    return flags


# Pairs of batch-mates that meet again; random batches have next to none.
_LITTLE_SHUFFLING = 0.2


def _remarks_on_stats(stats: SamplerStats) -> Iterator[str]:
    """What has to be said below the table, a line each."""
    yield (
        f"{counted(stats.tokens, 'token')} on {counted(stats.ranks, 'rank')}, "
        f"shuffled over {counted(stats.num_windows, 'window')}."
    )
    if stats.pair_repeat > _LITTLE_SHUFFLING and stats.batches > 1:
        yield (
            f"little shuffling: {stats.pair_repeat:.0%} of the pairs in a batch meet again in the next epoch. A larger "
            "waste= or a smaller budget mixes more."
        )
    if stats.dropped:
        yield f"{counted(stats.dropped, 'sample')} over the budget by itself, left out."
    if stats.single:
        yield f"{counted(stats.single, 'sample')} over the budget by itself, each a batch of its own."
    if stats.repeats:
        yield f"{counted(stats.repeats, 'batch')} that repeat a sample at weight 0, to keep a rank in step."
    if stats.off_multiple:
        yield f"{counted(stats.off_multiple, 'batch')} whose samples are no multiple of what was asked."


def draw_stats(stats: SamplerStats) -> RenderableType:
    """Draw one row of figures."""
    summary = (
        f"{counted(stats.samples, 'sample')} in {counted(stats.batches, 'batch')} of at most {stats.budget:,.0f}: "
        f"{stats.waste:.2%} padding"
    )
    columns = [
        ("batches", [f"{stats.batches:,}"]),
        ("steps\nper rank", [f"{stats.steps:,}"]),
        ("waste", [f"{stats.waste:.2%}"]),
        ("fill", [f"{stats.fill:.1%}"]),
        ("rank\nidle", [f"{stats.rank_idle:.2%}"]),
        ("pair\nrepeat", [f"{stats.pair_repeat:.2%}"]),
        ("largest\nbatch", [f"{stats.largest_cost:,.0f}"]),
    ]
    return draw_table(summary, columns, _remarks_on_stats(stats))
