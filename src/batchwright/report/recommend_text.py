"""A recommendation as text: a row for each model and memory, then what was assumed and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchwright.report.tables import draw_table
from batchwright.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from batchwright.memory.recommend import Answer, Recommendation
    from batchwright.report.html import Columns


def summarize_recommendation(recommendation: Recommendation) -> str:
    """Say what was asked, and the answer where there is one only."""
    asked = (
        f"{recommendation.task}, {recommendation.tuning} tuning, {recommendation.seq_len:,} tokens, "
        f"{recommendation.precision}"
    )
    if recommendation.checkpointing:
        asked += ", checkpointing"
    if len(recommendation.answers) > 1:
        return asked
    answer = recommendation.answers[0]
    place = f"{answer.model} in {_memory(answer)}"
    if answer.fits:
        return f"{place}: micro-batch {answer.recommended_batch_size:,} ({asked})"
    return f"{place}: nothing fits; micro-batch 1 needs {format_bytes(answer.needed_bytes)} ({asked})"


def recommendation_columns(recommendation: Recommendation) -> Columns:
    """The answers as headed columns of text."""
    answers = recommendation.answers
    columns = [
        ("model", [answer.size for answer in answers]),
        ("memory", [_memory(answer) for answer in answers]),
        ("micro-\nbatch", [_count(answer.recommended_batch_size) for answer in answers]),
        ("a sample\nadds", [format_bytes(answer.memory_per_sample) for answer in answers]),
        ("predicted\npeak", [_peak(answer) for answer in answers]),
        ("accum.\nfor 32", [_count(answer.gradient_accumulation_for_32) for answer in answers]),
        ("accum.\nfor 64", [_count(answer.gradient_accumulation_for_64) for answer in answers]),
    ]
    if any(answer.rule_of_thumb for answer in answers):
        columns.append(("rule of\nthumb", [_rule(answer) for answer in answers]))
    return columns


def recommendation_remarks(recommendation: Recommendation) -> Iterator[str]:
    """What each size stands for, what was assumed, and what to do where nothing fits."""
    models = dict.fromkeys((answer.size, answer.model) for answer in recommendation.answers)
    named = ", ".join(f"{size} is {model}" for size, model in models if size.lower() != model)
    if named:
        yield f"shapes: {named}."
    yield (
        "predicted by formula, 80 % of the memory used, the largest power of two that fits; "
        "accumulation reaches an effective batch of 32 or 64 on one device."
    )
    if any(answer.rule_of_thumb for answer in recommendation.answers):
        yield (
            "rule of thumb: gigabytes per sample by size and task; it knows neither weights, length nor tuning, "
            "and is shown for comparison only."
        )
    seen = set()
    for answer in recommendation.answers:
        if not answer.fits and answer.model not in seen:
            seen.add(answer.model)
            yield (
                f"{answer.size}: micro-batch 1 needs {format_bytes(answer.needed_bytes)}, which is 80 % of "
                f"{format_bytes(answer.needed_bytes / 0.8)}; try: {answer.remedy}."
            )


def draw_recommendation(recommendation: Recommendation) -> RenderableType:
    """Draw the recommendation for a terminal."""
    return draw_table(
        summarize_recommendation(recommendation),
        recommendation_columns(recommendation),
        recommendation_remarks(recommendation),
        left=1,
    )


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _peak(answer: Answer) -> str:
    if answer.estimated_memory_usage is None:
        return f"({format_bytes(answer.needed_bytes)})"
    return format_bytes(answer.estimated_memory_usage)


def _rule(answer: Answer) -> str:
    return f"{answer.rule_of_thumb.recommended_batch_size:,}" if answer.rule_of_thumb else "-"


def _memory(answer: Answer) -> str:
    amount = format_bytes(answer.memory_bytes)
    return amount if answer.on is None else f"{amount} ({answer.on})"
