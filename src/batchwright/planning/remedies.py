"""The levers: for each problem, the settings that help and what else there is.

Promises:
- an option keeps the effective batch, or changes it on purpose, and then the learning rate follows or the
  option says why it stays;
- nothing is claimed about memory or speed that was not measured: these are the levers, not the gains.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from batchwright.planning.split import choose_split, largest_divisor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batchwright.planning.learning_rate import LearningRateRule


@dataclass(frozen=True)
class Setting:
    """The batch of a run: what is typed, and the learning rate that goes with it."""

    micro_batch: int
    accumulation: int
    devices: int
    learning_rate: float | None = None

    @property
    def effective_batch(self) -> int:
        """Samples per optimizer step."""
        return self.micro_batch * self.accumulation * self.devices

    def to_dict(self) -> dict[str, Any]:
        """Return the setting as plain data."""
        return {**asdict(self), "effective_batch": self.effective_batch}


@dataclass(frozen=True)
class Option:
    """One way out: the setting after it, and why it helps."""

    title: str
    after: Setting
    learning_rate_factor: float
    follows_rule: bool
    why: str


@dataclass(frozen=True)
class Case:
    """What the options are drawn up from."""

    before: Setting
    rule: LearningRateRule
    max_micro_batch: int | None
    critical_batch: int | None

    @property
    def is_noise_small(self) -> bool:
        """Whether the effective batch is known to be at or above the critical one."""
        return self.critical_batch is not None and self.before.effective_batch >= self.critical_batch

    def same_batch(self, max_micro_batch: int) -> Setting:
        """The largest passes within a cap that keep the effective batch to the sample."""
        per_device = self.before.micro_batch * self.before.accumulation
        size = largest_divisor(per_device, at_most=max_micro_batch) or 1
        return replace(self.before, micro_batch=size, accumulation=per_device // size)

    def option(self, title: str, after: Setting, why: str, *, follow: bool = True) -> Option:
        """Make an option; unless `follow` is off, the learning rate follows the effective batch."""
        factor = self.rule.factor(self.before.effective_batch, after.effective_batch) if follow else 1.0
        rate = self.before.learning_rate
        after = replace(after, learning_rate=None if rate is None else rate * factor)
        return Option(title, after, factor, follow and factor != 1.0, why)


def _when_out_of_memory(case: Case) -> Iterator[Option]:
    now = case.before
    caps = [now.micro_batch // 2, now.micro_batch // 4, 1]
    if case.max_micro_batch is not None:
        caps = [case.max_micro_batch, *(cap for cap in caps if cap < case.max_micro_batch)]
    seen = {now.micro_batch}
    for cap in caps:
        after = case.same_batch(max(cap, 1))
        if after.micro_batch in seen:
            continue
        seen.add(after.micro_batch)
        share = f"activations shrink to about {after.micro_batch / now.micro_batch:.0%}"
        yield case.option(
            f"micro-batch {after.micro_batch:,}", after, f"{share}; weights, gradients and optimizer state stay"
        )


def _else_when_out_of_memory(case: Case) -> Iterator[str]:
    yield (
        "activation checkpointing: keeps few activations and computes the rest again, "
        "one more forward per step (Chen et al. 2016)"
    )
    yield "bf16 or fp16 autocast: halves most activations; weights and optimizer state stay as they are"
    yield "an 8-bit optimizer: Adam's state from 8 to about 2 bytes per parameter (Dettmers et al. 2022)"
    if case.before.devices > 1:
        yield f"shard optimizer state, gradients or weights over the {case.before.devices} devices (ZeRO 1, 2, 3; FSDP)"
    yield "shorter sequences, or batches by token budget where lengths differ"


def _when_unstable(case: Case) -> Iterator[Option]:
    now = case.before
    for factor in () if case.is_noise_small else (2, 4):
        yield case.option(
            f"accumulate {factor} times as long",
            replace(now, accumulation=now.accumulation * factor),
            f"gradient noise falls by sqrt({factor}) at the same memory; the learning rate stays on purpose, "
            "since raising it would bring the noise back",
            follow=False,
        )
    yield Option(
        "halve the learning rate",
        replace(now, learning_rate=None if now.learning_rate is None else now.learning_rate / 2),
        learning_rate_factor=0.5,
        follows_rule=False,
        why="smaller steps, same batch, same time per step; where the loss diverges outright, this is the lever",
    )


def _else_when_unstable(case: Case) -> Iterator[str]:
    if case.is_noise_small:
        yield (
            f"the effective batch {case.before.effective_batch:,} is at or above the critical batch "
            f"{case.critical_batch:,}: gradient noise is hardly the cause, a larger batch hardly the cure"
        )
    yield "warm the learning rate up over the first few hundred steps"
    yield "clip the gradient norm (1.0 is usual), once per optimizer step, after unscaling"
    yield "bf16 in place of fp16: the same memory, and no overflow"
    yield "make sure that accumulation is right: a loss summed instead of averaged multiplies the gradient"


def _when_slow(case: Case) -> Iterator[Option]:
    now = case.before
    cap = case.max_micro_batch or 2 * now.micro_batch
    condition = f"{cap:,} fit" if case.max_micro_batch else f"if {cap:,} fit"
    fewer = case.same_batch(cap)
    if fewer.micro_batch > now.micro_batch:
        why = f"the same updates from fewer passes ({condition}); nothing else about training changes"
        yield case.option("fewer, larger passes", fewer, why)
    target = 2 * now.effective_batch
    if case.critical_batch is not None:
        target = min(target, case.critical_batch)
    if target < now.effective_batch + now.devices:
        return
    split = choose_split(target, max_micro_batch=cap, devices=now.devices, policy="at-most")
    larger = replace(now, micro_batch=split.largest, accumulation=split.accumulation)
    if larger.effective_batch > now.effective_batch:
        why = f"fewer updates per epoch, at a larger learning rate ({condition}); pays only below the critical batch"
        yield case.option("larger effective batch", larger, why)


def _else_when_slow(case: Case) -> Iterator[str]:
    if case.is_noise_small:
        yield (
            f"the effective batch {case.before.effective_batch:,} is at or above the critical batch "
            f"{case.critical_batch:,}: a larger one would spend more samples for hardly fewer steps"
        )
    fits = case.max_micro_batch
    if fits is not None and case.before.micro_batch >= fits and case.before.accumulation > 1:
        yield f"the micro-batch is already the largest that fits ({fits:,}): more devices shorten the window"
    yield "see whether the device waits for data: more loader workers, pinned memory"
    yield "bf16 autocast and torch.compile speed up a pass of the same size"


REMEDIES: dict[str, tuple[Callable[[Case], Iterator[Option]], Callable[[Case], Iterator[str]]]] = {
    "out-of-memory": (_when_out_of_memory, _else_when_out_of_memory),
    "unstable": (_when_unstable, _else_when_unstable),
    "slow": (_when_slow, _else_when_slow),
}
