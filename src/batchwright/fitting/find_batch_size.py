"""`@find_batch_size`: run a training function at the largest batch size that fits, found by calling it.

Promises:
- a probing call ends after the second step of every optimizer of torch that it uses, whatever the function catches;
  then the function runs once for real, at a size that ran;
- what the function and its arguments reach (models, optimizers, random state) is put back after each probing call,
  however it ended;
- a size at which the function trains nothing, though at a smaller one it does, is an error and no answer;
- callers leave out the batch size and `accumulation`, and a wrong call is answered with the right one;
- with a parameter `accumulation`, every call has batch size x accumulation = effective batch exactly;
- a mistake in the function surfaces at once, and is never taken for out-of-memory.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import time
import weakref
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypedDict, TypeVar, Unpack, overload

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from batchwright.device.device import default_device, open_limited
from batchwright.device.host import live_bytes
from batchwright.device.outcome import Outcome, is_out_of_memory, with_causes
from batchwright.errors import InvalidInputError
from batchwright.fitting.fit_result import Fit, Restored
from batchwright.fitting.probers import open_budget, refuse_spread
from batchwright.fitting.run_search import Cap, Cause, Series, Stop, nothing_fits, refuse_series, run_series
from batchwright.planning.plan import Plan, plan
from batchwright.planning.search import Seen, by_doubling, next_size
from batchwright.planning.split import divisors, largest_divisor
from batchwright.ranks.meeting import find_place
from batchwright.state.held_objects import held_objects
from batchwright.state.untouched import Keep, untouched
from batchwright.units import counted, shortened, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from batchwright.device.step import Device


# Adam makes its moments in the first step, so the second is the first to run beside them.
STEPS_OF_A_PROBE = 2


class CutCalls:
    """Probing calls of one function: `run` calls it at a size and an accumulation, `reached` is what it may change."""

    def __init__(
        self, name: str, run: Callable[[int, int], object], reached: Sequence[Any], keep: Keep, *, device: Device
    ) -> None:
        refuse_spread(*reached)
        self._name, self._run, self._device, self._keep = name, run, device, keep
        self._accelerator = None if device.name == "cpu" else torch.device(device.name)
        self._has_state = len(keep.refused) < len(reached)
        self._seen: dict[int, CountedSteps] = {}

    def probe(self, size: int, *, accumulation: int = 1) -> Outcome:
        """Call the function at one size, until its second optimizer step."""
        steps = self._seen[size] = CountedSteps(self._accelerator)

        def run() -> tuple[float, ...]:
            seconds = run_until_second_step(lambda: self._run(size, accumulation), steps)
            # A loader with `drop_last` and too few samples.
            trained = max((n for n, seen in self._seen.items() if n < size and seen.count), default=None)
            if steps.count == 0 and trained is not None:
                raise InvalidInputError(
                    f"{self._name} takes no optimizer step at batch size {size:,}, but does at {trained:,}: "
                    "its data seem to hold no full batch of that size.",
                    remedy=f"limit={trained}, or the number of samples",
                )
            return seconds

        try:
            return self._device.watch(run, micro_batch=size, accumulation=accumulation)
        finally:
            self._keep.restore()

    def notes(self, size: int) -> list[str]:
        """Return notes on the call at the answer."""
        steps = self._seen[size]
        if steps.count == 0:
            return ["no optimizer of torch stepped, so each probing call ran to the function's end"]
        notes = []
        if not steps.is_enough:
            notes.append(f"the function ended after {counted(steps.count, 'optimizer step')} at micro-batch {size:,}")
        if any(seen.was_caught for seen in self._seen.values()):
            notes.append("the function caught what ends a probing call (`except:` or `except BaseException`)")
        return notes

    def last_words(self) -> str:
        """Say which call failed, to stand below the user's traceback."""
        *ran, size = self._seen
        message = f"batchwright: raised by {self._name} in a probing call at batch size {size:,}"
        below = max((n for n in ran if n < size), default=None)
        if below is None:
            return f"{message}."
        return f"{message}; {below:,} ran. If the data hold fewer samples than that, set limit={below}."

    def restored(self) -> Restored:
        """What was restored."""
        beyond = "files, logs, connections and Python objects that the function itself changes"
        unknown = () if self._has_state else ("a model or optimizer that the function reaches: none was found",)
        return Restored(self._keep.covered, (*unknown, *self._keep.not_kept, beyond))


class _SecondStepDone(BaseException):
    """Ends a probing call. Not an Exception, so that `except Exception` in the user's loop lets it pass."""

    def __init__(self, steps: CountedSteps) -> None:
        super().__init__("a probing call of batchwright ends here, after its second optimizer step")
        self.steps = steps


