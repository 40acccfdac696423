"""`@find_batch_size`: run a training function at the largest batch size that fits, found by calling it.

Promises:
- a probing call ends after its second optimizer step, whatever the function catches; then the function runs once for
  real, at a size that ran;
- what the function and its arguments reach (models, optimizers, random state) is put back after each probing call;
- with a parameter `accumulation`, batch size x accumulation is the effective batch exactly;
- a mistake in the function surfaces at once, and is never taken for out-of-memory.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import time
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypedDict, TypeVar, Unpack, overload

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from batchwright.device.device import open_limited, present_devices
from batchwright.device.out_of_memory import is_out_of_memory
from batchwright.errors import InvalidInputError, NothingFitsError
from batchwright.fitting.budget import Budget, open_budget
from batchwright.fitting.held_objects import held_objects
from batchwright.fitting.kept_state import KeptState
from batchwright.fitting.result import Fit, Restored
from batchwright.fitting.search import by_doubling
from batchwright.fitting.series import Cap, run_series
from batchwright.fitting.work import refuse_spread
from batchwright.planning.plan import plan
from batchwright.planning.split import largest_divisor
from batchwright.units import counted, format_bytes, shortened, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchwright.device.outcome import Outcome
    from batchwright.fitting.series import Series
    from batchwright.planning.plan import Plan

Returned = TypeVar("Returned")

# Adam makes its moments in the first step, so the second is the first to run beside them.
STEPS_OF_A_PROBE = 2
# Nothing but memory ends the growth, and on a large machine that may take hours: each probe really trains.
_LARGEST_SIZE = 8192


class WrongCallError(InvalidInputError, TypeError):
    """A decorated function was called with arguments that it does not take."""


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
    ...         raise torch.OutOfMemoryError("CUDA out of memory.")
    ...     return f"{name} at {batch_size}"
    >>> train("ran")
    'ran at 37'
    >>> train.last_fit.next_size.outcome
    'out_of_memory'

    The function's first parameter is the batch size; callers leave it out. A second one named `accumulation` receives
    as many micro-batches as keep the effective batch (`effective_batch`, default `starting_batch_size`). `on` is the
    device whose memory decides, by default the accelerator of this machine, or the CPU where there is none; `memory` a
    budget such as "16GiB", and `limit` the largest size to try (8,192 unless said).
    """
    told: dict[str, Any] = {
        "starting_batch_size": starting_batch_size,
        "on": on,
        "memory": memory,
        "limit": limit,
        "effective_batch": effective_batch,
        "max_trials": max_trials,
        "margin": margin,
        "progress": progress,
    }
    if function is None:
        return functools.partial(BatchSizeFinder, **told)
    return BatchSizeFinder(function, **told)


