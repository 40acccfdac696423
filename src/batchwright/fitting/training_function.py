"""A training function as `@find_batch_size` calls it: what the decorator passes, and which sizes that may be.

Promises:
- callers leave out the batch size and `accumulation`, and a wrong call is answered with the right one;
- with `accumulation`, every size is a divisor of the effective batch, so that their product is exactly it;
- a search among some sizes tries none twice, and ends at the largest that fits.
"""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from batchwright.errors import InvalidInputError
from batchwright.fitting.result import NextSize
from batchwright.fitting.search import Seen, by_doubling
from batchwright.fitting.series import Cap
from batchwright.planning.split import divisors
from batchwright.units import shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from batchwright.fitting.series import Series

Returned = TypeVar("Returned")


class WrongCallError(InvalidInputError, TypeError):
    """A decorated function was called with arguments that it does not take."""


@dataclass(frozen=True)
class TrainingFunction(Generic[Returned]):
    """A function of a size, of `accumulation` if it has that, and of what its callers hand in."""

    function: Callable[..., Returned]
    name: str
    full: inspect.Signature
    public: inspect.Signature
    size_name: str
    accumulates: bool

    @staticmethod
    def read(function: Callable[..., Returned]) -> TrainingFunction[Returned]:
        """Read the signature of a function, or say why it cannot be meant."""
        name = getattr(function, "__name__", type(function).__name__)
        if not callable(function):
            raise InvalidInputError(f"find_batch_size decorates a function; received {shortened(function)}.")
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise InvalidInputError(f"{name} does not run when it is called: find_batch_size takes plain functions.")
        full = inspect.signature(function)
        first = next(iter(full.parameters.values()), None)
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        if first is None or first.kind not in by_position or first.name in ("self", "accumulation"):
            raise InvalidInputError(
                f"the first parameter of {name} must be the batch size; its signature is {name}{full}.",
                remedy=f"def {name}(batch_size, ...), a function rather than a method",
            )
        accumulates = "accumulation" in full.parameters
        others = [p for p in full.parameters.values() if p.name not in (first.name, "accumulation")]
        return TrainingFunction(function, name, full, full.replace(parameters=others), first.name, accumulates)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the caller's arguments by name, or say how to call."""
        try:
            return dict(self.public.bind(*args, **kwargs).arguments)
        except TypeError as error:
            given = [self.size_name, *(["accumulation"] if self.accumulates else [])]
            shown = ", ".join(str(p).split(":")[0].strip() for p in self.public.parameters.values())
            raise WrongCallError(
                f"{self.name} was called with arguments that do not fit: {error}.",
                details=[f"callers leave out {' and '.join(given)}, which the decorator passes"],
                remedy=f"{self.name}({shown})",
            ) from None

    def run(self, given: dict[str, Any], size: int, accumulation: int) -> Returned:
        """Call the function with what its caller gave and what the decorator passes."""
        values = {**given, self.size_name: size}
        if self.accumulates:
            values["accumulation"] = accumulation
        ordered = {name: values[name] for name in self.full.parameters if name in values}
        bound = inspect.BoundArguments(self.full, OrderedDict(ordered))
        return self.function(*bound.args, **bound.kwargs)


@dataclass(frozen=True)
class Sizes:
    """The sizes that may be passed: all up to the cap, or of those only the divisors of an effective batch.

    >>> sizes = Sizes.within(Cap(100, "the limit is 100"), effective=256)
    >>> sizes.largest.size, sizes.accumulation(64), sizes.above(64)
    (64, 4, 128)
    """

    cap: Cap
    allowed: Sequence[int]
    effective: int | None = None

    @staticmethod
    def within(cap: Cap, *, effective: int | None) -> Sizes:
        """Return the sizes within a cap; an effective batch is one too."""
        if effective is None:
            return Sizes(cap, range(1, cap.size + 1))
        if effective <= cap.size:
            cap = Cap(effective, f"the effective batch is {effective:,}")
        # Also those above the cap: they are not tried, but the first of them is what an answer names as the next size.
        return Sizes(cap, divisors(effective, at_most=effective), effective)

    @property
    def largest(self) -> Cap:
        """The largest size within the cap, and what set it."""
        return Cap(_at_or_below(self.allowed, self.cap.size), self.cap.why)

    def accumulation(self, size: int) -> int:
        """How many micro-batches of a size make the effective batch."""
        return 1 if self.effective is None else self.effective // size

    def above(self, size: int) -> int:
        """The next size that may be passed; one more sample where there is none."""
        return _next_above(self.allowed, size)

    def search(self, *, start: int) -> Generator[int, Seen, None]:
        """Search these sizes from one near the start."""
        return by_doubling_among(self.allowed, cap=self.cap.size, start=start)

    def concluded(self, series: Series) -> Series:
        """Return a series that speaks of the next divisor where it spoke of one more sample."""
        if self.effective is None or series.micro_batch is None:
            return series
        above = self.above(series.micro_batch)
        failed = next((t for t in series.trials if t.micro_batch == above and t.verdict == "out_of_memory"), None)
        if failed is None:
            return replace(series, next_size=replace(series.next_size, micro_batch=above))
        reason = f"micro-batch {above:,} ran out of memory"
        told = f"{reason}: {failed.rule}" if failed.rule else reason
        return replace(series, next_size=NextSize(above, "out_of_memory", told), reason=reason)

    def notes(self, size: int) -> list[str]:
        """What has to be said where the next divisor is far above the answer."""
        above = self.above(size)
        if self.effective is None or above <= 2 * size or size == self.effective:
            return []
        return [
            f"no size between {size:,} and {above:,} divides {self.effective:,}, so none of them was tried; an "
            f"effective batch of {_well_divisible(self.effective):,} has a divisor within a factor of two of any size"
        ]


def by_doubling_among(sizes: Sequence[int], *, cap: int, start: int = 1) -> Generator[int, Seen, None]:
    """Search some sizes only: what `by_doubling` asks for is rounded down to one of them.

    >>> search = by_doubling_among([1, 2, 3, 5, 6, 10, 15, 30], cap=30, start=8)
    >>> next(search), search.send(Seen(6, fits=True)), search.send(Seen(15, fits=False))
    (6, 15, 10)
    """
    search = by_doubling(cap, start=start)
    asked = next(search)
    while True:
        seen = yield _at_or_below(sizes, asked)
        if seen.fits:
            # All that would be rounded down to this size is answered with it.
            seen = Seen(_next_above(sizes, seen.micro_batch) - 1, fits=True)
        try:
            asked = search.send(seen)
        except StopIteration:
            return


def _at_or_below(sizes: Sequence[int], size: int) -> int:
    return sizes[bisect_right(sizes, size) - 1]


def _next_above(sizes: Sequence[int], size: int) -> int:
    place = bisect_right(sizes, size)
    return sizes[place] if place < len(sizes) else size + 1


def _well_divisible(number: int) -> int:
    """Return a number nearby whose divisors leave no gap wider than a factor of two.

    >>> _well_divisible(127), _well_divisible(1_000_003)
    (128, 1000448)
    """
    # A multiple m of 2^k >= m: the divisors 1, 2, 4 ... 2^k reach up to m, and m, 2m, 4m ... from there to the end.
    step = 1 << ((number - 1).bit_length() + 1) // 2
    return (number + step // 2) // step * step
