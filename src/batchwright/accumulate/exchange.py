"""The one exchange between ranks per window: what the finished one used, and what the next one will hold.

Promises:
- all ranks learn the same totals, and how many micro-batches the longest of them has;
- a loader that raises ends the epoch on every rank, after the windows before it have stepped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchwright.accumulate.loss_terms import REDUCTIONS, Reduction, Totals
from batchwright.errors import BatchwrightError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from batchwright.accumulate.open_window import OpenWindow
    from batchwright.accumulate.parallel import OneProcess
    from batchwright.accumulate.read_ahead import MicroBatch, ReadAhead
    from batchwright.accumulate.step import WeightedMean


@dataclass(frozen=True)
class Planned:
    """A window that was read ahead."""

    micro_batches: list[MicroBatch]
    totals: Totals
    """On all ranks."""
    longest: int
    """Micro-batches of the rank that has most."""


@dataclass(frozen=True)
class Used:
    """What a finished window used on all ranks; losses and square are not yet read in one process."""

    totals: Totals
    losses: dict[Reduction, WeightedMean | float]
    """The mean of each reduction that had any."""
    square: Any
    """The squared norm of the gradient; None where nobody asked."""
    watched: list[Sequence[Any]]
    """What the watcher of each rank told; in one process not yet read either."""


def exchange(
    spread: OneProcess,
    window: OpenWindow | None,
    square: torch.Tensor | None,
    reader: ReadAhead | None,
    size_of: Callable[[], int],
    pieces: Callable[[], int],
    watched: Sequence[Any] = (),
    names: Sequence[str] = (),
) -> tuple[Used, Planned | None]:
    """Tell the other ranks what `window` used, read the next one of `size_of()` micro-batches, and learn of both.

    `watched` are numbers of a watcher, as many on every rank; `pieces` says what a single micro-batch is cut into;
    `names` are those that the weight counts apart, the same on every rank.
    """
    ahead = [] if reader is None else reader.read_window(size_of, pieces)
    counts = sum((micro_batch.counts for micro_batch in ahead), Totals())
    has_failed = reader is not None and reader.error is not None
    used = Totals() if window is None else window.used
    losses = {} if window is None else window.losses
    if spread.size == 1:
        has_next = bool(ahead) and not has_failed
        return Used(used, dict(losses), square, [watched]), Planned(ahead, counts, len(ahead)) if has_next else None
    kinds = (*REDUCTIONS, *names)
    told = [
        *(counts.of(kind) for kind in kinds),
        float(len(ahead)),
        float(has_failed),
        *(used.of(kind) for kind in kinds),
        *(float(kind in losses) for kind in kinds),
        *(losses[kind].weighted_sum() if kind in losses else 0.0 for kind in kinds),
        0.0 if square is None else square,
        float(reader is None or reader.can_fill or bool(ahead)),
        *watched,
    ]
    rows = spread.gather(told)
    sums = [sum(column) for column in zip(*rows, strict=True)]
    # In the order of `told`.
    number = len(kinds)
    at_length, at_failed, at_used = number, number + 1, number + 2
    at_has, at_losses, at_square = at_used + number, at_used + 2 * number, at_used + 3 * number
    at_fill, at_watched = at_square + 1, at_square + 2
    longest = int(max(row[at_length] for row in rows))
    if sums[at_failed] and reader is not None:
        longest = 0
        reader.error = reader.error or BatchwrightError("the loader of another rank raised; see its traceback.")
    if longest and sums[at_fill] < spread.size and reader is not None:
        longest = 0
        empty = ", ".join(str(rank) for rank, row in enumerate(rows) if not row[at_fill])
        reader.error = InvalidInputError(
            f"the loader of rank {empty} is empty: it has no micro-batch to keep step with the other ranks.",
            remedy="a sampler that gives every rank at least one batch, such as DistributedSampler",
        )
    totals = _totals(sums[at_used:at_has], names)
    found = zip(kinds, sums[at_has:at_losses], sums[at_losses:at_square], strict=True)
    learnt = Used(
        totals=totals,
        losses={kind: loss / totals.of(kind) for kind, is_there, loss in found if is_there},
        # Where every rank holds whole gradients they are alike; shards add up.
        square=None if square is None else sums[at_square] if spread.gathers_in_forward else rows[0][at_square],
        watched=[row[at_watched:] for row in rows],
    )
    return learnt, Planned(ahead, _totals(sums[:number], names), longest) if longest else None


def _totals(sums: Sequence[float], names: Sequence[str]) -> Totals:
    units, samples, window, *named = sums
    return Totals(units, samples, window, dict(zip(names, named, strict=True)))