class BatchSizeFinder(Generic[Returned]):
    """A decorated function; `last_fit` is what its last call found."""

    def __init__(
        self,
        function: Callable[..., Returned],
        *,
        starting_batch_size: int,
        on: str | None,
        memory: str | int | None,
        limit: int | None,
        effective_batch: int | None,
        max_trials: int,
        margin: float,
        progress: Callable[[str], None] | None,
    ) -> None:
        self.last_fit: Fit | None = None
        self._function = function
        self._call = _Call.read(function)
        self._start = whole_number(starting_batch_size, "starting batch size")
        self._limit = None if limit is None else whole_number(limit, "limit")
        self._max_trials = whole_number(max_trials, "max trials")
        self._on, self._memory, self._margin = on, memory, margin
        self._say = progress or (lambda _: None)
        if effective_batch is not None and not self._call.accumulates:
            raise InvalidInputError(
                f"effective_batch={shortened(effective_batch)} was given, but {self._call.name} has no parameter "
                "named accumulation to keep it by.",
                remedy=f"def {self._call.name}({self._call.size_name}, accumulation, ...)",
            )
        self._effective: int | None = None
        if self._call.accumulates:
            self._effective = whole_number(
                self._start if effective_batch is None else effective_batch, "effective batch"
            )
        functools.update_wrapper(self, function)
        self.__signature__ = self._call.public

    def __call__(self, *args: Any, **kwargs: Any) -> Returned:
        """Find the size, then run the function at it."""
        arguments = self._call.bind(args, kwargs)
        self.last_fit = None
        _refuse_ranks(self._call.name)
        found = self._find(arguments)
        self.last_fit = found
        assert found.micro_batch is not None, "a search that finds nothing raises"
        size, accumulation = found.micro_batch, 1
        if found.plan is not None:
            size, accumulation = found.plan.micro_batch, found.plan.accumulation
        self._say(f"running {self._call.name} at batch size {size:,}")
        try:
            return self._call.run(self._function, arguments, size, accumulation)
        except Exception as error:
            if is_out_of_memory(error):
                error.add_note(
                    f"batchwright: {STEPS_OF_A_PROBE} optimizer steps fitted at batch size {size:,}; what came later "
                    "took more. Try margin=0.1, or probe with the longest samples first."
                )
            raise

    def _find(self, arguments: dict[str, Any]) -> Fit:
        on = self._on or next((name for name in present_devices() if name != "cpu"), "cpu")
        budget = open_budget(on, self._memory, margin=self._margin)
        cap = self._cap()
        prober = _Probes(self._function, self._call, arguments, self._effective, on=on, budget=budget)
        try:
            series = run_series(
                by_doubling(cap.size, start=min(self._start, cap.size)),
                prober.probe,
                cap=cap,
                max_trials=self._max_trials,
                say=self._say,
            )
        except InvalidInputError:
            raise
        except Exception as error:
            error.add_note(prober.last_words())
            raise
        if series.micro_batch is None:
            raise nothing_fits(series, budget, on)
        chosen, notes = None, [*budget.notes, *prober.notes(series.micro_batch)]
        if self._effective is not None:
            chosen, why = keep_effective_batch(self._effective, series.micro_batch)
            notes += why
        return Fit(
            name=self._call.name,
            on=on,
            micro_batch=series.micro_batch,
            limit=cap.size,
            limit_bytes=budget.limit_bytes,
            trials=series.trials,
            next_size=series.next_size,
            reason=series.reason,
            restored=prober.restored(),
            plan=chosen,
            notes=tuple(notes),
        )

    def _cap(self) -> Cap:
        if self._limit is not None:
            cap = Cap(self._limit, f"the limit is {self._limit:,}")
        else:
            size = max(_LARGEST_SIZE, self._start)
            cap = Cap(size, f"{size:,} is the largest size that is tried; limit= sets another")
        if self._effective is not None and self._effective < cap.size:
            cap = Cap(self._effective, f"the effective batch is {self._effective:,}")
        return cap


@dataclass(frozen=True)
class _Call:
    """How a function is called: by the size, by `accumulation` if it has that, and by what its callers hand in."""

    name: str
    full: inspect.Signature
    public: inspect.Signature
    size_name: str
    accumulates: bool

    @staticmethod
    def read(function: Callable[..., Any]) -> _Call:
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
        return _Call(name, full, full.replace(parameters=others), first.name, accumulates)

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

    def run(self, function: Callable[..., Returned], given: dict[str, Any], size: int, accumulation: int) -> Returned:
        values = {**given, self.size_name: size}
        if self.accumulates:
            values["accumulation"] = accumulation
        ordered = {name: values[name] for name in self.full.parameters if name in values}
        bound = inspect.BoundArguments(self.full, OrderedDict(ordered))
        return function(*bound.args, **bound.kwargs)


class _Probes:
    """Probing calls of one function with one set of arguments."""

    def __init__(
        self,
        function: Callable[..., Any],
        call: _Call,
        arguments: dict[str, Any],
        effective: int | None,
        *,
        on: str,
        budget: Budget,
    ) -> None:
        self._function, self._call, self._arguments, self._effective = function, call, arguments, effective
        # As keywords of a partial, so that what the caller hands in is looked into as the function's own things are.
        reached = held_objects(functools.partial(function, **arguments))
        for thing in reached.values():
            if isinstance(thing, nn.Module):
                refuse_spread(thing)
        self._accelerator = None if on == "cpu" else torch.device(on)
        self._state, self._not_kept = keep_all(reached, self._accelerator)
        self._has_state = len(self._not_kept) < len(reached)
        self._device = open_limited(on, budget.probe_bytes)
        self._seen: dict[int, CountedSteps] = {}

    def probe(self, size: int) -> Outcome:
        """Call the function at one size, until its second optimizer step."""
        accumulation = 1 if self._effective is None else plan(self._effective, micro_batch=size).accumulation
        steps = self._seen[size] = CountedSteps(self._accelerator)

        def run() -> tuple[float, ...]:
            seconds = run_until_second_step(
                lambda: self._call.run(self._function, self._arguments, size, accumulation), steps
            )
            self._refuse_idle(size, steps)
            return seconds

        try:
            return self._device.watch(run, micro_batch=size, accumulation=accumulation)
        finally:
            self._state.restore()

    def notes(self, size: int) -> list[str]:
        """What has to be said about the call at the answer."""
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
        if not any(n < size for n in ran):
            return f"batchwright: raised by {self._call.name} in a probing call at batch size {size:,}."
        below = max(n for n in ran if n < size)
        return (
            f"batchwright: raised by {self._call.name} in a probing call at batch size {size:,}; {below:,} ran. "
            f"If the data hold fewer samples than that, set limit={below}."
        )

    def restored(self) -> Restored:
        """What was given back as it was found."""
        beyond = "files, logs, connections and Python objects that the function itself changes"
        unknown = () if self._has_state else ("a model or optimizer that the function reaches: none was found",)
        return Restored(self._state.covered, (*unknown, *self._not_kept, beyond))

    def _refuse_idle(self, size: int, steps: CountedSteps) -> None:
        """Refuse a size at which the function trains nothing, though at a smaller one it does: `drop_last`."""
        trained = max((n for n, seen in self._seen.items() if n < size and seen.count), default=None)
        if steps.count == 0 and trained is not None:
            raise InvalidInputError(
                f"{self._call.name} takes no optimizer step at batch size {size:,}, but does at {trained:,}: "
                "its data seem to hold no full batch of that size.",
                remedy=f"limit={trained}, or the number of samples",
            )


