"""Micro-batches: what a loss is a mean over, what each of them counts, and reading a loader a window ahead.

Promises:
- a loss that cannot be used is refused before anything is changed: not a scalar, no gradient, not a number;
- a term is scaled by its share of the whole window on all ranks, whatever the split;
- every micro-batch of the loader comes once, in order, and those before a resumed position not at all;
- weights are known before the first backward, counted on the host;
- what the loader raises is kept until the windows before it have stepped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from batchwright.device.batches import clear_num_samples, cut, num_samples
from batchwright.errors import InvalidInputError
from batchwright.units import shortened, whole_number

Reduction = str
REDUCTIONS: tuple[Reduction, ...] = ("units", "samples", "window")


@dataclass(frozen=True)
class LossTerm:
    """One term of a loss and what it is the mean over.

    `over="units"`: the units that the weight of a micro-batch counts, such as tokens. `"samples"`: the samples of the
    micro-batch. `"window"`: each micro-batch counts alike, so that the term's share does not grow with accumulation or
    ranks. A penalty on the weights is exact under it; a term that is not additive over micro-batches, such as the
    balance loss of a mixture of experts, is their mean, which is not quite that of the big batch. Terms with masks of
    their own are over a name: `micro_batches(loader, weight={"masked": count_masked, "next": count_next})`.

    >>> LossTerm(torch.tensor(2.0, requires_grad=True), over="samples").over
    'samples'
    """

    value: torch.Tensor
    over: Reduction = "units"

    def __post_init__(self) -> None:
        if not isinstance(self.over, str):
            raise InvalidInputError(f"a loss term is over {', '.join(REDUCTIONS)}; received {shortened(self.over)}.")


@dataclass(frozen=True, slots=True)
class Totals:
    """How much of each kind there is: in a micro-batch, in a window, on all ranks."""

    units: float = 0.0
    samples: float = 0.0
    window: float = 0.0
    named: Mapping[str, float] = field(default_factory=dict, repr=False)
    """Of each name that a weight counts by itself; `units` is then their sum."""

    def __add__(self, other: Totals) -> Totals:
        named = {name: self.named.get(name, 0.0) + other.named.get(name, 0.0) for name in {**self.named, **other.named}}
        return Totals(self.units + other.units, self.samples + other.samples, self.window + other.window, named)

    def times(self, factor: float) -> Totals:
        """Return so many times as much."""
        named = {name: amount * factor for name, amount in self.named.items()}
        return Totals(self.units * factor, self.samples * factor, self.window * factor, named)

    def pack(self, names: Sequence[str]) -> list[float]:
        """Return the totals as numbers, those of `names` last.

        >>> Totals(2.0, 1.0, 1.0, {"words": 2.0}).pack(["words"])
        [2.0, 1.0, 1.0, 2.0]
        """
        return [self.of(kind) for kind in (*REDUCTIONS, *names)]

    @staticmethod
    def unpack(numbers: Sequence[float], names: Sequence[str]) -> Totals:
        """Read back what `pack` wrote, or the sum of several."""
        units, samples, window, *named = numbers
        return Totals(units, samples, window, dict(zip(names, named, strict=True)))

    def of(self, reduction: Reduction) -> float:
        """Return the total that a reduction divides by."""
        if reduction in REDUCTIONS:
            return float(getattr(self, reduction))
        return self.named.get(reduction, 0.0)


def read_terms(loss: Any, counts: Totals, *, must_be_finite: bool) -> list[LossTerm]:
    """Return the terms of what `backward` was given, checked; one that counts nothing need not be a number.

    >>> [term.over for term in read_terms(torch.tensor(1.0, requires_grad=True), Totals(1.0), must_be_finite=True)]
    ['units']
    """
    if isinstance(loss, torch.Tensor):  # a tensor of one dimension would pass for a list
        loss = [LossTerm(loss)]
    terms = list(loss) if isinstance(loss, Sequence) else [loss]
    terms = [term if isinstance(term, LossTerm) else LossTerm(term) for term in terms]
    if not terms:
        raise InvalidInputError("backward was given no loss: an empty list of terms.")
    for term in terms:
        _check_name(term, counts)
        _check(term.value, must_be_finite=must_be_finite and counts.of(term.over) > 0)
    return terms


def _check_name(term: LossTerm, counts: Totals) -> None:
    if counts.named and term.over == "units":
        raise InvalidInputError(
            f"the weight counts {', '.join(counts.named)} apart, and a loss term does not say over which it is a mean.",
            remedy=f'bw.LossTerm(value, over="{next(iter(counts.named))}")',
        )
    if term.over not in REDUCTIONS and counts.window and term.over not in counts.named:
        known = ", ".join((*REDUCTIONS, *counts.named))
        raise InvalidInputError(
            f"a loss term is over {known}; received {shortened(term.over)}.",
            remedy='micro_batches(loader, weight={"name": lambda batch: ...}) counts what a term is a mean over',
        )


def count_units(batch: Any, weight: Any) -> tuple[float, dict[str, float]]:
    """Return what a weight counts of a batch, in all and by name; it is a number, a function, or several by name.

    >>> count_units("ab", {"letters": len, "words": 1})
    (3.0, {'letters': 2.0, 'words': 1.0})
    """
    if not isinstance(weight, Mapping):
        return check_weight(weight(batch) if callable(weight) else weight), {}
    taken = [name for name in weight if not isinstance(name, str) or name in REDUCTIONS]
    if taken or not weight:
        raise InvalidInputError(
            f"a weight by name has names other than {', '.join(REDUCTIONS)}; received {shortened(list(weight))}."
        )
    named = {name: count_units(batch, count)[0] for name, count in weight.items()}
    return sum(named.values()), named


def _check(value: Any, *, must_be_finite: bool) -> None:
    if not isinstance(value, torch.Tensor):
        raise InvalidInputError(f"backward takes a loss, a scalar tensor; received {shortened(value)}.")
    if value.numel() != 1:
        raise InvalidInputError(
            f"backward takes a scalar loss; received a tensor of shape {tuple(value.shape)}.",
            remedy="loss.mean() for a mean over its entries",
        )
    if not value.requires_grad:
        raise InvalidInputError(
            "the loss has no gradient: nothing that requires one went into it.",
            remedy="was it computed under torch.no_grad(), detached, or are all weights frozen?",
        )
    # Elsewhere than on the CPU a look at the value would make the host wait for the device.
    if must_be_finite and value.device.type == "cpu" and not math.isfinite(value.item()):
        raise InvalidInputError(
            f"the loss is {value.item()}; gradients were left as they were.",
            remedy="accumulator.skip() leaves this micro-batch out, backward(loss, weight=0) where ranks keep step",
        )


def check_weight(weight: Any) -> float:
    """Return a weight as a number.

    >>> check_weight(torch.tensor(3)), check_weight(0.5)
    (3.0, 0.5)
    """
    try:
        number = float(weight)
    except (TypeError, ValueError):
        raise InvalidInputError(f"a weight is a number; received {shortened(weight)}.") from None
    if not math.isfinite(number) or number < 0:
        raise InvalidInputError(
            f"a weight must be 0 or more, the units that the loss is a mean over; received {number}."
        )
    return number


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
        """Whether the sampler itself resumes from a loaded state; asked once for each pass."""
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
        self.last: MicroBatch | None = None
        """The one to keep step with where other ranks have more."""
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
            self.last = micro_batch
        return window

    def put_back(self, window: list[MicroBatch]) -> None:
        """Take a window back that was read but not begun."""
        self._put_back = [*window, *self._put_back]

    def filled(self, window: list[MicroBatch], num_micro_batches: int) -> list[MicroBatch]:
        """Return the window with fillers before it, so that its last micro-batch is a real one where there is any."""
        missing = num_micro_batches - len(window)
        if missing == 0:
            return window
        filler = window[0] if window else self.last
        assert filler is not None, "a rank without any micro-batch was refused before"
        return [MicroBatch(filler.batch, Totals(), filler.num_samples)] * missing + window

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

    def of(self, step: int, window: int, *, begins_anew: bool = False) -> int:
        """Return the size of the window after `step` steps, the `window`-th of this epoch.

        Past the last one that is named it is 0, or with `begins_anew` that of the first.
        """
        if callable(self.given):
            return whole_number(self.given(step), f"accumulation({step})")
        if self._sizes is None:
            return int(self.given)
        if begins_anew:
            window %= len(self._sizes)
        return self._sizes[window] if window < len(self._sizes) else 0
