"""`pack`: samples into rows of a fixed number of tokens, so that nothing is padded but the end of a row.

Best fit, longest first: each sample goes to the fullest row that still has room. Samples of one length are placed
together, and rows with as much room left are one group, so that the work goes with the number of different lengths and
rooms, not with the samples.

Promises:
- every sample is in exactly one row, and no row holds more than `max_tokens`;
- the rows are those of best fit, longest first, placed one by one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from batchwright.errors import InvalidInputError
from batchwright.printed_result import PrintedLine
from batchwright.sampler.cost import Numbers, read_lengths
from batchwright.units import counted, whole_number

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class Packing(PrintedLine):
    """Samples in rows; what an attention kernel needs to keep them apart is made row by row.

    >>> rows = pack([5, 3, 4, 2, 6], max_tokens=10)
    >>> [rows[index] for index in range(len(rows))], rows.waste
    ([[4, 2], [0, 1, 3]], 0.0)
    >>> rows.boundaries(1).tolist(), rows.position_ids(1).tolist()
    ([0, 5, 8, 10], [0, 1, 2, 3, 4, 0, 1, 2, 0, 1])
    """

    lengths: Numbers
    samples: Numbers
    """Row after row."""
    starts: Numbers
    """Where each row begins in `samples`; the last entry is where the last one ends."""
    max_tokens: int

    def __len__(self) -> int:
        """Count the rows."""
        return len(self.starts) - 1

    @overload
    def __getitem__(self, row: int) -> list[int]: ...

    @overload
    def __getitem__(self, row: slice) -> list[list[int]]: ...

    def __getitem__(self, row: int | slice) -> list[int] | list[list[int]]:
        """Return the samples of a row, or of each of several."""
        if isinstance(row, slice):
            return [self[index] for index in range(*row.indices(len(self)))]
        samples: list[int] = self._samples(row).tolist()
        return samples

    def __iter__(self) -> Iterator[list[int]]:
        return (self[row] for row in range(len(self)))

    def boundaries(self, row: int) -> npt.NDArray[np.int32] | Numbers:
        """Return where each sample of a row begins, and where the last ends: the cu_seqlens of attention kernels."""
        edges = np.concatenate(([0], np.cumsum(self.lengths[self._samples(row)])))
        return edges.astype(np.int32) if edges[-1] < 2**31 else edges

    def position_ids(self, row: int) -> Numbers:
        """Return the place of each token within its own sample."""
        edges = self.boundaries(row).astype(np.int64)
        return np.arange(edges[-1]) - np.repeat(edges[:-1], np.diff(edges))

    @property
    def waste(self) -> float:
        """The share of the rows that is left empty."""
        return 1 - float(self.lengths.sum()) / (len(self) * self.max_tokens) if len(self) else 0.0

    def __str__(self) -> str:
        rows, samples = counted(len(self), "row"), counted(len(self.lengths), "sample")
        return f"{samples} in {rows} of {self.max_tokens:,} tokens, {100 * self.waste:.1f} % left empty"

    def to_dict(self) -> dict[str, Any]:
        """Return the rows as plain data."""
        return {
            "schema": 1,
            "source": "formula",
            "max_tokens": self.max_tokens,
            "samples": len(self.samples),
            "tokens": int(self.lengths.sum()),
            "waste": self.waste,
            "rows": list(self),
        }

    def __repr__(self) -> str:
        return (
            f"Packing({counted(len(self.samples), 'sample')} in {counted(len(self), 'row')} of {self.max_tokens:,} "
            f"tokens, {self.waste:.2%} empty)"
        )

    def _samples(self, row: int) -> Numbers:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {counted(len(self), 'row')}")
        row %= len(self)
        return self.samples[self.starts[row] : self.starts[row + 1]]


def pack(lengths: Any, max_tokens: int) -> Packing:
    """Pack samples into as few rows of `max_tokens` as best fit finds."""
    room = whole_number(max_tokens, "max_tokens")
    table = read_lengths(lengths)
    if table.shape[1] != 1:
        raise InvalidInputError("samples of two lengths cannot be packed into rows of one.")
    sizes = table[:, 0]
    over = np.flatnonzero(sizes > room)
    if len(over):
        raise InvalidInputError(
            f"{counted(len(over), 'sample')} of {len(sizes):,} are longer than a row of {room:,} tokens: the first is "
            f"sample {over[0]:,} with {sizes[over[0]]:,}.",
            remedy="cut or drop them first, or longer rows",
        )
    row_of, num_rows = _best_fit(sizes, room)
    # Within a row the longest first, as they were placed.
    order = np.lexsort((-sizes, row_of))
    starts = np.searchsorted(row_of[order], np.arange(num_rows + 1))
    return Packing(sizes, order, starts, room)


def _best_fit(sizes: Numbers, room: int) -> tuple[Numbers, int]:
    """Return the row of each sample, and how many rows there are."""
    row_of = np.zeros(len(sizes), np.int64)
    by_length = np.argsort(-sizes, kind="stable")
    lengths, counts = np.unique(-sizes, return_counts=True)
    rows: dict[int, list[Numbers]] = {}
    rooms: list[int] = []  # the keys of rows, in order
    num_rows = at = 0
    for length, count in zip((-lengths).tolist(), counts.tolist(), strict=True):
        samples, done = by_length[at : at + count], 0
        at += count
        while done < count:
            tightest = bisect_left(rooms, length)
            if tightest < len(rooms):
                left = rooms.pop(tightest)
                group = np.concatenate(rows.pop(left))
            else:
                left = room
                group = num_rows + np.arange(-(-(count - done) // (room // length)))
                num_rows += len(group)
            # The fullest row with room stays the fullest as long as it takes more of this length.
            in_each = min(left // length, count - done)
            used = min(len(group), -(-(count - done) // in_each))
            placed = min(count - done, used * in_each)
            row_of[samples[done : done + placed]] = np.repeat(group[:used], in_each)[:placed]
            done += placed
            last = placed - (used - 1) * in_each
            for some, remaining in (
                (group[: used - 1], left - in_each * length),
                (group[used - 1 : used], left - last * length),
                (group[used:], left),
            ):
                if len(some) and remaining:
                    if remaining not in rows:
                        rows[remaining] = []
                        insort(rooms, remaining)
                    rows[remaining].append(some)
    return row_of, num_rows
