"""The learning rate that goes with a change of the batch, now that the critical batch is known.

Below the critical batch these are the rules of `planning.learning_rate` (linear for SGD, square root for Adam); beyond
it they level off, as more samples no longer make a step better.

Promises:
- every rule carries its source and, in words, what speaks against it;
- every factor carries the interval of the critical batch;
- an optimizer without a rule is answered with "no rule is known", never with a guess.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from batchwright.errors import InvalidInputError
from batchwright.planning.critical_batch import Range, checked_batch, over_interval
from batchwright.planning.learning_rate import checked_learning_rate, rule_for
from batchwright.units import shortened

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchwright.planning.critical_batch import CriticalBatch


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
class Setting:
    """One setting of the optimizer: how it changes, from what to what, after whom, and what is doubtful."""

    name: str
    rule: str
    before: float | None
    after: Range | None
    """None where the value before was not given."""
    source: str
    doubt: str

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {**asdict(self), "after": self.after.to_dict() if self.after else None}

    def __str__(self) -> str:
        return f"{self.name} {self.rule}" + (f": {self.before:g} -> {self.after}" if self.after else "")


@dataclass(frozen=True)
class LearningRateChange:
    """What to set when the batch changes; `factor` is None where no rule is known."""

    optimizer: str
    before: float
    after: float
    factor: Range | None
    """What to multiply the learning rate by."""
    settings: tuple[Setting, ...]
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

    def _repr_html_(self) -> str:
        from batchwright.report.display import text_to_html

        return text_to_html(str(self))


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

    >>> from batchwright.planning.critical_batch import CriticalBatch
    >>> bc = CriticalBatch(300.0, 200.0, 500.0, "samples", 50)
    >>> print(learning_rate_change("sgd", 100, 200, bc, learning_rate=0.1))
    learning rate x 1.6 [1.5, 1.71]: 0.1 -> 0.16 [0.15, 0.171]
    >>> print(learning_rate_change("muon", 100, 200, bc))
    no rule is known for 'muon': keep the learning rate, or tune it anew
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
    factor = over_interval(critical, lambda bc: gain(start, end, bc) ** exponent)
    settings = [_multiplied("learning rate", factor, rate, *(_GAIN if exponent == 1 else _ROOT_OF_GAIN))]
    notes = [_SMITH] if exponent == 1 and growth > 1 else []
    if name in _WITH_BETA2:
        power = None if beta2 is None else Range(*[beta2**growth] * 3)
        settings.append(Setting("beta2", f"to the power {growth:.4g}", beta2, power, *_HALF_LIFE))
    if name == "adamw":
        settings.append(_multiplied("weight decay", factor.map(lambda f: growth / f), decay, *_TIMESCALE))
    elif decay:
        notes.append(f"weight decay stays at {decay:g}: the only rule known is for the decoupled one of AdamW")
    reason = f"the {'gain' if exponent == 1 else 'square root of the gain'} (1 + Bc/B0)/(1 + Bc/B1), Bc = {critical}"
    return LearningRateChange(name, start, end, factor, tuple(settings), reason, tuple(notes))


def _multiplied(name: str, factor: Range, before: float | None, source: str, doubt: str) -> Setting:
    after = None if before is None else factor.map(lambda f: f * before)
    return Setting(name, f"x {factor}", before, after, source, doubt)


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
