"""Optimizer steps of about as many tokens each, from rounds that vary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt


class StepWindows:
    """The sizes of an epoch's windows, read anew whenever somebody iterates."""

    def __init__(self, sizes: Callable[[], list[int]]) -> None:
        self._sizes = sizes

    def __iter__(self) -> Iterator[int]:
        return iter(self._sizes())

    def __len__(self) -> int:
        return len(self._sizes())


def window_sizes(tokens: npt.NDArray[np.int64], limit: float, *, done: int = 0) -> list[int]:
    """Cut rounds into as few steps of at most `limit` tokens as there can be, as even as they go.

    The first `done` rounds are left out. A round that is over the limit by itself is a step of its own.

    >>> window_sizes(np.array([10, 12, 9, 11, 10, 8]), 32)
    [3, 3]
    >>> window_sizes(np.array([10, 12, 9, 11, 10, 8]), 32, done=4)
    [2]
    """
    # As the limit is a float, so are these: mixed, every search would convert all of them.
    reached = np.cumsum(tokens).astype(np.float64)
    number = len(_ends(reached, limit))
    # The least bound that takes no more steps makes the largest of them as small as can be.
    low, high = float(reached[-1]) / max(number, 1) if number else 0.0, float(limit)
    while high - low > 1e-3 * limit:
        middle = (low + high) / 2
        low, high = (low, middle) if len(_ends(reached, middle)) == number else (middle, high)
    ends = np.array(_ends(reached, high), np.int64)
    starts = np.concatenate(([0], ends[:-1]))
    left = ends > done
    sizes: list[int] = (ends[left] - np.maximum(starts[left], done)).tolist()
    return sizes


def _ends(reached: npt.NDArray[np.float64], limit: float) -> list[int]:
    """Fill step after step up to the limit, and return where each ends."""
    ends: list[int] = []
    at, before = 0, 0.0
    while at < len(reached):
        at = max(int(np.searchsorted(reached, before + limit, side="right")), at + 1)
        before = float(reached[at - 1])
        ends.append(at)
    return ends
