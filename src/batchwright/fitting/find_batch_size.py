"""`@find_batch_size`: run a training function at the largest batch size that fits, found by calling it.

Promises:
- a probing call ends after its second optimizer step; then the function runs once for real, at a size that ran;
- what the function and its arguments reach (models, optimizers, random state) is put back after each probing call;
- callers leave out the batch size and `accumulation`, and a wrong call is answered with the right one;
- with a parameter `accumulation`, every call has batch size x accumulation = effective batch exactly;
- a mistake in the function surfaces at once, and is never taken for out-of-memory.
"""

from __future__ import annotations

import functools
import inspect
import math
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypedDict, TypeVar, Unpack, overload

import torch

from batchwright.device.device import default_device, open_limited
from batchwright.device.host import live_bytes
from batchwright.device.out_of_memory import is_out_of_memory
from batchwright.errors import InvalidInputError
from batchwright.fitting.budget import open_budget
from batchwright.fitting.cut_calls import STEPS_OF_A_PROBE, CutCalls
from batchwright.fitting.driver import Cap, Cause, Refusal, Stop, list_trials, nothing_fits, run_series
from batchwright.fitting.fit_result import Fit
from batchwright.fitting.search import Seen, by_doubling
from batchwright.planning.plan import plan
from batchwright.planning.split import divisors, largest_divisor
from batchwright.ranks.meeting import find_place
from batchwright.state.held_objects import held_objects
from batchwright.state.untouched import untouched
from batchwright.units import shortened, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from batchwright.device.outcome import Outcome
    from batchwright.fitting.driver import Series
    from batchwright.planning.plan import Plan
    from batchwright.state.untouched import Keep


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

    >>> sizes = Sizes.within(Cap(100, Cause.LIMIT), effective=256)
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
            cap = Cap(effective, Cause.EFFECTIVE_BATCH)
        # Also those above the cap: they are not tried, but the first of them is what an answer names as the next size.
        return Sizes(cap, divisors(effective, at_most=effective), effective)

    @property
    def largest(self) -> Cap:
        """The largest size within the cap, and what set it."""
        return Cap(_at_or_below(self.allowed, self.cap.size), self.cap.cause)

    def accumulation(self, size: int) -> int:
        """How many micro-batches of a size make the effective batch."""
        return 1 if self.effective is None else self.effective // size

    def above(self, size: int) -> int:
        """The next size that may be passed; one more sample if there is none."""
        return _next_above(self.allowed, size)

    def search(self, *, start: int) -> Generator[int, Seen, None]:
        """Search these sizes from one near the start."""
        return by_doubling_among(self.allowed, cap=self.cap.size, start=start)

    def conclude(self, series: Series) -> Series:
        """Return a series that speaks of the next divisor in place of one more sample."""
        if self.effective is None or series.micro_batch is None:
            return series
        above = self.above(series.micro_batch)
        failed = next((t for t in series.trials if t.micro_batch == above and t.verdict == "out_of_memory"), None)
        stop = series.stop
        if failed is not None:
            stop = Stop(Cause.OUT_OF_MEMORY, above, failed.rule)
        elif stop.cause is self.cap.cause:
            stop = Stop(self.cap.cause, self.cap.size)  # not the divisor below it, which was the end of the search
        return replace(series, above=above, stop=stop)

    def notes(self, size: int) -> list[str]:
        """Note a next divisor that is far above the answer."""
        above = self.above(size)
        if self.effective is None or above <= 2 * size or size == self.effective:
            return []
        return [
            f"no size between {size:,} and {above:,} divides {self.effective:,}, so none of them was tried; an "
            f"effective batch of {_well_divisible(self.effective):,} has a divisor within a factor of two of any size"
        ]


def by_doubling_among(sizes: Sequence[int], *, cap: int, start: int = 1) -> Generator[int, Seen, None]:
    """Search some sizes only: what `by_doubling` proposes is rounded down to one of them.

    >>> search = by_doubling_among([1, 2, 3, 5, 6, 10, 15, 30], cap=30, start=8)
    >>> next(search), search.send(Seen(6, fits=True)), search.send(Seen(15, fits=False))
    (6, 15, 10)
    """
    search = by_doubling(cap, start=start)
    proposed = next(search)
    while True:
        seen = yield _at_or_below(sizes, proposed)
        if seen.fits:
            # All that would be rounded down to this size is answered with it.
            seen = Seen(_next_above(sizes, seen.micro_batch) - 1, fits=True)
        try:
            proposed = search.send(seen)
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


