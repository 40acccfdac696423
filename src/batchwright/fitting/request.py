"""What was asked of a search: its bounds, where it starts, and the shapes.

Promises:
- settings that contradict each other are refused when the question is read, before anything is loaded or run;
- it is free of torch, so that the command can ask before the seconds that importing torch takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from batchwright.errors import InvalidInputError
from batchwright.units import shortened, whole_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


# A start value per shape: a base times a factor that depends on one quantity of the shape.
#
# The factors that automatic adjustment by crops uses are written
# `max_crops:2=1.0,4=0.8,6=0.6,8=0.5,10=0.4,12=0.3,else=0.25`: up to 2 crops the base itself, up to 4 crops 0.8 of it.

_FORM = "--scale max_crops:2=1.0,4=0.8,else=0.5"


@dataclass(frozen=True)
class ScaleTable:
    """Factors by the value of one shape name, each valid up to its bound."""

    name: str
    steps: tuple[tuple[Fraction, Fraction], ...]
    beyond: Fraction

    @staticmethod
    def parse(text: str) -> ScaleTable:
        """Read a table as it is typed.

        >>> table = ScaleTable.parse("max_crops:2=1.0,4=0.8,6=0.6,8=0.5,10=0.4,12=0.3,else=0.25")
        >>> [table.start(64, {"max_crops": crops}) for crops in (2, 4, 6, 8, 10, 12, 13)]
        [64, 51, 38, 32, 25, 19, 16]
        """
        name, colon, entries = text.partition(":")
        if not colon or not name.isidentifier():
            raise InvalidInputError(
                f"a scale table is written name:bound=factor,...,else=factor; received {shortened(text)}.", remedy=_FORM
            )
        steps: list[tuple[Fraction, Fraction]] = []
        beyond: Fraction | None = None
        for entry in entries.split(","):
            bound, equals, factor = entry.partition("=")
            if not equals:
                raise InvalidInputError(
                    f"an entry of --scale is bound=factor; received {shortened(entry)}.", remedy=_FORM
                )
            value = _positive(factor, entry)
            if bound.strip() == "else":
                beyond = value
            else:
                steps.append((_positive(bound, entry), value))
        if [bound for bound, _ in steps] != sorted({bound for bound, _ in steps}):
            raise InvalidInputError(f"the bounds of --scale must rise; received {shortened(text)}.", remedy=_FORM)
        if beyond is None:
            raise InvalidInputError(
                "--scale needs an entry else=factor, for values above its last bound.", remedy=_FORM
            )
        return ScaleTable(name, tuple(steps), beyond)

    def start(self, base: int, shape: Mapping[str, Any]) -> int:
        """Return base x factor, rounded down, at least 1 and at most the base."""
        if self.name not in shape:
            raise InvalidInputError(
                f"--scale goes by {self.name}, but the shape has {', '.join(shape) or 'no names'}.",
                remedy=f"--shape {self.name}=2,4,6",
            )
        value = Fraction(str(shape[self.name]))
        factor = next((factor for bound, factor in self.steps if value <= bound), self.beyond)
        # In fractions: 64 * 0.3 is 19.2, but 10 * 0.3 in binary is a little less than 3.
        return min(base, max(1, int(base * factor)))


def _positive(text: str, entry: str) -> Fraction:
    try:
        value = Fraction(text.strip())
    except (ValueError, ZeroDivisionError):
        raise InvalidInputError(f"--scale holds numbers; received {shortened(entry)}.", remedy=_FORM) from None
    if value <= 0:
        raise InvalidInputError(f"--scale holds positive numbers; received {shortened(entry)}.", remedy=_FORM)
    return value


_MAX_TRIALS, _MAX_TRIALS_FROM_A_START = 40, 5


@dataclass(frozen=True)
class Question:
    """The shapes, and how to search at each."""

    limit: int | None = None
    start: int | None = None
    scale: ScaleTable | None = None
    powers_of_two: bool = False
    max_trials: int | None = None
    shapes: tuple[dict[str, Any], ...] = ({},)

    @staticmethod
    def read(
        *,
        limit: int | None = None,
        start: int | None = None,
        scale: str | None = None,
        powers_of_two: bool = False,
        max_trials: int | None = None,
        shapes: Iterable[dict[str, Any]] = ({},),
    ) -> Question:
        """Check what a person asked for.

        >>> Question.read(limit=4, start=9)
        Traceback (most recent call last):
        ...
        batchwright.errors.InvalidInputError: start 9 is above limit 4.
        """
        question = Question(
            limit=None if limit is None else whole_number(limit, "limit"),
            start=None if start is None else whole_number(start, "start"),
            scale=None if scale is None else ScaleTable.parse(scale),
            powers_of_two=powers_of_two,
            max_trials=None if max_trials is None else whole_number(max_trials, "max trials"),
            shapes=tuple(shapes),
        )
        question._check()
        return question

    @property
    def trials(self) -> int:
        """How many probes a series may run."""
        if self.max_trials is not None:
            return self.max_trials
        return _MAX_TRIALS_FROM_A_START if self.start is not None or self.scale is not None else _MAX_TRIALS

    def _check(self) -> None:
        if self.scale is not None:
            if self.limit is None:
                raise InvalidInputError("scale is a share of limit, and no limit was given.", remedy="--limit 64")
            if self.start is not None or self.powers_of_two:
                raise InvalidInputError("scale computes the start, so start and powers of two are left out.")
            for shape in self.shapes:
                self.scale.start(self.limit, shape)
        if self.start is not None and self.limit is not None and self.start > self.limit:
            raise InvalidInputError(f"start {self.start:,} is above limit {self.limit:,}.")
