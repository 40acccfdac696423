"""`CriticalBatch`: the answer, never without its interval and its unit.

Promises:
- where the upper end is not resolved it is infinite, and the text says "at least";
- a value that rests on too few observations for an interval says so: from 0 to infinity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class CriticalBatch:
    """The noise scale T/|G|^2, with a 95 % interval: the batch at which noise and signal of a step are equal.

    >>> print(CriticalBatch(212.4, 168.2, 290.6, unit="samples", observations=120))
    212 [168, 291] samples
    >>> print(CriticalBatch(900.0, 168.2, math.inf, unit="samples", observations=120, steps_needed=340))
    at least 168 samples (upper end not resolved; about 340 more steps)
    """

    value: float
    """As it is now, at the last of the observations; infinite where no signal was seen."""
    low: float
    high: float
    """Infinite where it is not resolved."""
    unit: str
    observations: int
    """Optimizer steps that it rests on."""
    steps_needed: int | None = None
    """Further steps until the upper end is likely to be resolved; None where that cannot be told."""
    trace: float = math.nan
    """T, the trace of the covariance of one unit's gradient, as of now."""
    signal: float = math.nan
    """|G|^2, as of now; may be negative."""
    samples_per_unit: float | None = None
    """Samples in a unit, on average; None where nothing told."""

    @property
    def resolved(self) -> bool:
        """Whether there is an upper end."""
        return math.isfinite(self.high)

    def in_samples(self) -> CriticalBatch | None:
        """Return the same in samples; None where nothing told how many units a sample has.

        >>> tokens = CriticalBatch(6400.0, 3200.0, 9600.0, unit="tokens", observations=50, samples_per_unit=1 / 64)
        >>> print(tokens.in_samples())
        100 [50, 150] samples
        """
        if self.unit == "samples":
            return self
        share = self.samples_per_unit
        if not share:
            return None
        return replace(
            self,
            value=self.value * share,
            low=self.low * share,
            high=self.high * share,
            unit="samples",
            trace=self.trace * share,
            samples_per_unit=1.0,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data; what is infinite or unknown is None."""
        return {
            "value": _number(self.value),
            "low": _number(self.low),
            "high": _number(self.high),
            "resolved": self.resolved,
            "unit": self.unit,
            "observations": self.observations,
            "steps_needed": self.steps_needed,
            "trace": _number(self.trace),
            "signal": _number(self.signal),
            "samples_per_unit": self.samples_per_unit,
        }

    def __str__(self) -> str:
        if self.resolved:
            return f"{figure(self.value)} [{figure(self.low)}, {figure(self.high)}] {self.unit}"
        needed = "" if not self.steps_needed else f"; about {self.steps_needed:,} more steps"
        return f"at least {figure(self.low)} {self.unit} (upper end not resolved{needed})"

    def _repr_html_(self) -> str:
        from batchwright.report.display import text_to_html

        return text_to_html(str(self))


def figure(value: float) -> str:
    """Write a batch size as people read one: three digits, whole from 100 on.

    >>> figure(0.52), figure(17.3), figure(1234.5), figure(math.inf)
    ('0.52', '17.3', '1,234', 'infinite')
    """
    if math.isinf(value):
        return "infinite"
    return f"{value:,.0f}" if abs(value) >= 100 or value == 0 else f"{value:.3g}"


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
