"""The comparison table: every sensible split of the same effective batch, side by side.

The first row is the plan itself; the others are what `plan` answers when only a half, a quarter, ... of its
micro-batch fits, down to single samples. Where the plan misses the target or is uneven, the largest split into equal
micro-batches that reaches it exactly is there too.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from batchwright.planning.epoch import count_epoch
from batchwright.planning.split import Split, choose_split, largest_divisor
from batchwright.units import whole_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batchwright.planning.split import Policy
    from batchwright.planning.times import TimeModel

# Halving reaches single samples from 2,048 in as many rows; a longer table is not read any more.
MOST_ROWS = 12


@dataclass(frozen=True)
class Row:
    """One split, with what it costs next to the first row."""

    micro_batch: int
    smallest_micro_batch: int
    accumulation: int
    effective_batch: int
    forwards_per_epoch: int | None
    updates_per_epoch: int | None
    relative_time: float
    relative_activations: float
    peak_bytes: int | None
    is_extrapolated: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data."""
        return asdict(self)


def compare_splits(
    effective_batch: int,
    *,
    chosen: Split,
    policy: Policy,
    samples: int | None,
    drop_last: bool,
    times: TimeModel,
    peak_bytes: Callable[[int], int] | None = None,
) -> tuple[Row, ...]:
    """Lay the chosen split and its smaller micro-batches side by side.

    >>> from batchwright.planning.split import Split
    >>> from batchwright.planning.times import ASSUMED
    >>> rows = compare_splits(
    ...     32, chosen=Split(32, 1, 1), policy="nearest", samples=10_000, drop_last=True, times=ASSUMED
    ... )
    >>> [(row.micro_batch, row.accumulation, row.forwards_per_epoch) for row in rows[:4]]
    [(32, 1, 312), (16, 2, 625), (8, 4, 1250), (4, 8, 2500)]
    """
    seconds_per_sample = times.step_seconds(chosen) / chosen.samples
    rows = []
    for split in _smaller_and_smaller(effective_batch, chosen, policy):
        epoch = count_epoch(samples, split, drop_last=drop_last) if samples else None
        rows.append(
            Row(
                micro_batch=split.largest,
                smallest_micro_batch=split.smallest,
                accumulation=split.accumulation,
                effective_batch=split.samples,
                forwards_per_epoch=epoch.forwards if epoch else None,
                updates_per_epoch=epoch.updates if epoch else None,
                relative_time=times.step_seconds(split) / split.samples / seconds_per_sample,
                relative_activations=split.largest / chosen.largest,
                peak_bytes=whole_number(peak_bytes(split.largest), "what estimate returns") if peak_bytes else None,
                is_extrapolated=bool(times.points) and not times.covers(split.largest),
            )
        )
    return tuple(rows)


def _smaller_and_smaller(effective_batch: int, chosen: Split, policy: Policy) -> Iterator[Split]:
    splits = {chosen}
    cap = chosen.largest // 2
    while cap >= 1 and len(splits) < MOST_ROWS:
        splits.add(choose_split(effective_batch, max_micro_batch=cap, devices=chosen.devices, policy=policy))
        cap //= 2
    per_device, remainder = divmod(effective_batch, chosen.devices)
    equal = None if remainder else largest_divisor(per_device, at_most=chosen.largest)
    if equal:
        splits.add(Split(effective_batch, per_device // equal, chosen.devices))
    yield from sorted(splits, key=lambda split: (split != chosen, -split.largest, split.accumulation))
