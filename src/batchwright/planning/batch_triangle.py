"""The three numbers of a DeepSpeed config: train_batch_size = micro-batch x accumulation x devices.

DeepSpeed fills in what is missing by integer division and then asserts the product, which names neither the
remainder nor the remedy. Here each rule says both.

Promises:
- the verdict is DeepSpeed's own: what it accepts agrees, what its assertion refuses does not;
- every change offered makes the three agree.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchwright.planning.split import largest_divisor
from batchwright.units import counted

TOTAL = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
AUTO = "auto"

Number = int | str | None


@dataclass(frozen=True)
class Verdict:
    """Whether the three agree, what they come to, and what to change where they do not."""

    agrees: bool
    finding: str
    total: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    changes: tuple[str, ...] = ()


def judge_triangle(total: Number, micro_batch: Number, accumulation: Number, devices: int) -> Verdict:
    """Judge the three numbers; each may be missing (None) or left to the trainer ("auto").

    >>> judge_triangle(64, 4, 4, devices=8).finding
    'train_batch_size is 64, but 4 x 4 x 8 devices = 128'
    >>> judge_triangle(64, 4, 4, devices=8).changes[0]
    'train_batch_size: 64 -> 128'
    """
    if AUTO in (total, micro_batch, accumulation):
        return _judge_auto(total, micro_batch, accumulation, devices)
    assert not isinstance(total, str), "only 'auto' is text, and it was dealt with above"
    assert not isinstance(micro_batch, str)
    assert not isinstance(accumulation, str)
    if total is None and micro_batch is None:
        return Verdict(
            False,
            f"neither {TOTAL} nor {MICRO} is set, and DeepSpeed needs one of them",
            changes=(f"set {MICRO} to the largest micro-batch that fits",),
        )
    if total is None:
        assert micro_batch is not None
        steps = accumulation or 1
        return _agreement(micro_batch * steps * devices, micro_batch, steps, devices)
    if micro_batch is not None:
        return _judge_total_and_micro(total, micro_batch, accumulation, devices)
    return _judge_total_alone(total, accumulation, devices)


def _judge_auto(total: Number, micro_batch: Number, accumulation: Number, devices: int) -> Verdict:
    names = [n for n, v in ((TOTAL, total), (MICRO, micro_batch), (STEPS, accumulation)) if v == AUTO]
    finding = f"{', '.join(names)} left to the trainer ('auto')"
    # Whatever the trainer fills in, the total stays a multiple of the numbers that are there.
    multiple = devices * (_known(micro_batch) or 1) * (_known(accumulation) or 1)
    if isinstance(total, int) and total % multiple:
        return Verdict(
            False,
            f"{finding}, but {TOTAL} {total:,} is not a multiple of {multiple:,}, what the other numbers come to",
            changes=_divisible_totals(total, multiple),
        )
    if isinstance(micro_batch, int) and isinstance(accumulation, int):
        return Verdict(True, finding, micro_batch * accumulation * devices, micro_batch, accumulation)
    return Verdict(
        True, finding, total=_known(total), micro_batch=_known(micro_batch), accumulation=_known(accumulation)
    )


def _known(value: Number) -> int | None:
    return value if isinstance(value, int) else None


def _judge_total_and_micro(total: int, micro_batch: int, accumulation: int | None, devices: int) -> Verdict:
    if accumulation is not None:
        product = micro_batch * accumulation * devices
        if product == total:
            return _agreement(total, micro_batch, accumulation, devices)
        finding = (
            f"{TOTAL} is {total:,}, but {micro_batch:,} x {accumulation:,} x {counted(devices, 'device')} = {product:,}"
        )
        return Verdict(
            False,
            finding,
            changes=(
                f"{TOTAL}: {total:,} -> {product:,}",
                *_divided(STEPS, accumulation, total, micro_batch * devices),
                *_divided(MICRO, micro_batch, total, accumulation * devices),
                *_divided("devices", devices, total, micro_batch * accumulation),
                *([] if total % (micro_batch * devices) == 0 else _nearby_divisor(total, micro_batch, devices)),
            ),
        )
    multiple = micro_batch * devices
    steps, remainder = divmod(total, multiple)
    if steps and not remainder:
        return _agreement(total, micro_batch, steps, devices)
    finding = (
        f"{TOTAL} {total:,} is not a multiple of {MICRO} {micro_batch:,} x {counted(devices, 'device')} = {multiple:,}"
    )
    return Verdict(
        False,
        finding,
        changes=(
            *_divisible_totals(total, multiple),
            *_nearby_divisor(total, micro_batch, devices),
        ),
    )


def _judge_total_alone(total: int, accumulation: int | None, devices: int) -> Verdict:
    slots = (accumulation or 1) * devices
    micro_batch, remainder = divmod(total, slots)
    if micro_batch and not remainder:
        return _agreement(total, micro_batch, accumulation or 1, devices)
    by = f"{STEPS} {accumulation:,} x {counted(devices, 'device')}" if accumulation else counted(devices, "device")
    return Verdict(False, f"{TOTAL} {total:,} does not divide by {by}", changes=_divisible_totals(total, slots))


def _agreement(total: int, micro_batch: int, accumulation: int, devices: int) -> Verdict:
    finding = f"{micro_batch:,} x {accumulation:,} x {counted(devices, 'device')} = {total:,}"
    return Verdict(True, finding, total, micro_batch, accumulation)


def _divided(name: str, current: int, total: int, by: int) -> tuple[str, ...]:
    value, remainder = divmod(total, by)
    return (f"{name}: {current:,} -> {value:,}",) if value and not remainder else ()


def _divisible_totals(total: int, multiple: int) -> tuple[str, ...]:
    below = total // multiple * multiple
    return tuple(f"{TOTAL}: {total:,} -> {value:,}" for value in (below, below + multiple) if value)


def _nearby_divisor(total: int, micro_batch: int, devices: int) -> tuple[str, ...]:
    """Keep the total and find the largest smaller micro-batch that divides it."""
    per_device, remainder = divmod(total, devices)
    if remainder:
        return ()
    size = largest_divisor(per_device, at_most=micro_batch)
    return (f"{MICRO}: {micro_batch:,} -> {size:,} and {STEPS} -> {per_device // size:,}",) if size else ()
