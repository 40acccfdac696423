"""The levers: for each problem, the settings that help and what else there is.

Promises:
- an option keeps the effective batch, or changes it on purpose, and then the learning rate follows or the
  option says why it stays;
- nothing is claimed about memory or speed that was not measured: these are the levers, not the gains.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from batchwright.planning.split import choose_split

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
    why: str


@dataclass(frozen=True)
class Case:
    """What the options are drawn up from."""

    before: Setting
    rule: LearningRateRule
    max_micro_batch: int | None
    critical_batch: int | None

    def reach(self, effective_batch: int, max_micro_batch: int) -> Setting:
        """Return the setting that plan would choose, with the learning rate as it is now."""
        split = choose_split(
            effective_batch, max_micro_batch=max_micro_batch, devices=self.before.devices, policy="nearest"
        )
        return replace(self.before, micro_batch=split.largest, accumulation=split.accumulation)

    def option(self, title: str, after: Setting, why: str, *, follow: bool = True) -> Option:
        """Make an option; unless `follow` is off, the learning rate follows the effective batch."""
        factor = self.rule.factor(self.before.effective_batch, after.effective_batch) if follow else 1.0
        rate = self.before.learning_rate
        return Option(title, replace(after, learning_rate=None if rate is None else rate * factor), factor, why)


def _when_out_of_memory(case: Case) -> Iterator[Option]:
    now = case.before
    sizes = [now.micro_batch // 2, now.micro_batch // 4, 1]
    if case.max_micro_batch is not None and case.max_micro_batch < now.micro_batch:
        sizes = [size for size in (case.max_micro_batch, *sizes) if size <= case.max_micro_batch]
    tried = {now.micro_batch}
    for size in sizes:
        if size < 1 or size in tried:
            continue
        tried.add(size)
        after = case.reach(now.effective_batch, size)
        yield case.option(
            f"micro-batch at most {size:,}",
            after,
            f"activations shrink to about {after.micro_batch / now.micro_batch:.0%}; "
            "weights, gradients and optimizer state stay",
        )


def _else_when_out_of_memory(case: Case) -> Iterator[str]:
    if case.before.micro_batch == 1:
        yield "a micro-batch of 1 cannot be split: only what follows is left"
    yield (
        "activation checkpointing: keeps few activations and computes the rest again, "
        "one more forward per step (Chen et al. 2016)"
    )
    yield "bf16 or fp16 autocast: halves most activations; weights and optimizer state stay as they are"
    yield "an 8-bit optimizer: Adam's state from 8 to about 2 bytes per parameter (Dettmers et al. 2021)"
    if case.before.devices > 1:
        yield f"shard optimizer state, gradients or weights over the {case.before.devices} devices (ZeRO 1, 2, 3; FSDP)"
    yield "shorter sequences, or batches by token budget where lengths differ"


def _when_unstable(case: Case) -> Iterator[Option]:
    now = case.before
    for factor in (2, 4):
        after = replace(now, accumulation=now.accumulation * factor)
        yield case.option(
            f"accumulate {factor} times as long",
            after,
            f"gradient noise falls by sqrt({factor}) at the same memory; the learning rate stays on purpose, "
            "since raising it would bring the noise back",
            follow=False,
        )
    halved = None if now.learning_rate is None else now.learning_rate / 2
    yield Option(
        "halve the learning rate",
        replace(now, learning_rate=halved),
        0.5,
        "smaller steps, same batch, same time per step: the first thing to try where the loss diverges",
    )


def _else_when_unstable(case: Case) -> Iterator[str]:
    critical = case.critical_batch
    if critical is not None and case.before.effective_batch >= critical:
        yield (
            f"the effective batch {case.before.effective_batch:,} is at or above the critical batch {critical:,}: "
            "gradient noise is hardly the cause, a larger batch hardly the cure"
        )
    yield "warm the learning rate up over the first few hundred steps"
    yield "clip the gradient norm (1.0 is usual), once per optimizer step, after unscaling"
    yield "bf16 in place of fp16: the same memory, and no overflow"
    yield "make sure that accumulation is right: a loss summed instead of averaged multiplies the gradient"


def _when_slow(case: Case) -> Iterator[Option]:
    now = case.before
    fits = case.max_micro_batch
    per_device = now.micro_batch * now.accumulation
    size = min(per_device, 2 * now.micro_batch if fits is None else fits)
    if size > now.micro_batch:
        condition = "if it fits" if fits is None else f"{fits:,} fit"
        yield case.option(
            "fewer, larger passes",
            case.reach(now.effective_batch, size),
            f"the same updates from fewer passes ({condition}); nothing else about training changes",
        )
    if case.critical_batch is not None and now.effective_batch >= case.critical_batch:
        return
    target = 2 * now.effective_batch
    if case.critical_batch is not None:
        target = min(target, case.critical_batch)
    yield case.option(
        "larger effective batch",
        case.reach(target, max(size, fits or 2 * now.micro_batch)),
        "fewer updates per epoch, each with a larger learning rate; pays only below the critical batch",
    )


def _else_when_slow(case: Case) -> Iterator[str]:
    critical = case.critical_batch
    if critical is not None and case.before.effective_batch >= critical:
        yield (
            f"the effective batch {case.before.effective_batch:,} is at or above the critical batch {critical:,}: "
            "a larger one would spend more samples for hardly fewer steps"
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
