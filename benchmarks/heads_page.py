"""docs/reference/heads.md, written from what benchmarks/audit_heads.py found."""

from __future__ import annotations

import re
import textwrap
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "heads.md"
FAMILIES = {
    "ForSequenceClassification": "sequence classification",
    "ForTokenClassification": "token classification",
    "ForMaskedLM": "masked LM",
    "ForConditionalGeneration": "conditional generation",
    "ForCausalLM": "causal LM",
    "ForQuestionAnswering": "question answering",
    "ForMultipleChoice": "multiple choice",
    "ForImageClassification": "image classification",
    "ForObjectDetection": "object detection",
    "ForSemanticSegmentation": "semantic segmentation",
    "ForPreTraining": "pre-training",
    "ForCTC": "CTC",
}
VERDICTS = {
    "uses": (
        "uses it",
        "The loss halves when the count doubles. Accumulation is exact where Trainer counts what the loss adds up.",
    ),
    "ignores": (
        "ignores it",
        "The loss stays as it is when the count doubles. Trainer divides by nothing, so the gradient and the logged "
        "loss of a window are multiplied by the accumulation count, and micro-batches count alike however many labels "
        "they have. `exact_loss(trainer)` repairs it. Not so for a loss that is a sum, as CTC by default: it adds up "
        "by itself, and `exact_loss` finds that out and leaves it alone.",
    ),
    "partly": (
        "in part",
        "A term of the loss ignores the count, nearly always the balance loss of a mixture of experts (asked with "
        "`output_router_logits=True`): its coefficient is in effect multiplied by accumulation and ranks. "
        "`exact_loss(trainer)` averages it.",
    ),
    "divided": (
        "Trainer divides",
        "Trainer gives no count and divides by the number of micro-batches: the forward takes no `**kwargs` or no "
        "`labels`, its labels are lists, or the class says `accepts_loss_kwargs = False`. The scale is right; it is "
        "the mean of means, exact where every micro-batch has as many labels.",
    ),
    "fails": ("fails", "The head runs without a count and raises when it is given one."),
    "not built": ("not asked", "No tiny config, inputs or labels were found that the class takes; by reason:"),
}


def family_of(head: str) -> str:
    """Return the kind of head.

    >>> family_of("BertForMaskedLM"), family_of("XForSomethingElse")
    ('masked LM', 'other')
    """
    found = re.search(r"For[A-Z].*", head)
    return FAMILIES.get(found.group() if found else "", "other")


def write_page(rows: dict[str, dict[str, Any]]) -> None:
    """Write the page from one row per class."""
    import torch
    import transformers

    counts = Counter(row["verdict"] for row in rows.values())
    table = Counter((family_of(head), row["verdict"]) for head, row in rows.items())
    asked = len(rows) - counts["not built"]
    lines = [
        "# Heads of transformers, and what they do with the item count",
        "",
        "<!-- Written by benchmarks/audit_heads.py; do not edit. -->",
        "",
        *wrapped(
            "Under accumulation Trainer counts the labels of the whole window and hands the number to the model as "
            "`num_items_in_batch`, trusting that the loss is divided by it. Many heads take it and drop it. Here every "
            f"`*For*` class of transformers {transformers.__version__} (torch {torch.__version__.partition('+')[0]}) "
            "was built from a tiny config and asked with one micro-batch and two counts: a loss that uses the count "
            "halves when it doubles. Ask your own: "
            "`batchwright.integrations.transformers.check_head(model, batch)`."
        ),
        "",
        *wrapped(
            f"Of {len(rows)} classes, {asked} have a verdict ({asked / len(rows):.0%}): {counts['ignores']} ignore the "
            f"count, {counts['partly']} ignore it in part, {counts['uses']} use it, for {counts['divided']} Trainer "
            f"divides itself"
            + (f", {counts['fails']} fail when given one" if counts["fails"] else "")
            + f". {counts['not built']} could not be asked. A class is asked at one size and with one form of labels; "
            "another path through its loss may do otherwise."
        ),
        "",
        f"| heads | {' | '.join(title for title, _ in VERDICTS.values())} |",
        f"|---|{'---|' * len(VERDICTS)}",
    ]
    for family in [*FAMILIES.values(), "other"]:
        lines.append(f"| {family} | {' | '.join(str(table[family, verdict] or '-') for verdict in VERDICTS)} |")
    lines.append(f"| **all** | {' | '.join(str(counts[verdict] or '-') for verdict in VERDICTS)} |")
    for verdict, (title, text) in VERDICTS.items():
        chosen = {head: row for head, row in rows.items() if row["verdict"] == verdict}
        if chosen:
            lines += ["", f"## {title[0].upper()}{title[1:]}", "", *wrapped(text), ""]
            lines += by_reason(chosen) if verdict in ("not built", "fails") else by_family(chosen)
    PAGE.write_text("\n".join(lines) + "\n")
    print(f"wrote {PAGE.name}: {dict(counts)}")


def by_family(rows: dict[str, dict[str, Any]]) -> list[str]:
    groups = defaultdict(list)
    for head in rows:
        family = family_of(head)
        groups[family].append(head if family == "other" else re.sub(r"For[A-Z].*", "", head))
    lines = []
    for family in [*FAMILIES.values(), "other"]:
        if groups[family]:
            lines += item(f"**{family}** ({len(groups[family])}): {', '.join(sorted(groups[family]))}")
    return lines


def by_reason(rows: dict[str, dict[str, Any]]) -> list[str]:
    groups = defaultdict(list)
    for head, row in rows.items():
        groups[kind_of_reason(row["reason"])].append(head)
    lines = []
    for reason, heads in sorted(groups.items(), key=lambda group: (-len(group[1]), group[0])):
        lines += item(f"{reason} ({len(heads)}): {', '.join(sorted(heads))}")
    return lines


def kind_of_reason(reason: str) -> str:
    if "rain" in reason and re.search("not (yet )?(implemented|supported|trainable)|does not support", reason):
        return "it cannot be trained"
    if "ImportError" in reason:
        return "a package is missing"
    if "MemoryError" in reason:
        return "its default config stays too large"
    if "too long" in reason or "out of time" in reason or "process ended" in reason:
        return "it took too long"
    if re.search("specify|missing|pass|None", reason):
        return "it wants inputs that were not guessed"
    return "the small config does not fit together, or no labels fitted"


def item(text: str) -> list[str]:
    return textwrap.wrap(f"- {text}", width=118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, width=118, break_long_words=False, break_on_hyphens=False)
