"""`advise`: what to change when training runs out of memory, is unstable, or is slow.

Promises:
- every option is a whole setting, before and after, with its effective batch and its learning rate;
- an option keeps the effective batch, or changes it deliberately, and then the learning rate follows or the option says
  why it stays;
- nothing is claimed about memory or speed that was not measured: these are the levers, not the gains;
- what is not known (the largest micro-batch that fits, the critical batch) is not made up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from batchwright.errors import InvalidInputError
from batchwright.planning.learning_rate import LearningRateRule, checked_learning_rate, rule_for
from batchwright.planning.split import choose_split, largest_divisor
from batchwright.printed_result import PrintedResult
from batchwright.units import one_of, whole_number


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


def _save_memory(case: Case) -> Iterator[Option]:
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


def _further_on_memory(case: Case) -> Iterator[str]:
    yield (
        "activation checkpointing: keeps few activations and computes the rest again, "
        "one more forward per step (Chen et al. 2016)"
    )
    yield "bf16 or fp16 autocast: halves most activations; weights and optimizer state stay as they are"
    yield "an 8-bit optimizer: Adam's state from 8 to about 2 bytes per parameter (Dettmers et al. 2022)"
    if case.before.devices > 1:
        yield f"shard optimizer state, gradients or weights over the {case.before.devices} devices (ZeRO 1, 2, 3; FSDP)"
    yield "shorter sequences, or batches by token budget if lengths differ"


def _calm_training(case: Case) -> Iterator[Option]:
    now = case.before
    for factor in () if case.is_noise_small else (2, 4):
        yield case.option(
            f"accumulate {factor} times as long",
            replace(now, accumulation=now.accumulation * factor),
            f"gradient noise falls by sqrt({factor}) at the same memory; the learning rate stays, "
            "since raising it would bring the noise back",
            follow=False,
        )
    yield Option(
        "halve the learning rate",
        replace(now, learning_rate=None if now.learning_rate is None else now.learning_rate / 2),
        learning_rate_factor=0.5,
        follows_rule=False,
        why="smaller steps, same batch, same time per step; if the loss diverges outright, this is the lever",
    )


def _further_on_stability(case: Case) -> Iterator[str]:
    if case.is_noise_small:
        yield (
            f"the effective batch {case.before.effective_batch:,} is at or above the critical batch "
            f"{case.critical_batch:,}: gradient noise is hardly the cause, a larger batch hardly the cure"
        )
    yield "warm the learning rate up over the first few hundred steps"
    yield "clip the gradient norm (1.0 is usual), once per optimizer step, after unscaling"
    yield "bf16 in place of fp16: the same memory, and no overflow"
    yield "make sure that accumulation is right: a loss summed instead of averaged multiplies the gradient"


def _speed_up(case: Case) -> Iterator[Option]:
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


def _further_on_speed(case: Case) -> Iterator[str]:
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
    "out-of-memory": (_save_memory, _further_on_memory),
    "unstable": (_calm_training, _further_on_stability),
    "slow": (_speed_up, _further_on_speed),
}


PROBLEMS = tuple(REMEDIES)
_ALSO_KNOWN_AS = {"oom": "out-of-memory", "out of memory": "out-of-memory", "out_of_memory": "out-of-memory"}


@dataclass(frozen=True, repr=False)
class Advice(PrintedResult):
    """What to change, best first, and what else helps.

    >>> advice = advise("out-of-memory", micro_batch=8)
    >>> [(option.after.micro_batch, option.after.accumulation) for option in advice.options]
    [(4, 2), (2, 4), (1, 8)]
    """

    in_repr = ("problem",)
    drawn_by = "plan_text.draw_advice"

    problem: str
    before: Setting
    options: tuple[Option, ...]
    further: tuple[str, ...]
    rule: LearningRateRule

    def to_dict(self) -> dict[str, Any]:
        """Return the advice as plain data, the same as `batchwright advise --json` prints."""
        return {
            "schema": 1,
            "source": "formula",
            "problem": self.problem,
            "before": self.before.to_dict(),
            "options": [
                {
                    "title": option.title,
                    "after": option.after.to_dict(),
                    "keeps_effective_batch": option.after.effective_batch == self.before.effective_batch,
                    "learning_rate_factor": option.learning_rate_factor,
                    "why": option.why,
                }
                for option in self.options
            ],
            "further": list(self.further),
            "learning_rate_rule": asdict(self.rule),
        }


def advise(
    problem: str,
    *,
    micro_batch: int,
    accumulation: int = 1,
    devices: int = 1,
    optimizer: str = "adamw",
    learning_rate: float | None = None,
    max_micro_batch: int | None = None,
    critical_batch: int | None = None,
) -> Advice:
    """Say what to change about the batch when something goes wrong.

    >>> advise("unstable", micro_batch=4, accumulation=4, devices=5).options[0].after
    Setting(micro_batch=4, accumulation=8, devices=5, learning_rate=None)

    - `problem`: "out-of-memory", "unstable" or "slow".
    - `micro_batch`, `accumulation`, `devices`, `optimizer`, `learning_rate`: the setting as it is now.
    - `max_micro_batch`: the largest that fits, if it is known.
    - `critical_batch`: the effective batch beyond which more samples stop paying, if it is known.
    """
    known_as = _ALSO_KNOWN_AS.get(problem.lower(), problem) if isinstance(problem, str) else problem
    name = one_of("problem", known_as, PROBLEMS)
    before = Setting(
        whole_number(micro_batch, "micro-batch"),
        whole_number(accumulation, "accumulation"),
        whole_number(devices, "devices"),
        None if learning_rate is None else checked_learning_rate(learning_rate),
    )
    # The product is what everything is computed from, so it has to be a usable count itself.
    whole_number(before.effective_batch, "effective batch (micro-batch x accumulation x devices)")
    case = Case(
        before,
        rule_for(optimizer),
        None if max_micro_batch is None else whole_number(max_micro_batch, "max micro-batch"),
        None if critical_batch is None else whole_number(critical_batch, "critical batch"),
    )
    _refuse_contradiction(name, case)
    options, further = REMEDIES[name]
    return Advice(name, before, tuple(options(case)), tuple(further(case)), case.rule)


def _refuse_contradiction(problem: str, case: Case) -> None:
    fits, now = case.max_micro_batch, case.before.micro_batch
    if problem == "out-of-memory" and fits is not None and fits >= now:
        raise InvalidInputError(
            f"max micro-batch {fits:,} says that micro-batch {now:,} fits, so it does not run out of memory.",
            remedy="leave out max micro-batch, or give the one that really fits",
        )
    if problem != "out-of-memory" and fits is not None and fits < now:
        raise InvalidInputError(
            f"micro-batch {now:,} is above the largest that fits, {fits:,}: it runs out of memory first.",
            remedy=f'bw.advise("out-of-memory", micro_batch={now}, max_micro_batch={fits})',
        )
