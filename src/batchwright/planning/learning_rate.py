"""How the learning rate follows the effective batch: the only place of such rules, each with its source and limits.

Below the critical batch two rules keep the training dynamics the same while gradient noise dominates: linear for SGD,
square root for Adam. Neither is a law. With a critical batch they level off beyond it, because more samples no longer
make a step better. If branches have tuned rates at several batches, the line through those goes before any rule.

Promises:
- every rule carries its source and, in words, what speaks against it;
- every factor of a measured critical batch carries its interval;
- an optimizer without a rule is answered with "no rule is known", never with a guess.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, linear_regression
from typing import Any

from batchwright.errors import InvalidInputError
from batchwright.planning.critical_batch import CriticalBatch, Range, checked_batch, over_interval
from batchwright.printed_result import PrintedLine
from batchwright.units import positive_number, shortened


@dataclass(frozen=True)
class LearningRateRule:
    """How the learning rate follows the effective batch for a family of optimizers."""

    name: str
    exponent: float
    source: str
    limits: str

    def factor(self, before: int, after: int) -> float:
        """What to multiply the learning rate by when the effective batch changes.

        >>> LINEAR.factor(80, 160), round(SQUARE_ROOT.factor(80, 160), 4)
        (2.0, 1.4142)
        """
        return math.pow(after / before, self.exponent)


LINEAR = LearningRateRule(
    name="linear",
    exponent=1.0,
    source="Goyal et al. 2017, arXiv:1706.02677",
    limits="needs warm-up; shown for SGD with momentum on ImageNet up to a batch of 8,192, worse beyond",
)
SQUARE_ROOT = LearningRateRule(
    name="square root",
    exponent=0.5,
    source="Malladi et al. 2022, arXiv:2205.10287",
    limits="derived for Adam and RMSprop where gradient noise dominates; for a factor k it also moves 1 - beta by k "
    "and epsilon by 1/sqrt(k), which matters for large k",
)

# Families by what their update does to the scale of the gradient. The two sources cover SGD with momentum, Adam
# and RMSprop; the others are put with the rule whose assumption they share, which neither source tested. Muon's updates
# have a size of their own, as Adam's and Lion's: on a task for constants (benchmarks/recommendation.py) its tuned rate
# grew with the power 0.5 to 0.8 of the batch. It was put here after judged pairs had shown that it needs a rule.
_RULES = {
    **dict.fromkeys(("sgd", "momentum", "nesterov"), LINEAR),
    **dict.fromkeys(("adam", "adamw", "rmsprop"), SQUARE_ROOT),
    **dict.fromkeys(("adafactor", "adagrad", "adamax", "lamb", "lion", "muon", "nadam", "radam"), SQUARE_ROOT),
}
OPTIMIZERS = tuple(sorted(_RULES))


def rule_for(optimizer: object) -> LearningRateRule:
    """Return the rule for an optimizer's name.

    >>> rule_for("AdamW").name
    'square root'
    """
    rule = _RULES.get(optimizer.lower()) if isinstance(optimizer, str) else None
    if rule is None:
        raise InvalidInputError(
            f"no learning-rate rule is known for optimizer {shortened(optimizer)}; known are {', '.join(OPTIMIZERS)}."
        )
    return rule


def checked_learning_rate(value: object) -> float:
    """Return `value` as a learning rate, or say why it is none.

    >>> checked_learning_rate("2e-5")
    2e-05
    """
    # Wide enough for any rate in use, narrow enough that scaling it cannot overflow.
    return positive_number(value, "learning rate must be a positive number, such as 2e-5", least=1e-30, most=1e30)


# A second moment of squared gradients with a decay of its own. Marek et al. changed it for Adam; the others share the
# moment, not the evidence. Lion's second beta is another thing (the decay of its momentum), so it is not here.
_WITH_BETA2 = ("adam", "adamw", "lamb", "nadam", "radam")

_GAIN = (
    "McCandlish et al. 2018, arXiv:1812.06162 (the same as the gain of AdaScale)",
    "holds if the learning rate was the best one before; derived for SGD on a quadratic, momentum and warm-up left out",
)
_ROOT_OF_GAIN = (
    "square root of the gain, as AdaptDL takes for Adam; below the critical batch the rule of Malladi et al. 2022, "
    "arXiv:2205.10287",
    "holds if the learning rate was the best one before; here it levels off beyond the critical batch, where Li et al. "
    "2024, arXiv:2405.14578, find that Adam's best one falls again",
)
_HALF_LIFE = (
    "the half-life of the second moment in samples stays the same: Marek et al. 2025, arXiv:2507.07101",
    "shown for Adam on language models towards small batches; for large ones beta2 gets small, and nobody showed it",
)
_TIMESCALE = (
    "B/(learning rate x weight decay x samples in all) stays the same: Bergsma et al. 2025, arXiv:2505.13738",
    "shown for AdamW on language models, for a run over the same samples; it rests on the learning rate above",
)
_SMITH = (
    "a schedule that is about to lower the learning rate can raise the batch by as much instead, and leave the rate as "
    "it is (Smith et al. 2018, arXiv:1711.00489; SGD, below the critical batch)"
)


@dataclass(frozen=True)
class SettingChange:
    """One setting of the optimizer: how it changes, from what to what, after whom, and what is doubtful."""

    name: str
    rule: str
    before: float | None
    after: Range | None
    """None if the value before was not given."""
    source: str
    doubt: str

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {**asdict(self), "after": self.after.to_dict() if self.after else None}

    def __str__(self) -> str:
        return f"{self.name} {self.rule}" + (f": {self.before:g} -> {self.after}" if self.after else "")


@dataclass(frozen=True)
class LearningRateChange(PrintedLine):
    """What to set when the batch changes; `factor` is None if no rule is known."""

    optimizer: str
    before: float
    after: float
    factor: Range | None
    """What to multiply the learning rate by."""
    settings: tuple[SettingChange, ...]
    reason: str
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "optimizer": self.optimizer,
            "before": self.before,
            "after": self.after,
            "factor": self.factor.to_dict() if self.factor else None,
            "settings": [setting.to_dict() for setting in self.settings],
            "reason": self.reason,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        return "; ".join(map(str, self.settings)) or self.reason


def gain(before: float, after: float, critical: float) -> float:
    """(1 + Bc/B0)/(1 + Bc/B1): how much more a step is worth; B1/B0 for Bc without end, 1 for none.

    >>> gain(100, 200, 300), gain(100, 200, 0.0), gain(100, 200, float("inf"))
    (1.6, 1.0, 2.0)
    """
    # Written so that an infinite Bc has a value: 1 - (1 - B0/B1) Bc/(Bc + B0) is the inverse of the gain.
    noise_share = 1.0 / (1.0 + before / critical) if critical else 0.0
    return 1.0 / (1.0 - noise_share * (1.0 - before / after))


def learning_rate_change(
    optimizer: str,
    before: float,
    after: float,
    critical: CriticalBatch,
    *,
    learning_rate: float | None = None,
    betas: Sequence[float] | None = None,
    weight_decay: float | None = None,
) -> LearningRateChange:
    """Say how the settings of an optimizer follow the batch, both batches in the unit of the critical one.

    >>> bc = CriticalBatch(300.0, 200.0, 500.0, "samples", 50, evidence="given")
    >>> print(learning_rate_change("sgd", 100, 200, bc, learning_rate=0.1))
    learning rate x 1.6 [1.5, 1.71]: 0.1 -> 0.16 [0.15, 0.171]
    >>> print(learning_rate_change("shampoo", 100, 200, bc))
    no rule is known for 'shampoo': keep the learning rate, or tune it anew
    """
    start, end = checked_batch(before, "batch before"), checked_batch(after, "batch after")
    rate = None if learning_rate is None else checked_learning_rate(learning_rate)
    beta2 = None if betas is None else _second_beta(betas)
    decay = None if weight_decay is None else _checked_decay(weight_decay)
    name = optimizer.lower() if isinstance(optimizer, str) else ""
    try:
        exponent = rule_for(optimizer).exponent
    except InvalidInputError:
        reason = f"no rule is known for {shortened(optimizer)}: keep the learning rate, or tune it anew"
        return LearningRateChange(str(optimizer), start, end, None, (), reason)

    growth = end / start
    factor = over_interval(critical.widened(), lambda bc: gain(start, end, bc) ** exponent)
    settings = [_multiplied("learning rate", factor, rate, *(_GAIN if exponent == 1 else _ROOT_OF_GAIN))]
    notes = [_SMITH] if exponent == 1 and growth > 1 else []
    if name in _WITH_BETA2:
        power = None if beta2 is None else Range(*[beta2**growth] * 3)
        settings.append(SettingChange("beta2", f"to the power {growth:.4g}", beta2, power, *_HALF_LIFE))
    if name == "adamw":
        settings.append(_multiplied("weight decay", factor.map(lambda f: growth / f), decay, *_TIMESCALE))
    elif decay:
        notes.append(f"weight decay stays at {decay:g}: the only rule known is for the decoupled one of AdamW")
    reason = f"the {'gain' if exponent == 1 else 'square root of the gain'} (1 + Bc/B0)/(1 + Bc/B1), Bc = {critical}"
    return LearningRateChange(name, start, end, factor, tuple(settings), reason, tuple(notes))


def _multiplied(name: str, factor: Range, before: float | None, source: str, doubt: str) -> SettingChange:
    after = None if before is None else factor.map(lambda f: f * before)
    return SettingChange(name, f"x {factor}", before, after, source, doubt)


def _second_beta(betas: object) -> float:
    try:
        _, beta2 = map(float, betas)  # type: ignore[call-overload]  # the call is the check
    except (TypeError, ValueError, OverflowError):
        beta2 = -1.0
    if not 0 <= beta2 < 1:
        raise InvalidInputError(
            f"betas must be two numbers from 0 to 1, such as (0.9, 0.95); received {shortened(betas)}."
        )
    return float(beta2)


def _checked_decay(value: object) -> float:
    return 0.0 if value == 0 and not isinstance(value, bool) else checked_batch(value, "weight decay")


# Rates are tried by factors of the root of 2, on a seed or two: what is best lies within about one such factor.
_ONE_FACTOR = math.sqrt(2)
# In three of four settings the rule was within this of the rate that a grid found best (benchmarks/recommendation.py).
_RULE_OFF_BY = 1.5
# The middle of a sweep of a fifth of the run and of the rule was off by e^0.45 on the tasks for constants: twice that.
_SWEEP_OFF_BY = 2.0


@dataclass(frozen=True)
class RecommendedRate:
    """The learning rate for a recommended batch, beside the workload's own."""

    source: str
    """`measured` if branches tuned it, `formula` if it follows a rule."""
    now: float
    at_batch: float | None
    """The effective batch that `now` belongs to; None if branches tuned the rate themselves."""
    factor: float
    recommended: float
    low: float
    high: float
    rule: str


