"""What `fit` was given: one request, read and checked once, and handed to everything that searches or probes.

Promises:
- settings that contradict each other are refused when the request is read, before anything is loaded or run;
- it is free of torch, so that the command can check before the seconds that importing torch takes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from batchwright.catalogue.cards import names_a_card
from batchwright.errors import InvalidInputError
from batchwright.units import shortened, whole_number

_EXAMPLE = 'scale="max_crops:2=1.0,4=0.8,else=0.5"'


@dataclass(frozen=True)
class ScaleTable:
    """A start value per shape: a factor of the limit by the value of one shape name, each valid up to its bound.

    `max_crops:2=1.0,4=0.8,else=0.5` means: up to 2 crops the limit itself, up to 4 crops 0.8 of it, above that half.
    """

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
                f"a scale table is written name:bound=factor,...,else=factor; received {shortened(text)}.",
                remedy=_EXAMPLE,
            )
        steps: list[tuple[Fraction, Fraction]] = []
        beyond: Fraction | None = None
        for entry in entries.split(","):
            bound, equals, factor = entry.partition("=")
            if not equals:
                raise InvalidInputError(
                    f"an entry of scale= is bound=factor; received {shortened(entry)}.", remedy=_EXAMPLE
                )
            value = _positive(factor, entry)
            if bound.strip() == "else":
                beyond = value
            else:
                steps.append((_positive(bound, entry), value))
        if [bound for bound, _ in steps] != sorted({bound for bound, _ in steps}):
            raise InvalidInputError(f"the bounds of scale= must rise; received {shortened(text)}.", remedy=_EXAMPLE)
        if beyond is None:
            raise InvalidInputError(
                "scale= needs an entry else=factor, for values above its last bound.", remedy=_EXAMPLE
            )
        return ScaleTable(name, tuple(steps), beyond)

    def start(self, base: int, shape: Mapping[str, Any]) -> int:
        """Return base x factor, rounded down, at least 1 and at most the base."""
        if self.name not in shape:
            raise InvalidInputError(
                f"scale= goes by {self.name}, but the shape has {', '.join(shape) or 'no names'}.",
                remedy=f'shapes={{"{self.name}": [2, 4, 6]}}',
            )
        value = Fraction(str(shape[self.name]))
        factor = next((factor for bound, factor in self.steps if value <= bound), self.beyond)
        # In fractions: 64 * 0.3 is 19.2, but 10 * 0.3 in binary is a little less than 3.
        return min(base, max(1, int(base * factor)))


def _positive(text: str, entry: str) -> Fraction:
    try:
        value = Fraction(text.strip())
    except (ValueError, ZeroDivisionError):
        raise InvalidInputError(f"scale= holds numbers; received {shortened(entry)}.", remedy=_EXAMPLE) from None
    if value <= 0:
        raise InvalidInputError(f"scale= holds positive numbers; received {shortened(entry)}.", remedy=_EXAMPLE)
    return value


_MAX_TRIALS, _MAX_TRIALS_FROM_A_START = 40, 5


@dataclass(frozen=True)
class FitRequest:
    """Which device and memory, which sizes and shapes, which step: as `fit` documents them."""

    on: str = "cpu"
    memory: str | int | None = None
    limit: int | None = None
    shapes: tuple[dict[str, Any], ...] = ({},)
    start: int | None = None
    scale: ScaleTable | None = None
    powers_of_two: bool = False
    max_trials: int = _MAX_TRIALS
    margin: float = 0.0
    evaluate: bool = False
    accumulation: int = 1
    clip_norm: float | None = None
    devices: int = 1
    allocator: str | None = None
    context: str | int | None = None
    isolate: bool | None = None
    cache: bool = True

    @staticmethod
    def read(
        *,
        shapes: Mapping[str, int | Sequence[int]] | None = None,
        scale: str | None = None,
        max_trials: int | None = None,
        **others: Any,
    ) -> FitRequest:
        """Check what a person asked for; `others` are fields as they are.

        >>> FitRequest.read(limit=4, start=9)
        Traceback (most recent call last):
        ...
        batchwright.errors.InvalidInputError: start 9 is above limit 4.
        """
        is_optional = {"limit": True, "start": True, "accumulation": False, "devices": False}
        for name in is_optional.keys() & others.keys():
            if others[name] is not None or not is_optional[name]:
                others[name] = whole_number(others[name], name)
        has_start = others.get("start") is not None or scale is not None
        default_trials = _MAX_TRIALS_FROM_A_START if has_start else _MAX_TRIALS
        request = FitRequest(
            shapes=combine_shapes(shapes or {}),
            scale=None if scale is None else ScaleTable.parse(scale),
            max_trials=default_trials if max_trials is None else whole_number(max_trials, "max trials"),
            **others,
        )
        if request.scale is not None:
            if request.limit is None:
                raise InvalidInputError("scale is a share of limit, and no limit was given.", remedy="limit=64")
            if request.start is not None or request.powers_of_two:
                raise InvalidInputError("scale computes the start, so start and powers of two are left out.")
            for shape in request.shapes:
                request.scale.start(request.limit, shape)
        if request.start is not None and request.limit is not None and request.start > request.limit:
            raise InvalidInputError(f"start {request.start:,} is above limit {request.limit:,}.")
        of_a_card = request.devices != 1 or not (request.allocator is request.context is None)
        if of_a_card and not request.is_on_card:
            raise InvalidInputError(
                "devices=, allocator= and context= are for a simulated card; ranks of this machine are torchrun's.",
                remedy='on="a100-40gb", or torchrun --nproc-per-node 2 -m batchwright fit',
            )
        return request

    @property
    def is_on_card(self) -> bool:
        """Whether the device is a simulated card."""
        return names_a_card(self.on)


def combine_shapes(shapes: Mapping[str, int | Sequence[int]]) -> tuple[dict[str, Any], ...]:
    """Return every combination of the values, the last name varying fastest; one empty shape for none.

    >>> combine_shapes({"max_crops": [2, 4], "seq_len": 512})
    ({'max_crops': 2, 'seq_len': 512}, {'max_crops': 4, 'seq_len': 512})
    """
    columns = []
    for name, values in shapes.items():
        listed = list(values) if isinstance(values, Sequence) and not isinstance(values, str) else [values]
        if not listed:
            raise InvalidInputError(f"shape {name} has no values.", remedy=f"{name}=[512, 1024]")
        if len(set(listed)) < len(listed):
            raise InvalidInputError(f"shape {name} names a value twice; received {shortened(listed)}.")
        columns.append([(name, value) for value in listed])
    return tuple(dict(row) for row in itertools.product(*columns))
