"""`recommend`: a micro-batch for a model of which only the size or the name is known.

Promises:
- the answer is computed from a real shape, a stated length and a stated way of tuning, by the formulas of this folder;
- a fifth of the memory stays free, for what the formulas leave out; the micro-batch is a power of two;
- a common rule of thumb stands beside it, and is called that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from batchwright.catalogue.cards import context_of, find_card
from batchwright.catalogue.models import ModelShape, find_model
from batchwright.errors import InvalidInputError
from batchwright.memory.formula_tensors import Setup
from batchwright.memory.formulas import checked_length, step_moments
from batchwright.planning.search import largest_within
from batchwright.printed_result import PrintedResult
from batchwright.units import LARGEST_COUNT, format_bytes, one_of, parse_bytes

# A rule of thumb that people use. It knows nothing of the sequence length, the weights or the way of tuning, which is
# why it only stands beside a computed answer. The numbers are the rule's own: gigabytes per sample by size, a factor by
# task, 80 % of the memory, a power of two.

_GB_PER_SAMPLE = {"1b": 0.1, "3b": 0.2, "7b": 0.4, "13b": 0.8, "30b": 1.5, "70b": 3.0}
_TASK_FACTORS = {"classification": 1.0, "generation": 1.5, "qa": 1.2}


@dataclass(frozen=True)
class RuleOfThumb:
    """What the rule says, in the same words as the computed answer; bytes throughout."""

    recommended_batch_size: int
    memory_per_sample: int
    estimated_memory_usage: int
    gradient_accumulation_for_32: int
    gradient_accumulation_for_64: int


def apply_rule(size: str, memory_bytes: int, task: str) -> RuleOfThumb | None:
    """Apply the rule; None for a size that it has no number for.

    >>> apply_rule("13b", 24 * 10**9, "classification").recommended_batch_size
    16
    """
    if size not in _GB_PER_SAMPLE:
        return None
    per_sample = _GB_PER_SAMPLE[size] * _TASK_FACTORS[task]
    batch = max(1, int(memory_bytes / 1e9 * 0.8 / per_sample))
    batch = 2 ** (batch.bit_length() - 1)
    return RuleOfThumb(
        recommended_batch_size=batch,
        memory_per_sample=round(per_sample * 1e9),
        estimated_memory_usage=round(batch * per_sample * 1e9),
        gradient_accumulation_for_32=max(1, 32 // batch),
        gradient_accumulation_for_64=max(1, 64 // batch),
    )


# The shape that stands for a size.
SIZES = {
    "1b": "llama-3.2-1b",
    "3b": "llama-3.2-3b",
    "7b": "llama-2-7b",
    "13b": "llama-2-13b",
    "30b": "llama-30b",
    "70b": "llama-2-70b",
}
# What a task is in tensors. A head of two numbers a position is all that classification and question answering add.
TASKS = {
    "classification": "a small head, no vocabulary",
    "generation": "logits over the vocabulary at every position; a cache of keys and values when generating",
    "qa": "two logits at every position, no vocabulary",
}
USED_SHARE = 0.8


@dataclass(frozen=True)
class Answer:
    """The micro-batch for one model and one memory; None where not even one sample fits."""

    size: str
    model: str
    memory_bytes: int
    fits: bool
    recommended_batch_size: int | None
    memory_per_sample: int
    estimated_memory_usage: int | None
    gradient_accumulation_for_32: int | None
    gradient_accumulation_for_64: int | None
    needed_bytes: int
    remedy: str
    rule_of_thumb: RuleOfThumb | None
    on: str | None = None
    """The card whose memory it is, where one was named."""


@dataclass(frozen=True, repr=False)
class Recommendation(PrintedResult):
    """A micro-batch for each model and each memory that was asked about.

    >>> recommend("7b", "24GiB").answers[0].recommended_batch_size
    2
    """

    in_repr = ("task", "tuning", "seq_len", "precision", "fits")
    drawn_by = "memory_text.draw_recommendation"

    task: str
    tuning: str
    seq_len: int
    precision: str
    checkpointing: bool
    answers: tuple[Answer, ...]

    @property
    def fits(self) -> bool:
        """Whether anything fits anywhere."""
        return any(answer.fits for answer in self.answers)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, the same as `batchwright recommend --json` prints.

        A single answer has its keys at the top as well.
        """
        settings = {
            "task": self.task,
            "tuning": self.tuning,
            "seq_len": self.seq_len,
            "precision": self.precision,
            "checkpointing": self.checkpointing,
        }
        answers = [{**asdict(answer), **settings} for answer in self.answers]
        single = answers[0] if len(answers) == 1 else {}
        return {"schema": 1, "source": "formula", **settings, **single, "fits": self.fits, "answers": answers}