def rate_from_branches(
    rate: float, factors: Mapping[int, float], batch: int, ruled: RecommendedRate | None = None
) -> RecommendedRate:
    """Return the rate for a batch from the factors of `rate` that branches found best, by their batch.

    Short trainings like higher rates than long ones, and the rule starts from a rate that was right for the long one:
    if there is a rule, it is the middle of both.

    >>> rate_from_branches(0.1, {16: 1.0, 64: 2.0}, 32).rule
    'tuned in short branches: 0.1 at batch 16, 0.2 at batch 64; on their line'
    """
    nearest = min(max(batch, min(factors)), max(factors))
    factor = _on_power_law(factors, nearest)
    tuned = ", ".join(f"{rate * best:.3g} at batch {size:,}" for size, best in factors.items())
    place = "on their line" if nearest == batch else f"batch {batch:,} is outside, and takes the end of their line"
    apart = _ONE_FACTOR
    if ruled is not None:
        place += f"; the rule says {ruled.recommended:.3g}, and this is the middle of both"
        apart = max(apart, math.sqrt(max(factor / ruled.factor, ruled.factor / factor)))
        factor = math.sqrt(factor * ruled.factor)
    return _tuned(rate, factor, apart, apart, f"tuned in short branches: {tuned}; {place}")


def rate_from_race(rate: float, factors: Mapping[int, float], batch: int) -> RecommendedRate:
    """Return the rate that was tuned for a batch in a race, or that on the line through those raced.

    >>> rate_from_race(0.1, {32: 1.0, 64: 2.0}, 64).rule
    'tuned by factors of the root of 2 in a race at batch 64'
    """
    factor, place = factors.get(batch), f"at batch {batch:,}"
    if factor is None:
        factor = _on_power_law(factors, min(max(batch, min(factors)), max(factors)))
        place = f"at batches {', '.join(f'{size:,}' for size in factors)}; on their line"
    return _tuned(rate, factor, _ONE_FACTOR, _ONE_FACTOR, f"tuned by factors of the root of 2 in a race {place}")


