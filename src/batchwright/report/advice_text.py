"""Advice as text: the settings before and after side by side, then why, then what to type."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchwright.report.tables import draw_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from batchwright.planning.advice import Advice
    from batchwright.planning.remedies import Option, Setting
    from batchwright.report.html import Columns


def summarize_advice(advice: Advice) -> str:
    """Say what the advice is about in one line."""
    now = advice.before
    return (
        f"{advice.problem} at micro-batch {now.micro_batch:,} x accumulation {now.accumulation:,} "
        f"x devices {now.devices:,} = effective batch {now.effective_batch:,}"
    )


def advice_columns(advice: Advice) -> Columns:
    """The settings before and after, as headed columns of text."""
    settings = [advice.before, *(option.after for option in advice.options)]
    return [
        ("", ["now", *(option.title for option in advice.options)]),
        ("micro-batch", [f"{setting.micro_batch:,}" for setting in settings]),
        ("accumulation", [f"{setting.accumulation:,}" for setting in settings]),
        ("effective\nbatch", [_effective(setting, advice.before) for setting in settings]),
        ("learning\nrate", [_rate(advice.before), *(_rate(o.after, o) for o in advice.options)]),
    ]


def advice_remarks(advice: Advice) -> Iterator[str]:
    """Why each option helps, what to type for it, and what else there is."""
    for option in advice.options:
        yield f"{option.title}: {option.why}."
        yield f"    {_flags(option.after, advice.before)}"
    if any(option.follows_rule for option in advice.options):
        rule = advice.rule
        yield f"learning rate: {rule.name} rule ({rule.source}); {rule.limits}."
    if advice.further:
        yield "also:" if advice.options else "a micro-batch of 1 cannot be split; what is left:"
        for further in advice.further:
            yield f"  - {further}"


def draw_advice(advice: Advice) -> RenderableType:
    """Draw the advice for a terminal."""
    return draw_table(summarize_advice(advice), advice_columns(advice), advice_remarks(advice), left=1)


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
