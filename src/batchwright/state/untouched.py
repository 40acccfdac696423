"""`untouched`: run or trace what is the user's and leave no trace; the one way in for every command.

Promises:
- weights, buffers, gradients, optimizers, scalers, schedulers, averages, modes, hooks, random numbers, handlers and
  what else the functions hold are as before, however the block ends, Ctrl-C included;
- what the functions hand out and somebody else holds, too, is kept before anything is done with it;
- what runs the user's functions outside of such a block fails at once (`current_keep`);
- what cannot be put back is listed.

Blocks inside of a block over the same functions share its copies: each begins and ends at the state from before the
outermost. A second thread waits: random numbers, hooks and handlers are the whole process's.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, replace
from typing import Any, TypeVar, cast

import torch
from torch import nn

from batchwright.state.held_objects import held_objects, reach_of
from batchwright.state.kept_state import KeptState
from batchwright.state.process_state import INTERRUPTS, ProcessState, freeze_old_objects
from batchwright.workload import Workload

Question = TypeVar("Question", bound="Callable[..., Any]")
# What a workload's functions are called for on the host, where no tensor is fake even under a trace.
_RUN_FOR_REAL = ("data", "batch", "collate", "units", "split")
BEYOND_REACH = "files, connections and Python objects that the step itself changes"


class Keep:
    """What is kept of the user's, as it was when this was made or when a function handed it out."""

    def __init__(
        self,
        work: Iterable[Workload | Callable[..., Any]] = (),
        *,
        objects: Iterable[Any] = (),
        accelerator: torch.device | None = None,
        is_traced: bool = False,
        is_thrown_away: bool = False,
    ) -> None:
        self.is_traced, self._is_thrown_away = is_traced, is_thrown_away
        self._accelerator = accelerator
        self.process = ProcessState()
        self.state = KeptState(accelerator=accelerator, copies_elements=not is_traced, keeps_random=not is_thrown_away)
        self._covered: dict[int, Any] = {}
        self._builders: set[int] = set()
        self.live: list[Any] = []
        """Modules, optimizers and scalers that live on outside of the block."""
        self.refused: dict[str, None] = {}
        """What says that it can be kept, and then raises."""
        if not is_thrown_away:
            for thing in objects:
                self.state.keep(thing)
        for part in work:
            self._add(part)

    @property
    def covered(self) -> tuple[str, ...]:
        """What comes back, in words."""
        return self.state.covered

    @property
    def not_kept(self) -> tuple[str, ...]:
        """What does not, as far as it is known by now."""
        return (*self.refused, *self.state.not_kept)

    @property
    def notes(self) -> tuple[str, ...]:
        """A note for a result: what does not come back; none if all does."""
        return (f"not restored: {', '.join(self.not_kept)}",) if self.not_kept else ()

    def covers(
        self, work: Workload | Callable[..., Any], *, is_traced: bool, accelerator: torch.device | None = None
    ) -> bool:
        """Whether what these functions hold is kept here, and the random state of the accelerator."""
        if self._is_thrown_away:
            return True
        if accelerator is not None and not _is_same_device(accelerator, self._accelerator):
            return False
        return (is_traced or not self.is_traced) and all(id(part) in self._covered for _, part in _parts(work))

    def keep_live(self, thing: Any) -> None:
        """Keep something that a function of the user's handed out and that is not ours alone."""
        if not self._is_thrown_away and not any(thing is known for known in self.live):
            self.state.keep(thing)
            self.live.append(thing)

    def knows_builder(self, function: Any) -> bool:
        """Whether a function is known to hand out a new object each time."""
        return self._is_thrown_away or id(function) in self._builders

    def note_builder(self, function: Any) -> None:
        """Remember that it does."""
        self._builders.add(id(function))
        self._covered.setdefault(id(function), function)

    def restore(self) -> None:
        """Put everything back; an interrupt waits meanwhile."""
        if self._is_thrown_away:
            return
        with INTERRUPTS.held():
            self.process.restore_settings()
            self.state.restore()

    def _add(self, work: Workload | Callable[..., Any]) -> None:
        parts = list(_parts(work))
        self._covered.update((id(part), part) for _, part in parts)
        if self._is_thrown_away:
            return
        # First what is called for real, with elements: of what the others hold as well, none is lost then.
        parts.sort(key=lambda part: part[0] not in _RUN_FOR_REAL)
        if isinstance(work, Workload) and work.data is not None:
            parts[:0] = [("data", dataset) for dataset in _datasets(work.data)]
        for name, part in parts:
            if name == "model" and isinstance(part, nn.Module):
                self.state.keep(part)
                self.live.append(part)
                continue
            copies, self.state.copies_elements = (
                self.state.copies_elements,
                self.state.copies_elements or name in _RUN_FOR_REAL,
            )
            try:
                self.refused.update(dict.fromkeys(self.state.keep_all(held_objects(part).values())))
                self.state.keep_held(reach_of(part))
            finally:
                self.state.copies_elements = copies