def rate_from_sweep(
    rate: float,
    factor: float,
    batch: int,
    open_sides: tuple[bool, bool],
    ruled: RecommendedRate | None = None,
    *,
    too_high: float = math.inf,
) -> RecommendedRate:
    """Return a rate by the best of a few that were tried at a batch, and by the rule if there is one.

    A side on which none was tried is left wider; from the factor `too_high` on the loss did not come down.

    >>> swept = rate_from_sweep(0.1, 2.0, 64, (False, True))
    >>> round(swept.low, 3), round(swept.recommended, 3), round(swept.high, 3)
    (0.1, 0.2, 0.566)
    """
    rule = f"tuned by factors of the root of 2 in short trainings at batch {batch:,}: {rate * factor:.3g}"
    if any(open_sides):
        rule += f", and no {'lower' if open_sides[0] else 'higher'} one was tried"
    lower, higher = (_SWEEP_OFF_BY * (_ONE_FACTOR if is_open else 1.0) for is_open in open_sides)
    if ruled is not None and math.sqrt(factor * ruled.factor) >= too_high:
        rule += f"; the rule says {ruled.recommended:.3g}, at which the loss does not come down"
    elif ruled is not None:
        rule += f"; the rule says {ruled.recommended:.3g}, and this is the middle of both"
        apart = math.sqrt(max(factor / ruled.factor, ruled.factor / factor))
        lower, higher = max(lower, apart), max(higher, apart)
        factor = math.sqrt(factor * ruled.factor)
    higher = min(higher, too_high / factor)
    return _tuned(rate, factor, lower, higher, rule)


