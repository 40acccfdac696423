"""Splits of a batch as people write them: `2x4`, `3+3+2`, lists of sizes."""

from __future__ import annotations

import re
from typing import Any

from batchwright.errors import InvalidInputError
from batchwright.units import shortened


def read_splits(given: Any, micro_batch: int, accumulation: int) -> list[tuple[int, ...]]:
    """Return the splits that were asked for, by default the one that is trained with.

    >>> read_splits(None, 2, 4), read_splits("3+3+2,1x8", 2, 4)
    ([(2, 2, 2, 2)], [(3, 3, 2), (1, 1, 1, 1, 1, 1, 1, 1)])
    >>> read_splits([(1, 7), "4x2"], 2, 4)
    [(1, 7), (4, 4)]
    """
    if given is None:
        return [(micro_batch,) * accumulation]
    listed = given.split(",") if isinstance(given, str) else list(given)
    splits = [_read(one) for one in listed]
    if not splits:
        raise InvalidInputError("no split was named.", remedy="2x4, or 3+3+2")
    return splits


def _read(one: Any) -> tuple[int, ...]:
    if isinstance(one, str):
        if times := re.fullmatch(r"\s*([1-9]\d*)\s*x\s*([1-9]\d*)\s*", one):
            return (int(times[1]),) * int(times[2])
        if re.fullmatch(r"\s*[1-9]\d*(\s*\+\s*[1-9]\d*)*\s*", one):
            return tuple(int(size) for size in one.split("+"))
    elif isinstance(one, list | tuple) and one and all(isinstance(n, int) and n > 0 for n in one):
        return tuple(one)
    raise InvalidInputError(
        f"a split is MICRO_BATCHxACCUMULATION or sizes with + between; received {shortened(one)}.",
        remedy="2x4, or 3+3+2",
    )
