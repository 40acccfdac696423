"""The `batch_sampler` that runs a plan on one rank, whatever its sizes.

Promises:
- every sample of the dataset once per epoch over all ranks (with `drop_last`, all but an incomplete micro-batch);
- the same order for the same (seed, epoch) on every rank, so the ranks never share a sample;
- every rank yields the same number of batches; an empty micro-batch repeats one sample at weight 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from batchwright.errors import InvalidInputError
from batchwright.planning.epoch import count_epoch
from batchwright.planning.split import Split
from batchwright.units import whole_number

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass
class PlanBatchSampler:
    """Yields lists of sample numbers; hand it to `DataLoader(dataset, batch_sampler=...)`.

    >>> sampler = PlanBatchSampler(Split(samples=4, accumulation=2, devices=1), rank=0, samples=6, shuffle=False)
    >>> list(zip(sampler, sampler.weights()))
    [([0, 1], 0.5), ([2, 3], 0.5), ([4, 5], 1.0)]
    """

    split: Split
    rank: int
    samples: int
    drop_last: bool = False
    seed: int = 0
    shuffle: bool = True
    epoch: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.rank >= self.split.devices:
            raise InvalidInputError(
                f"rank {self.rank} does not exist in a plan for {self.split.devices} devices; "
                f"ranks run from 0 to {self.split.devices - 1}."
            )

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order is yielded next, as torch's own distributed sampler does."""
        self.epoch = whole_number(epoch, "epoch", least=0)

    def windows(self) -> Iterator[Split]:
        """Yield the split of each optimizer step in the epoch; only the last one may differ."""
        epoch = count_epoch(self.samples, self.split, drop_last=self.drop_last)
        last = epoch.last_window
        for _ in range(epoch.updates - (last is not None)):
            yield self.split
        if last is not None:
            yield Split(last.samples, last.micro_batches, self.split.devices)

    def weights(self) -> Iterator[float]:
        """Yield the weight of each batch, in step with it: its share of the samples of its optimizer step.

        The weights of one step sum to one over all ranks. Where ranks average gradients (DDP), multiply by the
        number of ranks.
        """
        for window in self.windows():
            for size in window.micro_batches(self.rank):
                yield size / window.samples

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        start = 0
        for window in self.windows():
            at = start + window.rank_offset(self.rank)
            for size in window.micro_batches(self.rank):
                # A loader cannot collate an empty batch, and a rank that sits a pass out would hang the others.
                yield [int(i) for i in order[at : at + size]] or [int(order[start])]
                at += size
            start += window.samples

    def __len__(self) -> int:
        return count_epoch(self.samples, self.split, drop_last=self.drop_last).forwards

    def _order(self) -> Sequence[int]:
        if not self.shuffle:
            return range(self.samples)
        # Imported here: planning itself needs no numpy, only running the plan does.
        import numpy as np

        return cast("Sequence[int]", np.random.default_rng([self.seed, self.epoch]).permutation(self.samples))
