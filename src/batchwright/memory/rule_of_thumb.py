"""A rule of thumb that people use for the batch of a language model, kept to stand beside a computed answer.

Promises:
- the numbers are the rule's own: gigabytes per sample by size, a factor by task, 80 % of the memory, a power of two;
- it knows nothing of the sequence length, the weights or the way of tuning, which is why it is only shown.
"""

from __future__ import annotations

from dataclasses import dataclass

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
