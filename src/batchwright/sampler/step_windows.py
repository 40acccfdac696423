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
    """Cut rounds into steps of at most `limit` tokens, as even as they go; leave out the first `done` rounds.

    >>> window_sizes(np.array([10, 12, 9, 11, 10, 8]), 32)
    [3, 3]
    >>> window_sizes(np.array([10, 12, 9, 11, 10, 8]), 32, done=4)
    [2]
    """
    total = int(tokens.sum())
    if not total:
        return [1] * (len(tokens) - done)
    reached = np.cumsum(tokens)
    # As few steps as the limit allows; one more where an even cut does not keep to it.
    for number in range(max(int(np.ceil(total / limit)), 1), len(tokens) + 1):
        ends = np.searchsorted(reached, total * np.arange(1, number + 1) / number - 0.5, side="left") + 1
        ends = np.unique(np.minimum(ends, len(tokens)))
        sums = np.diff(np.concatenate(([0], reached[ends - 1])))
        if sums.max() <= limit:
            break
    else:
        ends = np.arange(1, len(tokens) + 1)
    starts = np.concatenate(([0], ends[:-1]))
    left = ends > done
    sizes: list[int] = (ends[left] - np.maximum(starts[left], done)).tolist()
    return sizes