class CountedSteps:
    """The optimizer steps of one probing call, and when they ended."""

    def __init__(self, accelerator: torch.device | None = None) -> None:
        self.count = 0
        self.is_enough = False
        self.was_caught = False
        self._accelerator = accelerator
        # By optimizer, so that two optimizers that take turns both reach their second step. A step of a parameter's own
        # optimizer inside of backward counts the same way.
        self._per_optimizer: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._times = [time.perf_counter()]

    def note_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Count a step; after the second of every optimizer seen, end the call."""
        self.count += 1
        if self._accelerator is not None:
            torch.accelerator.synchronize(self._accelerator)
        self._times.append(time.perf_counter())
        self._per_optimizer[optimizer] = self._per_optimizer.get(optimizer, 0) + 1
        # Being here again after the end means that the function caught it.
        self.was_caught |= self.is_enough
        self.is_enough |= min(self._per_optimizer.values()) >= STEPS_OF_A_PROBE
        if self.is_enough:
            raise _SecondStepDone(self)

    def seconds(self) -> tuple[float, ...]:
        """Seconds of each step; of the whole call if there was none."""
        times = self._times if self.count else [*self._times, time.perf_counter()]
        return tuple(later - earlier for earlier, later in itertools.pairwise(times))


def run_until_second_step(function: Callable[[], object], steps: CountedSteps) -> tuple[float, ...]:
    """Call a function that trains, end it after its second optimizer step, and return the seconds of each.

    >>> parameter = torch.nn.Parameter(torch.zeros(1))
    >>> def train():
    ...     optimizer = torch.optim.SGD([parameter])
    ...     for number in range(100):
    ...         print("step", number)
    ...         optimizer.step()
    >>> len(run_until_second_step(train, CountedSteps()))
    step 0
    step 1
    2
    """
    hook = register_optimizer_step_post_hook(steps.note_step)
    try:
        function()
        steps.was_caught |= steps.is_enough
    except _SecondStepDone as end:
        # Another one's, if decorated functions call each other.
        if end.steps is not steps:
            raise
    except Exception as error:
        # `except BaseException as error: raise RuntimeError(...) from error`
        if not any(isinstance(cause, _SecondStepDone) and cause.steps is steps for cause in with_causes(error)):
            raise
        steps.was_caught = True
    finally:
        hook.remove()
    return steps.seconds()


Returned = TypeVar("Returned")


class WrongCallError(InvalidInputError, TypeError):
    """A decorated function was called with arguments that it does not take."""


class TrainingFunction(Generic[Returned]):
    """A function of a size, of `accumulation` if it has that, and of what its callers hand in."""

    def __init__(self, function: Callable[..., Returned]) -> None:
        """Read the signature of a function, or say why it cannot be meant."""
        self.function = function
        self.name = name = getattr(function, "__name__", type(function).__name__)
        if not callable(function):
            raise InvalidInputError(f"find_batch_size decorates a function; received {shortened(function)}.")
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise InvalidInputError(f"{name} does not run when it is called: find_batch_size takes plain functions.")
        self.full = full = inspect.signature(function)
        first = next(iter(full.parameters.values()), None)
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        if first is None or first.kind not in by_position or first.name in ("self", "accumulation"):
            raise InvalidInputError(
                f"the first parameter of {name} must be the batch size; its signature is {name}{full}.",
                remedy=f"def {name}(batch_size, ...), a function rather than a method",
            )
        self.size_name, self.accumulates = first.name, "accumulation" in full.parameters
        others = [p for p in full.parameters.values() if p.name not in (first.name, "accumulation")]
        self.public = full.replace(parameters=others)

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
    proposed = next(search, None)
    while proposed is not None:
        seen = yield _at_or_below(sizes, proposed)
        if seen.fits:
            # All that would be rounded down to this size is answered with it.
            seen = Seen(_next_above(sizes, seen.micro_batch) - 1, fits=True)
        proposed = next_size(search, seen)


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


class _Options(TypedDict, total=False):
    """How to search, as `find_batch_size` documents it."""

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
    decorate = functools.partial(
        BatchSizeFinder,
        start=starting_batch_size,
        on=on,
        memory=memory,
        limit=limit,
        effective_batch=effective_batch,
        max_trials=max_trials,
        margin=margin,
        progress=progress,
    )
    return decorate if function is None else decorate(function)


class BatchSizeFinder(Generic[Returned]):
    """A decorated function; `last_fit` is what its last call found."""

    def __init__(self, function: Callable[..., Returned], *, start: int, **options: Unpack[_Options]) -> None:
        self.last_fit: Fit | None = None
        self._options = options
        self._called = called = TrainingFunction(function)
        self._start = whole_number(start, "starting batch size")
        self._max_trials = whole_number(options["max_trials"], "max trials")
        self._say = options["progress"] or (lambda _: None)
        effective = options["effective_batch"]
        if effective is not None and not called.accumulates:
            raise InvalidInputError(
                f"effective_batch={shortened(effective)} was given, but {called.name} has no parameter named "
                "accumulation to keep it by.",
                remedy=f"def {called.name}({called.size_name}, accumulation, ...)",
            )
        effective = self._start if effective is None else effective
        limit = options["limit"]
        self._sizes = Sizes.within(
            Cap(max(_LARGEST_SIZE, self._start), Cause.LARGEST)
            if limit is None
            else Cap(whole_number(limit, "limit"), Cause.LIMIT),
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
        on = self._options["on"] or default_device()
        # As keywords of a partial, so that what the caller hands in is looked into as the function's own things are.
        called = functools.partial(self._called.function, **arguments)
        with untouched(called, accelerator=None if on == "cpu" else torch.device(on)) as keep:
            return self._find_on(on, arguments, list(held_objects(called).values()), keep)

    def _find_on(self, on: str, arguments: dict[str, Any], reached: list[Any], keep: Keep) -> Fit:
        held_bytes = live_bytes(reached)
        budget = open_budget(on, self._options["memory"], margin=self._options["margin"], held_bytes=held_bytes)
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
            raise nothing_fits([refuse_series(series.trials, notes=notes)], on=on, budget=budget)
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

        try:
            series = run_series(
                by_doubling_among(self._sizes.allowed, cap=self._sizes.cap.size, start=self._start),
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
