"""What was asked of a search: its bounds, where it starts, and the shapes.

Promises:
- settings that contradict each other are refused when the question is read, before anything is loaded or run;
- it is free of torch, so that the command can ask before the seconds that importing torch takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchwright.errors import InvalidInputError
from batchwright.fitting.scale_table import ScaleTable
from batchwright.units import whole_number

if TYPE_CHECKING:
    from collections.abc import Iterable

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
