"""Memory as text: an estimate, every card of the catalogue, and a recommendation."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from batchwright.report.display import Columns, draw_table, or_dash, table_lines
from batchwright.report.text.time_text import describe_time, format_rate
from batchwright.timing.step_time import StepTime
from batchwright.units import counted, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from batchwright.memory.estimate_result import Estimate, EveryCard
    from batchwright.memory.recommend import Answer, Recommendation


_BAR_WIDTH = 40


def summarize_estimate(estimate: Estimate) -> str:
    """Say the peak in one line."""
    peak = f"peak {format_bytes(estimate.peak)} at micro-batch {estimate.micro_batch:,}"
    bound = estimate.upper_bytes.allocated
    at_most = "a lower bound" if bound is None else f"at most {format_bytes(bound)}"
    # A formula knows nothing of allocators and contexts, so it has no "at most" to give.
    by_formula = "by formula, without a bound: allocator and context are apart"
    how = by_formula if estimate.source == "formula" else f"predicted for {estimate.on}, {at_most}"
    line = f"{estimate.name}: {peak}, {how}"
    if estimate.fits is not None:
        line = f"{estimate.name}: {_on_card(estimate)}"
    if estimate.limit_bytes is None or estimate.max_micro_batch is None:
        return line
    within = format_bytes(estimate.limit_bytes)
    if estimate.max_limited_by == "data":
        return f"{line}; the data has no more samples, and {within} would hold more"
    if estimate.max_limited_by == "search":
        return f"{line}; no larger size was tried, and {within} would hold more"
    return f"{line}; the largest within {within}"


def _on_card(estimate: Estimate) -> str:
    """The three peaks on a simulated card, and whether they go onto it."""
    peaks, upper = estimate.peak_bytes, estimate.upper_bytes
    verdict = "fits" if estimate.fits else "does not fit"
    kinds = ", ".join(
        f"{kind} {format_bytes(num_bytes)}" for kind, num_bytes in asdict(peaks).items() if num_bytes is not None
    )
    at_most = "; no bound" if upper.device is None else f"; at most {format_bytes(upper.device)}"
    there_is = "" if estimate.limit_bytes is None else f" with {format_bytes(estimate.limit_bytes)}"
    return f"micro-batch {estimate.micro_batch:,} {verdict} on {estimate.on}{there_is}: predicted {kinds}{at_most}"


def _remarks_on_estimate(estimate: Estimate) -> Iterator[str]:
    """The moment, the phases, the owners, and what was assumed."""
    moment = estimate.peak_at
    if moment is not None:
        place = f" in {moment.module}" if moment.module not in ("", moment.phase) else ""
        yield f"the peak comes in {moment.phase}{place}, at {moment.operator}."
    if estimate.phases:
        yield ""
        yield from _picture(estimate)
    if estimate.largest:
        yield ""
        yield "largest owners at the peak:"
        yield from _indented(_owner_columns(estimate), left=2)
    if estimate.time is not None:
        yield ""
        yield from describe_time(estimate.time)
    if estimate.savings:
        yield ""
        yield "what each change would save:"
        yield from _indented(_saving_columns(estimate), left=1)
    if estimate.notes or estimate.context:
        yield ""
    yield from (f"note: {note}." for note in estimate.notes)
    if estimate.context:
        yield f"{estimate.context}."


def draw_estimate(estimate: Estimate) -> RenderableType:
    """Draw the parts alive at the peak, largest first, and what a further sample adds to each."""
    parts = sorted(((n, part) for part, n in estimate.parts.items() if n), reverse=True)
    growth = [estimate.grows_with_batch.get(part) or 0 for _, part in parts]
    peak = sum(n for n, _ in parts) or 1
    columns = [
        ("part", [part for _, part in parts]),
        ("at the\npeak", [format_bytes(n) for n, _ in parts]),
        ("share", [f"{n / peak:.0%}" for n, _ in parts]),
        ("per further\nsample", [f"+{format_bytes(n)}" if n > 0 else "fixed" for n in growth]),
    ]
    return draw_table(summarize_estimate(estimate), columns, _remarks_on_estimate(estimate), left=1)


def _picture(estimate: Estimate) -> Iterator[str]:
    highest = max(phase.peak_bytes for phase in estimate.phases) or 1
    for phase in estimate.phases:
        bar = "█" * round(_BAR_WIDTH * phase.peak_bytes / highest)
        yield f"  {phase.phase:<10} {bar:<{_BAR_WIDTH}} {format_bytes(phase.peak_bytes)}"


def _owner_columns(estimate: Estimate) -> Columns:
    owners = estimate.largest
    return [
        ("part", [owner.part for owner in owners]),
        ("module, operator", [_place(owner.module, owner.operator) for owner in owners]),
        ("tensors", [f"{owner.count:,}" for owner in owners]),
        ("bytes", [format_bytes(owner.num_bytes) for owner in owners]),
    ]


def _saving_columns(estimate: Estimate) -> Columns:
    savings = estimate.savings
    peak = estimate.peak
    return [
        ("change", [saving.change for saving in savings]),
        ("peak", [or_dash(format_bytes, saving.peak_bytes) for saving in savings]),
        ("saves", ["-" if s.peak_bytes is None else _saved(peak - s.peak_bytes) for s in savings]),
        ("", [saving.note for saving in savings]),
    ]


def _saved(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes >= 0 else f"costs {format_bytes(-num_bytes)}"


def _place(module: str, operator: str, width: int = 44) -> str:
    text = f"{module or '(no module)'}  {operator.removeprefix('aten.')}"
    return text if len(text) <= width else f"...{text[-(width - 3) :]}"


def _indented(columns: Columns, *, left: int) -> Iterator[str]:
    yield from (f"  {line}" for line in "\n".join(table_lines(columns, left=left)).split("\n"))


def summarize_cards(cards: EveryCard) -> str:
    """Say in one line how many cards take the step, and the smallest of them."""
    fitting = [row for row in cards.rows if row.fits]
    question = f"{cards.name}: micro-batch {cards.micro_batch:,}"
    if not fitting:
        return f"{question} fits on none of {counted(len(cards.rows), 'card')} (predicted)"
    return (
        f"{question} fits on {len(fitting)} of {counted(len(cards.rows), 'card')} (predicted); "
        f"the smallest is {fitting[0].card}"
    )


def draw_cards(cards: EveryCard) -> RenderableType:
    """Draw a row per card."""
    rows = cards.rows
    columns = [
        ("card", [row.card for row in rows]),
        ("memory", [format_bytes(row.total_bytes) for row in rows]),
        (f"takes at\nmicro-batch {cards.micro_batch:,}", [format_bytes(row.device_bytes) for row in rows]),
        ("fits", ["yes" if row.fits else "no" for row in rows]),
        ("largest\nmicro-batch", [or_dash("{:,}".format, row.max_micro_batch) for row in rows]),
        ("samples/s", [format_rate(row.samples_per_second) for row in rows]),
        ("", [_interval(row.time) for row in rows]),
    ]
    return draw_table(summarize_cards(cards), columns, (), left=1)


def _interval(time: object) -> str:
    """The interval of samples per second."""
    if not isinstance(time, StepTime):
        return ""
    return f"[{format_rate(time.samples / time.high)}, {format_rate(time.samples / time.low)}]"


def summarize_recommendation(recommendation: Recommendation) -> str:
    """Say what was asked, and the answer where there is one only."""
    question = (
        f"{recommendation.task}, {recommendation.tuning} tuning, {recommendation.seq_len:,} tokens, "
        f"{recommendation.precision}"
    )
    if recommendation.checkpointing:
        question += ", checkpointing"
    if len(recommendation.answers) > 1:
        return question
    answer = recommendation.answers[0]
    place = f"{answer.model} in {_memory(answer)}"
    if answer.fits:
        return f"{place}: micro-batch {answer.recommended_batch_size:,} ({question})"
    return f"{place}: nothing fits; micro-batch 1 needs {format_bytes(answer.needed_bytes)} ({question})"


def _remarks_on_recommendation(recommendation: Recommendation) -> Iterator[str]:
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
    """Draw the recommendation, a row per answer."""
    answers = recommendation.answers
    columns = [
        ("model", [answer.size for answer in answers]),
        ("memory", [_memory(answer) for answer in answers]),
        ("micro-\nbatch", [or_dash("{:,}".format, answer.recommended_batch_size) for answer in answers]),
        ("a sample\nadds", [format_bytes(answer.memory_per_sample) for answer in answers]),
        ("predicted\npeak", [_peak(answer) for answer in answers]),
        ("accum.\nfor 32", [or_dash("{:,}".format, answer.gradient_accumulation_for_32) for answer in answers]),
        ("accum.\nfor 64", [or_dash("{:,}".format, answer.gradient_accumulation_for_64) for answer in answers]),
    ]
    rules = [answer.rule_of_thumb for answer in answers]
    if any(rules):
        columns.append(("rule of\nthumb", [f"{rule.recommended_batch_size:,}" if rule else "-" for rule in rules]))
    remarks = _remarks_on_recommendation(recommendation)
    return draw_table(summarize_recommendation(recommendation), columns, remarks, left=1)


def _peak(answer: Answer) -> str:
    if answer.estimated_memory_usage is None:
        return f"({format_bytes(answer.needed_bytes)})"
    return format_bytes(answer.estimated_memory_usage)


def _memory(answer: Answer) -> str:
    amount = format_bytes(answer.memory_bytes)
    return amount if answer.on is None else f"{amount} ({answer.on})"