# Nothing but memory ends the growth, and on a large machine that may take hours: each probe really trains.
_LARGEST_SIZE = 8192


@dataclass(frozen=True)
class FinderOptions:
    """How to search, as `find_batch_size` documents it."""

    on: str | None
    memory: str | int | None
    limit: int | None
    effective_batch: int | None
    max_trials: int
    margin: float
    progress: Callable[[str], None] | None


class _Options(TypedDict, total=False):
    on: str | None
    memory: str | int | None
    limit: int | None
    effective_batch: int | None
    max_trials: int
    margin: float
    progress: Callable[[str], None] | None


@overload
def find_batch_size(
    function: Callable[..., Returned], starting_batch_size: int = 128, **options: Unpack[_Options]
) -> BatchSizeFinder[Returned]: ...


@overload
def find_batch_size(
    function: None = None, starting_batch_size: int = 128, **options: Unpack[_Options]
) -> Callable[[Callable[..., Returned]], BatchSizeFinder[Returned]]: ...


def find_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    *,
    on: str | None = None,
    memory: str | int | None = None,
    limit: int | None = None,
    effective_batch: int | None = None,
    max_trials: int = 40,
    margin: float = 0.0,
    progress: Callable[[str], None] | None = None,
) -> Any:
    """Decorate a function so that each call runs it at the largest batch size that fits.

    >>> @find_batch_size(starting_batch_size=8)
    ... def train(batch_size, name):
    ...     if batch_size > 37:
    ...         raise MemoryError
    ...     return f"{name} at {batch_size}"
    >>> train("ran")
    'ran at 37'
    >>> train.last_fit.next_size.outcome
    'out_of_memory'

    The function's first parameter is the batch size; callers leave it out. If it has one named `accumulation`, that is
    the number of micro-batches that keeps the effective batch, and only divisors of the effective batch are tried.

    - `effective_batch`: the batch to keep (default: `starting_batch_size`).
    - `on`: the device whose memory decides (default: the accelerator of this machine, or cpu).
    - `memory`: a budget such as "16GiB" (default: what is free); `margin`: the share of it to keep free.
    - `limit`: the largest size to try (default: 8,192). `max_trials`: how many sizes to try at most.
    - `progress`: called with a line of text per event.
    """
    options = FinderOptions(on, memory, limit, effective_batch, max_trials, margin, progress)
    decorate = functools.partial(BatchSizeFinder, start=starting_batch_size, options=options)
    return decorate if function is None else decorate(function)