def keep_all(reached: dict[str, Any], accelerator: torch.device | None) -> tuple[KeptState, list[str]]:
    """Keep what was reached and can be kept, and name what promises to hand out its state but does not.

    A data loader that accelerate prepared is of that kind: it has `state_dict`, which fails unless it is asked for.
    """
    state, not_kept = KeptState(accelerator=accelerator), []
    for name, thing in reached.items():
        try:
            state.keep(thing)
        except (AttributeError, NotImplementedError):
            not_kept.append(f"{name} ({type(thing).__name__}): it does not hand out its state")
    return state, not_kept


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
        """Seconds of each step; of the whole call where there was none."""
        times = self._times if self.count else [*self._times, time.perf_counter()]
        return tuple(later - earlier for earlier, later in itertools.pairwise(times))


def run_until_second_step(function: Callable[[], object], steps: CountedSteps) -> tuple[float, ...]:
    """Call a function that trains, end it after its second optimizer step, and return the seconds of each.

    >>> parameter = nn.Parameter(torch.zeros(1))
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
        # Another one's, where decorated functions call each other.
        if end.steps is not steps:
            raise
    except Exception as error:
        # `except BaseException as error: raise RuntimeError(...) from error`
        if not _came_from(error, steps):
            raise
        steps.was_caught = True
    finally:
        hook.remove()
    return steps.seconds()


def _came_from(error: BaseException | None, steps: CountedSteps) -> bool:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, _SecondStepDone):
            return error.steps is steps
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def keep_effective_batch(effective: int, found: int) -> tuple[Plan, list[str]]:
    """Split an effective batch evenly into micro-batches that fit, and say what that costs.

    >>> keep_effective_batch(256, 100)[0]
    Plan(micro_batch=64, accumulation=4, devices=1, effective_batch=256)
    """
    size = largest_divisor(effective, at_most=found) or 1
    chosen = plan(effective, micro_batch=size)
    notes = [
        f"micro-batch {size:,} x accumulation {chosen.accumulation:,} keeps the effective batch at {effective:,}"
        + (f"; {min(found, effective):,} would fit, but does not divide it" if size < min(found, effective) else "")
    ]
    nearby = plan(effective, micro_batch=found)
    if chosen.accumulation >= 2 * nearby.accumulation:
        notes.append(
            f"an effective batch of {nearby.effective_batch:,} would need only "
            f"{nearby.micro_batch:,} x {nearby.accumulation:,}"
        )
    return chosen, notes


def nothing_fits(series: Series, budget: Budget, on: str) -> NothingFitsError:
    """Return the error that says so, with what was tried."""
    smallest = min(series.trials, key=lambda trial: (trial.is_too_small, trial.micro_batch))
    within = "" if budget.probe_bytes is None else f" ({format_bytes(budget.probe_bytes)})"
    return NothingFitsError(
        f"micro-batch {smallest.micro_batch:,} does not fit on {on}{within}.",
        details=[
            f"tried {', '.join(f'{t.micro_batch:,}' for t in series.trials)}; the smallest said: {smallest.error}"
        ],
        remedy="more memory, a smaller model, or an optimizer that keeps less state",
    )


def _refuse_ranks(name: str) -> None:
    grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    ranks = torch.distributed.get_world_size() if grouped else int(os.environ.get("WORLD_SIZE", "1") or 1)
    if ranks > 1:
        raise InvalidInputError(
            f"{name} runs on {ranks} ranks, and one that runs out of memory in a probing call leaves the others "
            "waiting in a collective that nothing can end.",
            remedy="torchrun ... -m batchwright fit train.py:workload, whose probes run in child ranks",
        )
