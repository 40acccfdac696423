"""What one pass over the data costs: forwards, updates, and the window that is left over at the end.

Promises:
- forwards are counted per device; ranks run the same number;
- with `drop_last` the incomplete micro-batch is dropped; the whole micro-batches of an incomplete last window
  are still run and counted, but they end in no update (what a plain accumulation loop does);
- without it, the incomplete last window is run to its end and updates once.
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
    update: bool


@dataclass(frozen=True)
class Epoch:
    """One pass over `samples`.

    >>> from batchwright.planning.split import Split
    >>> epoch = count_epoch(10_000, Split(samples=32, accumulation=2, devices=1), drop_last=True)
    >>> epoch.forwards, epoch.updates, epoch.last_window
    (625, 312, LastWindow(samples=16, micro_batches=1, update=False))
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
        last = LastWindow(kept, whole, update=False) if kept else None
        return Epoch(samples, windows * split.accumulation + (whole if kept else 0), windows, rest - kept, last)
    if not rest:
        return Epoch(samples, windows * split.accumulation, windows, 0, None)
    num_micro_batches = -(-rest // (split.largest * split.devices))
    last = LastWindow(rest, num_micro_batches, update=True)
    return Epoch(samples, windows * split.accumulation + num_micro_batches, windows + 1, 0, last)
