"""The largest size that fits, by looking at every one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def largest_size(fits: Callable[[int], bool], cap: int) -> int:
    size = 0
    while size < cap and fits(size + 1):
        size += 1
    return size
