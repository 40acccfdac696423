"""What one pass over the data costs: forwards, updates, and the window that is left over at the end.

Promises:
- forwards are counted per device; ranks run the same number;
- with `drop_last` the incomplete micro-batch is dropped, and nothing else;
- an incomplete last window is run to its end and updates once, as Trainer, accelerate, Lightning and `Accumulator` do.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchwright.planning.split import Split


@dataclass(frozen=True)
class LastWindow:
    """The incomplete window at the end of an epoch."""

    samples: int
    micro_batches: int
    update: bool = True
    """Always; files of earlier runs may say otherwise."""


@dataclass(frozen=True)
class Epoch:
    """One pass over `samples`.

    >>> from batchwright.planning.split import Split
    >>> epoch = count_epoch(10_000, Split(samples=32, accumulation=2, devices=1), drop_last=True)
    >>> epoch.forwards, epoch.updates, epoch.last_window
    (625, 313, LastWindow(samples=16, micro_batches=1, update=True))
    """

    samples: int
    forwards: int
    updates: int
    dropped: int
    last_window: LastWindow | None


def count_epoch(samples: int, split: Split, *, drop_last: bool) -> Epoch:
    """Count the forwards per device and the updates of one epoch."""
    windows, rest = divmod(samples, split.samples)
    if drop_last:
        # The most micro-batches, whole on every device, that the rest fills: found by halving, not by stepping.
        whole = bisect_right(range(1, split.accumulation + 1), rest, key=split.samples_in_first) if rest else 0
        kept = split.samples_in_first(whole)
    else:
        kept, whole = rest, -(-rest // (split.largest * split.devices))
    if not kept:
        return Epoch(samples, windows * split.accumulation, windows, rest, None)
    forwards = windows * split.accumulation + whole
    return Epoch(samples, forwards, windows + 1, rest - kept, LastWindow(kept, whole))
