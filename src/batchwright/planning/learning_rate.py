"""The learning rate that goes with a changed effective batch: two rules, each with its source and its limits.

Neither is a law. Both say how to keep the training dynamics the same while gradient noise dominates; beyond
the critical batch no rule holds, because more samples no longer make a step better.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from batchwright.errors import InvalidInputError
from batchwright.units import shortened


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

    def to_dict(self) -> dict[str, Any]:
        """Return the rule as plain data."""
        return asdict(self)


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
# and RMSprop; the others are put with the rule whose assumption they share, which neither source tested.
_RULES = {
    **dict.fromkeys(("sgd", "momentum", "nesterov"), LINEAR),
    **dict.fromkeys(("adam", "adamw", "rmsprop"), SQUARE_ROOT),
    **dict.fromkeys(("adafactor", "adagrad", "adamax", "lamb", "lion", "nadam", "radam"), SQUARE_ROOT),
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
    try:
        rate = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]  # the call is the check
    except (TypeError, ValueError, OverflowError):
        rate = math.nan
    # Wide enough for any rate in use, narrow enough that scaling it cannot overflow.
    if not 1e-30 <= rate <= 1e30:
        raise InvalidInputError(f"learning rate must be a positive number, such as 2e-5; received {shortened(value)}.")
    return rate
