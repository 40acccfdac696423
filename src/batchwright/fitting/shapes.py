"""The shapes to fit: every combination of the values asked for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from batchwright.errors import InvalidInputError
from batchwright.memory.estimate import check_shape
from batchwright.units import shortened

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchwright.fitting.work import Work


def every_shape(asked: Work, shapes: Mapping[str, int | Sequence[int]]) -> tuple[dict[str, Any], ...]:
    """Return the combinations, the last name varying fastest; one empty shape where nothing was asked for."""
    columns = []
    for name, values in shapes.items():
        listed = list(values) if isinstance(values, Sequence) and not isinstance(values, str) else [values]
        if not listed:
            raise InvalidInputError(f"shape {name} has no values.", remedy=f"{name}=[512, 1024]")
        if len(set(listed)) < len(listed):
            raise InvalidInputError(f"shape {name} names a value twice; received {shortened(listed)}.")
        columns.append([(name, value) for value in listed])
    table = tuple(dict(row) for row in itertools.product(*columns))
    if asked.workload is not None:
        for shape in table:
            check_shape(asked.workload, shape)
    return table
