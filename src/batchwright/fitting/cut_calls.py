"""Calls of a training function that end after its second optimizer step: enough to see what memory it takes.

Promises:
- a call ends after the second step of every optimizer of torch that it uses, whatever the function catches;
- what was reached (models, optimizers, random state) is put back after each call, however it ended;
- a size at which the function trains nothing, though at a smaller one it does, is an error and no answer.
"""

from __future__ import annotations

import itertools
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from batchwright.errors import InvalidInputError
from batchwright.fitting.fit_result import Restored
from batchwright.fitting.work import refuse_spread
from batchwright.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchwright.device.device import Device
    from batchwright.device.outcome import Outcome
    from batchwright.state.untouched import Keep


# Adam makes its moments in the first step, so the second is the first to run beside them.
STEPS_OF_A_PROBE = 2


class CutCalls:
    """Probing calls of one function: `run` calls it at a size and an accumulation, `reached` is what it may change."""

    def __init__(
        self, name: str, run: Callable[[int, int], object], reached: Sequence[Any], keep: Keep, *, device: Device
    ) -> None:
        for thing in reached:
            if isinstance(thing, nn.Module):
                refuse_spread(thing)
        self._name, self._run, self._device, self._keep = name, run, device, keep
        self._accelerator = None if device.name == "cpu" else torch.device(device.name)
        self._has_state = len(keep.refused) < len(reached)
        self._seen: dict[int, CountedSteps] = {}

    def probe(self, size: int, *, accumulation: int = 1) -> Outcome:
        """Call the function at one size, until its second optimizer step."""
        steps = self._seen[size] = CountedSteps(self._accelerator)

        def run() -> tuple[float, ...]:
            seconds = run_until_second_step(lambda: self._run(size, accumulation), steps)
            self._refuse_idle(size)
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
        """What was given back as it was found."""
        beyond = "files, logs, connections and Python objects that the function itself changes"
        unknown = () if self._has_state else ("a model or optimizer that the function reaches: none was found",)
        return Restored(self._keep.covered, (*unknown, *self._keep.not_kept, beyond))

    def _refuse_idle(self, size: int) -> None:
        # A loader with `drop_last` and too few samples.
        trained = max((n for n, seen in self._seen.items() if n < size and seen.count), default=None)
        if self._seen[size].count == 0 and trained is not None:
            raise InvalidInputError(
                f"{self._name} takes no optimizer step at batch size {size:,}, but does at {trained:,}: "
                "its data seem to hold no full batch of that size.",
                remedy=f"limit={trained}, or the number of samples",
            )


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
        # Another one's, if decorated functions call each other.
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
