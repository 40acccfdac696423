"""Which samples of a dataset are the longest: they decide whether a run survives its worst batch.

Promises:
- samples are only read, through the dataset's own `__getitem__`;
- a set too large to read whole within the time is read as far as that goes, and the result says how far.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable

_SECONDS = 20.0


@dataclass(frozen=True)
class LongestFirst:
    """Numbers of samples, longest first; None where all that were read are equally long, so that any will do."""

    order: tuple[int, ...] | None
    note: str


def longest_first(data: Any, *, most: int, say: Callable[[str], None], seconds: float = _SECONDS) -> LongestFirst:
    """Read the samples and order them by length; at most `most` numbers are returned.

    >>> longest_first([torch.zeros(3), torch.zeros(9), torch.zeros(5)], most=2, say=print).order
    (1, 2)
    """
    say(f"reading {len(data):,} samples for the longest") if len(data) > 1000 else None
    sizes: list[int] = []
    end = time.monotonic() + seconds
    for index in range(len(data)):
        sizes.append(length_of(data[index]))
        if time.monotonic() > end:
            break
    read = "" if len(sizes) == len(data) else f" of the first {len(sizes):,} of {len(data):,} samples"
    if len(set(sizes)) <= 1:
        return LongestFirst(None, f"all samples read are equally long{read and ','}{read}" if read else "")
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    # Those that were not read come last, so that sizes beyond what was read can still be tried.
    order += range(len(sizes), len(data))
    return LongestFirst(tuple(order[:most]), f"the longest samples{read} were probed")


def length_of(sample: Any) -> int:
    """Count the numbers in a sample: elements of tensors and arrays, entries of lists, characters of texts.

    >>> length_of({"ids": torch.zeros(4, 2), "text": "abc", "label": 1})
    12
    """
    if isinstance(sample, Mapping):
        sample = dict(sample)
    return sum(_count(leaf) for leaf in tree_leaves(sample))


def _count(leaf: Any) -> int:
    if isinstance(leaf, torch.Tensor):
        return leaf.numel()
    size = getattr(leaf, "size", None)
    if isinstance(size, int):
        return size  # a numpy array
    if isinstance(size, tuple):
        return int(torch.Size(size).numel())  # an image
    return len(leaf) if isinstance(leaf, str | bytes) else 1
