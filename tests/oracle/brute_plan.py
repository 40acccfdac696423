"""Planning by counting: slow, and right because there is nothing clever in it."""

from __future__ import annotations


def fewest_micro_batches(effective: int, cap: int, devices: int) -> int:
    accumulation = 1
    while accumulation * cap * devices < effective:
        accumulation += 1
    return accumulation


def best_micro_batch(effective: int, cap: int, devices: int, policy: str) -> tuple[int, int] | None:
    """The (micro-batch, accumulation) that a policy asks for; None where it has to be refused."""
    accumulation = fewest_micro_batches(effective, cap, devices)
    reached = {size: size * accumulation * devices for size in range(1, cap + 1)}
    if policy == "nearest":
        return max(reached, key=lambda size: (-abs(reached[size] - effective), size)), accumulation
    if policy == "at-least":
        return min(size for size in reached if reached[size] >= effective), accumulation
    within = [size for size in reached if reached[size] <= effective]
    if within:
        return max(within), accumulation
    return (1, accumulation - 1) if effective >= devices else None


def deal_out(effective: int, slots: int) -> list[int]:
    """Deal samples one at a time: the evenest sizes there are, largest first."""
    sizes = [0] * slots
    for sample in range(effective):
        sizes[sample % slots] += 1
    return sizes


def walk_epoch(samples: int, micro_steps: list[int], cap: int, devices: int, drop_last: bool) -> tuple[int, int]:
    """Count forwards and updates by walking over the samples.

    `micro_steps` are the samples that all devices together take in each pass of a full window.
    """
    forwards = updates = 0
    left = samples
    while left >= sum(micro_steps):
        left -= sum(micro_steps)
        forwards += len(micro_steps)
        updates += 1
    if drop_last:
        begun = 0
        for taken in micro_steps:
            if left < taken or left == 0:
                break
            left -= taken
            forwards += 1
            begun += taken
        return forwards, updates + (begun > 0)
    updates += left > 0
    while left > 0:
        left -= cap * devices
        forwards += 1
    return forwards, updates