_ACTIVE: ContextVar[Keep | None] = ContextVar("batchwright_keep", default=None)
_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def untouched(
    *work: Workload | Callable[..., Any],
    objects: Iterable[Any] = (),
    accelerator: torch.device | None = None,
    is_traced: bool = False,
) -> Iterator[Keep]:
    """Put back everything of the user's on the way out, whatever happened inside.

    >>> model = nn.Linear(2, 1)
    >>> workload = Workload(model=model, batch=lambda n: torch.ones(n, 2), loss=lambda model, batch: model(batch).sum())
    >>> with untouched(workload) as keep:
    ...     _ = model.train(False).weight.data.zero_()
    >>> model.training, bool(model.weight.any()), keep.covered[0]
    (True, True, 'weights and buffers of Linear (2 tensors)')

    `work` are workloads or functions, `objects` what else may be changed. `is_traced` says that the functions run on
    fake tensors: then weights are not copied.
    """
    outer = _ACTIVE.get()
    if (
        outer is not None
        and not tuple(objects)
        and all(outer.covers(part, is_traced=is_traced, accelerator=accelerator) for part in work)
    ):
        try:
            yield outer
        finally:
            outer.restore()
        return
    with _ONE_AT_A_TIME, INTERRUPTS.waiting_where_needed(sys._getframe(2)), INTERRUPTS.coming_again():
        keep = Keep(work, objects=objects, accelerator=accelerator, is_traced=is_traced)
        token = _ACTIVE.set(keep)
        try:
            # A real step may need the memory of all garbage there is; a trace needs none.
            freeze_old_objects(generation=1 if is_traced else 2)
            yield keep
        finally:
            with INTERRUPTS.held():
                _ACTIVE.reset(token)
                try:
                    keep.restore()
                finally:
                    if not is_traced:
                        gc.collect()
                    keep.process.restore()


def leaves_untouched(*, is_traced: bool = False) -> Callable[[Question], Question]:
    """Decorate a function of a workload so that all of it runs inside of `untouched`.

    Its result has `notes`, and what could not be kept becomes one.
    """

    def decorate(question: Question) -> Question:
        @functools.wraps(question)
        def answer(workload: Workload, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(workload, Workload):
                return question(workload, *args, **kwargs)  # which says what is wrong with it
            with untouched(workload, is_traced=is_traced) as keep:
                result = question(workload, *args, **kwargs)
                return replace(result, notes=(*result.notes, *keep.notes)) if keep.notes else result

        return cast("Question", answer)

    return decorate


@contextmanager
def thrown_away() -> Iterator[Keep]:
    """Run the user's functions in a process that ends with them: nothing has to be put back."""
    keep = Keep(is_thrown_away=True)
    token = _ACTIVE.set(keep)
    try:
        yield keep
    finally:
        _ACTIVE.reset(token)


def current_keep(workload: Workload | None = None) -> Keep:
    """Return the keep of the block we are in; called wherever a function of the user's is.

    >>> current_keep()
    Traceback (most recent call last):
    ...
    RuntimeError: the user's functions are called outside of `untouched(workload)`: what they change would stay changed.
    """
    keep = _ACTIVE.get()
    if keep is None or (workload is not None and not keep.covers(workload.model, is_traced=True)):
        raise RuntimeError(
            "the user's functions are called outside of `untouched(workload)`: what they change would stay changed."
        )
    return keep


def survivors(things: list[Any]) -> list[Any]:
    """Empty a list, and return what of it lives on: it is held by somebody else."""
    kept_alive = [thing for thing in things if not _can_be_referred_to(thing)]
    watched = [weakref.ref(thing) for thing in things if _can_be_referred_to(thing)]
    things.clear()
    gc.collect()
    return kept_alive + [thing for thing in (ref() for ref in watched) if thing is not None]


def _is_same_device(device: torch.device, other: torch.device | None) -> bool:
    # "cuda" is the current one, and there is one keep at a time.
    return other is not None and device.type == other.type and (None in (device.index, other.index) or device == other)


def _can_be_referred_to(thing: Any) -> bool:
    return hasattr(type(thing), "__weakref__") or isinstance(thing, nn.Module)


def _datasets(data: Any) -> Iterator[Any]:
    """A dataset, and those that it is a part or a chain of (`Subset`, `ConcatDataset`)."""
    yield data
    attributes = getattr(data, "__dict__", {})
    chained = attributes.get("datasets")
    for inner in (attributes.get("dataset"), *(chained if isinstance(chained, list | tuple) else ())):
        if inner is not None and inner is not data:
            yield from _datasets(inner)


def _parts(work: Any) -> Iterator[tuple[str, Any]]:
    """The functions and live objects of a workload; a function by itself."""
    if not isinstance(work, Workload):
        yield "work", work
        return
    for field in fields(work):
        value = getattr(work, field.name)
        if value is not None and field.name not in ("name", "data"):
            yield field.name, value
