"""The largest batch of an epoch: where samples differ in length or size, batches differ, and the largest decides.

Promises:
- batches are drawn as a shuffling loader draws them, without putting samples back, from a seed of their own: the same
  question has the same answer, and no random number of the user's is used up;
- the largest is that with most bytes after collating, padding included; sizes are kept, samples are not;
- the data itself is not changed; asked as a dataset it is the data.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from torch.utils.data import default_collate

from batchwright.device.batches import SamplesChosen, tensors_in
from batchwright.units import counted, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, eq=False)
class LargestBatches(SamplesChosen):
    """A dataset whose first batch is the largest of so many random ones.

    >>> import torch
    >>> data = [torch.zeros(n) for n in (3, 9, 4, 5)]
    >>> epoch = LargestBatches(data, torch.nn.utils.rnn.pad_sequence, num_batches=4)
    >>> [len(sample) for sample in epoch.choose(1)], len(epoch)
    ([9], 4)
    """

    data: Any
    collate: Callable[[list[Any]], Any] | None
    num_batches: int
    _chosen: dict[int, list[int]] = field(default_factory=dict, repr=False)
    _bytes: dict[int, list[int]] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]

    def choose(self, micro_batch: int) -> list[Any]:
        """Return the samples of the largest of the batches of a size."""
        if micro_batch not in self._chosen:
            draw = random.Random(0)
            order: list[int] = []
            sizes: list[tuple[int, list[int]]] = []
            for _ in range(self.num_batches):
                if len(order) < micro_batch:  # the next epoch
                    order = draw.sample(range(len(self.data)), len(self.data))
                batch, order = order[:micro_batch], order[micro_batch:]
                sizes.append((self._size(batch), batch))
            self._chosen[micro_batch] = max(sizes, key=lambda entry: entry[0])[1]
            self._bytes[micro_batch] = [size for size, _ in sizes]
        return [self.data[index] for index in self._chosen[micro_batch]]

    def tell(self, micro_batch: int) -> str:
        """Say how large the largest is beside the middle one."""
        sizes = self._bytes.get(micro_batch, [])
        if not sizes:
            return ""
        return (
            f"batch: the largest of {counted(len(sizes), 'random batch')}, {format_bytes(max(sizes))} "
            f"where the middle one has {format_bytes(round(median(sizes)))}"
        )

    def _size(self, indices: list[int]) -> int:
        samples = [self.data[index] for index in indices]
        batch = default_collate(samples) if self.collate is None else self.collate(samples)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(batch))
