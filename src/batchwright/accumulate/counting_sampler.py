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
    def of(loader: Any) -> tuple[CountingSampler, Any]:
        """Find the sampler, and what to iterate: a bar around a loader is looked through, a counting one unwrapped.

        The sampler is the loader itself, the batch sampler of a DataLoader, or one that accelerate has wrapped.

        >>> CountingSampler.of([1, 2])[0].resumes()
        False
        """
        # tqdm and its like hold what they show the progress of as `iterable`.
        shown = getattr(loader, "iterable", loader)
        inner = getattr(shown, "batch_sampler", None)
        candidates: tuple[Any, ...] = (shown, inner, getattr(inner, "batch_sampler", None))
        for candidate in candidates:
            if hasattr(candidate, "count_received"):
                candidate.expect_counts()
                # One that counts by itself would count everything twice.
                return CountingSampler(candidate), getattr(shown, "loader", loader) if inner is candidate else loader
        return CountingSampler(), loader

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