class BatchSizeFinder(Generic[Returned]):
    """A decorated function; `last_fit` is what its last call found."""

    def __init__(self, function: Callable[..., Returned], *, start: int, options: FinderOptions) -> None:
        self.last_fit: Fit | None = None
        self._options = options
        self._called = called = TrainingFunction.read(function)
        self._start = whole_number(start, "starting batch size")
        self._max_trials = whole_number(options.max_trials, "max trials")
        self._say = options.progress or (lambda _: None)
        effective = options.effective_batch
        if effective is not None and not called.accumulates:
            raise InvalidInputError(
                f"effective_batch={shortened(effective)} was given, but {called.name} has no parameter named "
                "accumulation to keep it by.",
                remedy=f"def {called.name}({called.size_name}, accumulation, ...)",
            )
        effective = self._start if effective is None else effective
        self._sizes = Sizes.within(
            self._read_cap(options.limit),
            effective=whole_number(effective, "effective batch") if called.accumulates else None,
        )
        functools.update_wrapper(self, function)
        self.__signature__ = called.public

    def __call__(self, *args: Any, **kwargs: Any) -> Returned:
        """Find the size, then run the function at it."""
        arguments = self._called.bind(args, kwargs)
        self.last_fit = None
        if not find_place().is_alone:
            raise InvalidInputError(
                f"{self._called.name} runs on several ranks, and one that runs out of memory in a probing call leaves "
                "the others waiting in a collective that nothing can end.",
                remedy="torchrun ... -m batchwright fit train.py:workload, whose probes run in child ranks",
            )
        self.last_fit = self._find(arguments)
        size = self.last_fit.micro_batch
        assert size is not None, "a search that finds nothing raises"
        self._say(f"running {self._called.name} at batch size {size:,}")
        try:
            return self._called.run(arguments, size, self._sizes.accumulation(size))
        except Exception as error:
            if is_out_of_memory(error):
                error.add_note(
                    f"batchwright: {STEPS_OF_A_PROBE} optimizer steps fitted at batch size {size:,}; what came later "
                    "took more. Try margin=0.1, or probe with the longest samples first."
                )
            raise

    def _find(self, arguments: dict[str, Any]) -> Fit:
        on = self._options.on or default_device()
        # As keywords of a partial, so that what the caller hands in is looked into as the function's own things are.
        called = functools.partial(self._called.function, **arguments)
        with untouched(called, accelerator=None if on == "cpu" else torch.device(on)) as keep:
            return self._find_on(on, arguments, list(held_objects(called).values()), keep)

    def _find_on(self, on: str, arguments: dict[str, Any], reached: list[Any], keep: Keep) -> Fit:
        held_bytes = live_bytes(reached)
        budget = open_budget(on, self._options.memory, margin=self._options.margin, held_bytes=held_bytes)
        calls = CutCalls(
            self._called.name,
            functools.partial(self._called.run, arguments),
            reached,
            keep,
            device=open_limited(on, budget.probe_bytes, held_bytes=held_bytes),
        )
        series = self._search(calls)
        if series.micro_batch is None:
            too_small = max((trial.micro_batch for trial in series.trials if trial.is_too_small), default=None)
            notes = [] if too_small is None else self._sizes.notes(too_small)
            raise nothing_fits([refuse_series(series, notes=notes)], on=on, budget=budget)
        notes = [*budget.notes, *calls.notes(series.micro_batch)]
        chosen = None
        if self._sizes.effective is not None:
            chosen, kept = keep_effective_batch(self._sizes.effective, series.micro_batch)
            notes += [*kept, *self._sizes.notes(series.micro_batch)]
        return Fit(
            name=self._called.name,
            on=on,
            micro_batch=series.micro_batch,
            limit=self._sizes.cap.size,
            limit_bytes=budget.limit_bytes,
            trials=series.trials,
            next_size=series.next_size,
            reason=series.reason,
            restored=calls.restored(),
            plan=chosen,
            notes=tuple(notes),
        )

    def _search(self, calls: CutCalls) -> Series:
        def probe(size: int) -> Outcome:
            return calls.probe(size, accumulation=self._sizes.accumulation(size))

        search = self._sizes.search(start=self._start)
        try:
            series = run_series(
                search,
                probe,
                cap=self._sizes.largest,
                max_trials=self._max_trials,
                say=self._say,
                tells_what_ran=False,  # the notes on its calls do
            )
        except Exception as error:
            if not isinstance(error, InvalidInputError):
                error.add_note(calls.last_words())
            raise
        return self._sizes.conclude(series)

    def _read_cap(self, limit: int | None) -> Cap:
        if limit is not None:
            return Cap(whole_number(limit, "limit"), Cause.LIMIT)
        return Cap(max(_LARGEST_SIZE, self._start), Cause.LARGEST)


def keep_effective_batch(effective: int, largest: int) -> tuple[Plan, list[str]]:
    """Split an effective batch evenly into micro-batches that fit, and say what that costs.

    >>> keep_effective_batch(256, 100)[0]
    Plan(micro_batch=64, accumulation=4, devices=1, effective_batch=256)
    """
    most = min(largest, effective)
    size = largest_divisor(effective, at_most=most)
    chosen, nearby = plan(effective, micro_batch=size), plan(effective, micro_batch=most)
    note = f"micro-batch {size:,} x accumulation {chosen.accumulation:,} keeps the effective batch at {effective:,}"
    notes = [note if size == most else f"{note}; {most:,} would fit, but does not divide it"]
    if chosen.accumulation >= 2 * nearby.accumulation:
        notes.append(
            f"an effective batch of {nearby.effective_batch:,} would need only "
            f"{nearby.micro_batch:,} x {nearby.accumulation:,}"
        )
    return chosen, notes


def refuse_series(series: Series, *, notes: Sequence[str] = ()) -> Refusal:
    """Gather what there is to say about a series in which nothing fits."""
    smallest = min(series.trials, key=lambda trial: (trial.is_too_small, trial.micro_batch))
    return Refusal(
        shape="",
        micro_batch=smallest.micro_batch,
        need_bytes=math.inf,
        details=(list_trials(series.trials, smallest), *notes),
        remedy="more memory, a smaller model, or an optimizer that keeps less state",
    )
