"""Read a loader a window ahead, on the host, so that weights are known before the first backward.

Promises:
- every micro-batch of the loader comes once, in order, and those before a resumed position not at all;
- what the loader raises is kept until the windows before it have stepped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from batchwright.accumulate.loss_terms import Totals, count_units
from batchwright.device.batches import clear_num_samples, cut, num_samples
from batchwright.errors import InvalidInputError
from batchwright.units import shortened, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


@dataclass
class CountingSampler:
    """The sampler of a loader, if it counts what the loop received, as `TokenBatchSampler` does, once per window."""

    sampler: Any = None
    _num_received: int = 0

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
                candidate.expect_counts(shown)
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
        if self.sampler is not None and number > self._num_received:
            self.sampler.count_received(number - self._num_received)
            self._num_received = number


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch and what it counts; one that only keeps step counts nothing."""

    batch: Any
    counts: Totals
    num_samples: int | None
    num_read: int = 1
    """Micro-batches of the loader that are used up with it: none for the further pieces of one that was cut."""

    def as_filler(self) -> MicroBatch:
        """Return the same micro-batch at weight zero."""
        return MicroBatch(self.batch, Totals(), self.num_samples)

    def cut_in(self, num_pieces: int, weight: Any) -> list[MicroBatch]:
        """Return it in as many pieces, of about as many samples each; whole where it has fewer samples.

        >>> import torch
        >>> [piece.counts.units for piece in counted_micro_batch(torch.ones(5, 2), None).cut_in(2, None)]
        [3.0, 2.0]
        """
        samples = self.num_samples or 0
        if (
            num_pieces < 2
            or samples < num_pieces
            or not (weight is None or callable(weight) or isinstance(weight, Mapping))
        ):
            return [self]
        sizes = [samples // num_pieces + (index < samples % num_pieces) for index in range(num_pieces)]
        parts = zip(cut(self.batch, sizes), sizes, strict=True)
        pieces = [counted_micro_batch(piece, weight, size) for piece, size in parts]
        return [replace(piece, num_read=int(index == 0)) for index, piece in enumerate(pieces)]


def counted_micro_batch(batch: Any, weight: Any, expected: int | None = None) -> MicroBatch:
    """Count a micro-batch: by the weight or the function given, else by its samples, of which `expected` may be known.

    >>> import torch
    >>> counted_micro_batch(torch.ones(3, 2), None).counts
    Totals(units=3.0, samples=3.0, window=1.0)
    """
    if weight is None:
        samples = num_samples(batch, expected)
        samples = expected if samples is None else samples
        if samples is None:
            raise InvalidInputError(
                f"nothing tells how many samples a batch has: {shortened(batch)}.",
                remedy="weight=lambda batch: ... counts it; weight=1 where all micro-batches count alike",
            )
        units, named = float(samples), dict[str, float]()
    else:
        samples = clear_num_samples(batch, expected)
        units, named = count_units(batch, weight)
    return MicroBatch(batch, Totals(units, float(samples or 0), 1.0, named), samples)


class ReadAhead:
    """A loader, read window by window."""

    def __init__(
        self,
        loader: Iterable[Any],
        weight: Any,
        *,
        skip: int = 0,
        is_counted: Callable[[int], bool] = lambda index: True,
    ) -> None:
        self._micro_batches = self._counted(loader, weight, skip, is_counted)
        self._weight = weight
        self._put_back: list[MicroBatch] = []
        self._last: MicroBatch | None = None
        self.error: Exception | None = None

    def read_window(self, size_of: Callable[[], int], pieces: Callable[[], int]) -> list[MicroBatch]:
        """Return the next window of as many micro-batches as `size_of` says; what it raises ends the epoch too.

        A window of one micro-batch is cut into as many pieces as `pieces` says.
        """
        if self.error is not None:
            return []
        try:
            size = size_of()
            if size == 0 and self.read(1):
                raise InvalidInputError(
                    "accumulation names fewer micro-batches than the loader has.",
                    remedy="one entry per window of the epoch",
                )
            window = self.read(size)
            return window[0].cut_in(pieces(), self._weight) if size == 1 and window else window
        except Exception as error:
            self.error = error
            return []

    def read(self, num_micro_batches: int) -> list[MicroBatch]:
        """Return the next so many, fewer or none at the end."""
        window = self._put_back[:num_micro_batches]
        del self._put_back[:num_micro_batches]
        while len(window) < num_micro_batches and self.error is None:
            try:
                micro_batch = next(self._micro_batches, None)
            except Exception as error:
                # Other ranks wait for this one's numbers, so they must come first.
                self.error = error
                break
            if micro_batch is None:
                break
            window.append(micro_batch)
            self._last = micro_batch
        return window

    def put_back(self, window: list[MicroBatch]) -> None:
        """Take a window back that was read but not begun."""
        self._put_back = [*window, *self._put_back]

    @property
    def can_fill(self) -> bool:
        """Whether there is any micro-batch to keep step with."""
        return self._last is not None

    def filled(self, window: list[MicroBatch], num_micro_batches: int) -> list[MicroBatch]:
        """Return the window with fillers before it, so that its last micro-batch is a real one where there is any."""
        missing = num_micro_batches - len(window)
        if missing == 0:
            return window
        filler = window[0] if window else self._last
        assert filler is not None, "a rank without any micro-batch was refused before"
        return [filler.as_filler()] * missing + window

    @staticmethod
    def _counted(
        loader: Iterable[Any], weight: Any, skip: int, is_counted: Callable[[int], bool]
    ) -> Iterator[MicroBatch]:
        for index, batch in enumerate(loader):
            if index >= skip:
                micro_batch = counted_micro_batch(batch, weight, _loaded(loader, index))
                yield micro_batch if is_counted(index) else replace(micro_batch, counts=Totals())


@dataclass
class SizedBatches:
    """Batches that were all made of as many samples, whatever their form."""

    batches: Iterable[Any]
    batch_size: int

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def _loaded(loader: Any, index: int) -> int | None:
    """Return how many samples a DataLoader put into its `index`-th batch, where it says so."""
    size = getattr(loader, "batch_size", None)
    if not isinstance(size, int):
        return None
    try:
        left = len(loader.sampler) - index * size
    except (AttributeError, TypeError):
        return size
    return min(size, left) if left > 0 else size


class WindowSizes:
    """How many micro-batches each window has: always as many, by a function of the step, or one by one.

    >>> sizes = WindowSizes(lambda step: 1 if step < 2 else 4)
    >>> sizes.of(0, 0), sizes.of(2, 0)
    (1, 4)
    """

    def __init__(self, accumulation: Any) -> None:
        self.given = accumulation
        self._sizes: list[int] | None = None
        if not callable(accumulation) and hasattr(accumulation, "__next__"):
            raise InvalidInputError(
                "accumulation is a number, a function of the step, or windows that can be read again in each epoch; "
                f"received {shortened(accumulation)}, which is used up once.",
                remedy="a list, or an object whose __iter__ begins anew",
            )
        if not callable(accumulation) and hasattr(accumulation, "__iter__"):
            self.begin_epoch()
        elif not callable(accumulation):
            whole_number(accumulation, "accumulation")

    def begin_epoch(self) -> None:
        """Ask a sampler for the windows of this epoch."""
        if not callable(self.given) and hasattr(self.given, "__iter__"):
            self._sizes = [whole_number(size, "accumulation") for size in self.given]
            if not self._sizes:
                raise InvalidInputError("accumulation names no window.", remedy="one entry per window of the epoch")

    @property
    def num_named(self) -> int | None:
        """Windows that are named one by one; None if their number is open."""
        return None if self._sizes is None else len(self._sizes)

    def of(self, step: int, window: int) -> int:
        """Return the size of the window after `step` steps, the `window`-th of this epoch; 0 past the last."""
        if callable(self.given):
            return whole_number(self.given(step), f"accumulation({step})")
        if self._sizes is None:
            return int(self.given)
        return self._sizes[window] if window < len(self._sizes) else 0