def rate_by_rule(
    rate: float, optimizer: str, before: float, after: float, critical: CriticalBatch
) -> RecommendedRate | None:
    """Return the rate for a batch by the optimizer's rule, from a rate that suited the batch before; None without one.

    >>> ruled = rate_by_rule(0.1, "sgd", 100, 200, CriticalBatch(300.0, 200.0, 500.0, "samples", 50, evidence="given"))
    >>> round(ruled.low, 3), round(ruled.recommended, 3), round(ruled.high, 3)
    (0.1, 0.16, 0.257)
    """
    change = learning_rate_change(optimizer, before, after, critical, learning_rate=rate)
    if change.factor is None:
        return None
    rates = change.factor.map(lambda factor: rate * factor)
    return RecommendedRate(
        source="formula",
        now=rate,
        at_batch=before,
        factor=change.factor.value,
        recommended=rates.value,
        low=rates.low / _RULE_OFF_BY,
        high=rates.high * _RULE_OFF_BY,
        rule=change.reason,
    )


def _tuned(rate: float, factor: float, lower: float, higher: float, rule: str) -> RecommendedRate:
    recommended = rate * factor
    return RecommendedRate("measured", rate, None, factor, recommended, recommended / lower, recommended * higher, rule)


def _on_power_law(factors: Mapping[int, float], batch: float) -> float:
    """Return the factor at a batch on the power law through those tuned, between constant and proportional.

    Each was tuned on two seeds: all of them together tell more than the two beside the batch.

    >>> round(_on_power_law({16: 1.0, 64: 2.0}, 32), 3), round(_on_power_law({16: 2.0, 64: 1.0}, 64), 3)
    (1.414, 1.414)
    """
    sizes, logs = [math.log(size) for size in factors], [math.log(factor) for factor in factors.values()]
    slope = linear_regression(sizes, logs).slope if len(sizes) > 1 else 0.0
    return math.exp(fmean(logs) + min(max(slope, 0.0), 1.0) * (math.log(batch) - fmean(sizes)))