def recommend(
    sizes: str | Iterable[str],
    memory: str | int | Iterable[str | int] = (),
    *,
    on: str | Iterable[str] = (),
    task: str = "classification",
    tuning: str = "lora",
    seq_len: int = 512,
    precision: str = "bf16",
    checkpointing: bool = False,
) -> Recommendation:
    """Recommend a micro-batch for each size in each memory.

    >>> [a.recommended_batch_size for a in recommend(["7b", "13b"], ["24GB", "40GB"], tuning="qlora").answers]
    [4, 8, 2, 4]

    - `sizes`: 1b, 3b, 7b, 13b, 30b or 70b, or any name of the catalogue.
    - `memory`: bytes, or text such as "24GiB".
    - `on`: cards of the catalogue instead, such as "a100-40gb": what torch sees of their memory, less the context.
    - `task`: "classification", "generation" or "qa".
    - `tuning`, `seq_len`, `precision`, `checkpointing`: as in `bw.estimate_named`.
    """
    task = one_of("task", task, TASKS)
    setup = Setup.of(precision=precision, tuning=tuning, checkpointing=checkpointing)
    wanted = [sizes] if isinstance(sizes, str) else list(sizes)
    memories = [memory] if isinstance(memory, (str, int)) else list(memory)
    cards = [find_card(name) for name in ([on] if isinstance(on, str) else on)]
    if not wanted or not (memories or cards):
        raise InvalidInputError(
            "a recommendation needs at least one size, and one memory or card.",
            remedy='memory="24GiB" or on="a100-40gb"',
        )
    shapes = [(size, find_model(SIZES.get(size.lower(), size) if isinstance(size, str) else size)) for size in wanted]
    places: list[tuple[int, str | None]] = [(parse_bytes(amount), None) for amount in memories]
    places += [(card.total_bytes - context_of(card).typical_bytes, card.name) for card in cards]
    length = min(checked_length(shape, seq_len) for _, shape in shapes)
    return Recommendation(
        task,
        setup.tuning,
        length,
        setup.precision.name,
        setup.checkpointing,
        tuple(
            replace(_answer(size, shape, amount, setup, length, task), on=card)
            for size, shape in shapes
            for amount, card in places
        ),
    )


def needed_bytes(shape: ModelShape, setup: Setup, *, micro_batch: int, seq_len: int, task: str) -> int:
    """Return the peak of a step of this task, with the generation that goes with it."""
    return max(_totals(shape, setup, micro_batch, seq_len, task))


def _totals(shape: ModelShape, setup: Setup, samples: int, seq_len: int, task: str) -> list[int]:
    generates = task == "generation"
    moments = step_moments(shape, setup, micro_batch=samples, seq_len=seq_len, has_vocabulary=generates)
    totals = [moment.total for moment in moments]
    if generates:
        # Between two steps: keys and values of every layer, and fp32 logits of the last position.
        cache = 2 * shape.layers * shape.key_width * setup.precision.compute * seq_len
        held = moments[-1].parts["weights"] + moments[-1].parts["optimizer"]
        totals.append(held + samples * (cache + 4 * shape.vocab))
    return totals


def _answer(size: str, shape: ModelShape, memory: int, setup: Setup, seq_len: int, task: str) -> Answer:
    usable = int(memory * USED_SHARE)

    def needed(samples: int, chosen: Setup = setup) -> int:
        return needed_bytes(shape, chosen, micro_batch=samples, seq_len=seq_len, task=task)

    largest = largest_within(needed, usable, cap=LARGEST_COUNT)
    batch = None if largest is None else 2 ** (largest.bit_length() - 1)
    # Every moment grows evenly; a sample costs what the fastest of them grows by.
    one, two = (_totals(shape, setup, samples, seq_len, task) for samples in (1, 2))
    return Answer(
        size=size,
        model=shape.name,
        memory_bytes=memory,
        fits=batch is not None,
        recommended_batch_size=batch,
        memory_per_sample=max(after - before for before, after in zip(one, two, strict=True)),
        estimated_memory_usage=None if batch is None else needed(batch),
        gradient_accumulation_for_32=None if batch is None else max(1, -(-32 // batch)),
        gradient_accumulation_for_64=None if batch is None else max(1, -(-64 // batch)),
        needed_bytes=needed(1),
        remedy="" if batch is not None else _remedy(setup, needed),
        rule_of_thumb=apply_rule(size.lower(), memory, task),
    )


def _remedy(setup: Setup, needed: Callable[[int, Setup], int]) -> str:
    """Say what cheaper ways of tuning need for one sample."""
    ways = ((setup.tuning, True), ("lora", False), ("qlora", False), ("qlora", True))
    offers = []
    for tuning, checkpointing in dict.fromkeys(ways):
        cheaper = replace(setup, tuning=tuning, checkpointing=checkpointing)
        if needed(1, cheaper) < needed(1, setup):
            how = f'tuning="{tuning}"{" and checkpointing=True" if checkpointing else ""}'
            offers.append(f"{how} ({format_bytes(needed(1, cheaper))})")
    return " or ".join(offers) or "a smaller model or shorter samples"
