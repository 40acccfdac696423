"""A loader whose sampler counts what the loop received, such as `TokenBatchSampler`: told once per window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class CountingSampler:
    """The sampler of a loader, where it has one that counts; nothing happens where it has not."""

    sampler: Any = None
    _told: int = 0

    @staticmethod
    def of(loader: Any) -> CountingSampler:
        """Find the sampler: the loader itself, the batch sampler of a DataLoader, or one that accelerate has wrapped.

        >>> CountingSampler.of([1, 2]).resumes()
        False
        """
        inner = getattr(loader, "batch_sampler", None)
        candidates: tuple[Any, ...] = (loader, inner, getattr(inner, "batch_sampler", None))
        for candidate in candidates:
            if hasattr(candidate, "count_received"):
                candidate.expect_counts()
                return CountingSampler(candidate)
        return CountingSampler()

    def resumes(self) -> bool:
        """Whether the sampler itself goes on where a state stood; asked once for each pass."""
        if self.sampler is None or not self.sampler.is_resumed:
            return False
        self.sampler.is_resumed = False
        return True

    def is_counted(self, index: int) -> bool:
        """Whether the `index`-th batch of this iteration counts, or only keeps a rank in step."""
        return self.sampler is None or bool(self.sampler.counts(index))

    def received(self, number: int) -> None:
        """Tell the sampler how many batches of this iteration are done with."""
        if self.sampler is not None and number > self._told:
            self.sampler.count_received(number - self._told)
            self._told = number
