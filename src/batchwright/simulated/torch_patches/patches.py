"""How names of torch are replaced for a simulated run: `TorchPatches` applies `Patch`es, and undoes them.

The files beside this one list what they replace and apply nothing themselves. Replaces: threading.Thread.start, so that
threads which a run starts are inside of it.

Promises:
- one run at a time: a second thread that wants to trace waits until the first is through;
- only the thread that traces, and threads that it starts, meet what was put in; every other thread gets torch's own
  functions, classes and values, the very same objects;
- torch is as it was after every way out: a return, an error, Ctrl-C in the middle of applying or undoing, a fork;
- so are the modes of the thread, its grad mode, and whether backward runs in threads.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, update_wrapper
from itertools import chain
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.overrides import _get_current_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode

from batchwright.errors import CannotTraceError, InvalidInputError
from batchwright.state.process_state import INTERRUPTS

_MISSING: Any = object()


class Patch(NamedTuple):
    """`stands_in` in place of `place.name`: of a module, a class or a closure's cell.

    Threads outside get the original, or `outside` where one is given: what was there before the run.
    """

    place: Any
    name: str
    stands_in: Any
    outside: Any = _MISSING


def refusing(problem: str, remedy: str) -> Callable[..., None]:
    """Return what stands in for a call that cannot be simulated: it raises, and says why."""

    def refuse(*_: Any, **__: Any) -> None:
        raise CannotTraceError(problem, remedy=remedy)

    return refuse


def do_nothing(*_: Any, **__: Any) -> None:
    """Stand in for a call that has no effect here."""


@dataclass
class Scope:
    """One run, from its first patch to its last; threads that it starts hold the same one."""

    is_open: bool = True
    has_card: bool = False


class _Here(threading.local):
    """What the present thread is inside of."""

    scope: Scope | None = None


_here = _Here()


def is_inside() -> bool:
    """Whether this thread traces just now, or was started by a thread that does."""
    scope = _here.scope
    return scope is not None and scope.is_open


# What Dynamo compiles in a run is forgotten with it, so that it need not ask again; torch 2.10 cannot.
is_inside._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_on_simulated_card() -> bool:
    """Whether this thread, or the one that started it, runs on a simulated card just now."""
    scope = _here.scope
    return scope is not None and scope.is_open and scope.has_card


class TorchPatches:
    """One run; enter it in a `with` statement of your own frame, so that Ctrl-C cannot come between.

    >>> with TorchPatches(), applied([Patch(torch.cuda, "device_count", lambda: 3)]):
    ...     inside = torch.cuda.device_count()
    >>> inside, torch.cuda.device_count() == 3
    (3, False)
    """

    def __enter__(self) -> TorchPatches:
        # From here on Ctrl-C waits until this, or `__exit__`, is through.
        self._waiting = INTERRUPTS.waiting_where_needed(sys._getframe(1))
        self._waiting.__enter__()
        self._mark: int | None = None
        try:
            self._outer = _here.scope
            self._thread_state = _ThreadState()
            if is_inside():
                # A thread that a run started cannot wait for that run to end: the run may be waiting for it.
                if not _LOCK.acquire(blocking=False):
                    raise InvalidInputError(
                        "a thread that was started inside a simulated step cannot simulate another one."
                    )
                _LOCK.release()
            # In pieces, so that Ctrl-C, which waits while patches are applied, ends the wait.
            while not _LOCK.acquire(timeout=0.1):
                INTERRUPTS.deliver()
            self._mark = len(_applied)
            self._scope = _here.scope = Scope(has_card=is_on_simulated_card())
            _apply(_START_OF_THREADS)
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        steps: list[Callable[[], object]] = [partial(self._waiting.__exit__, None, None, None)]
        if self._mark is not None:
            steps += [_LOCK.release, self._close, self._thread_state.put_back, partial(_undo_to, self._mark)]
        raised: BaseException | None = None
        while steps:
            # Whatever raises in here (the handler of another signal, say) is raised in the end, after the rest.
            try:
                steps[-1]()
                steps.pop()
            except BaseException as error:
                if raised is not None:
                    steps.pop()  # tried twice
                raised = raised or error
        if raised is not None:
            raise raised

    def _close(self) -> None:
        self._scope.is_open = False
        _here.scope = self._outer


@contextmanager
def applied(*lists: Iterable[Patch]) -> Iterator[None]:
    """Have these stand in, within a run; later ones go over earlier ones."""
    assert is_inside(), "patches are applied within TorchPatches only"
    mark = len(_applied)
    try:
        for patch in chain.from_iterable(lists):
            _apply(patch)
        yield
    finally:
        _undo_to(mark)


def put_aside(place: type, name: str) -> Callable[[], None]:
    """Have a class be without what stands in it, as it was before the run; return how that is ended."""
    stands_in = vars(place).get(name)
    if not isinstance(stands_in, _Guarded):
        return do_nothing
    _put_back(place, name, stands_in.own)
    return partial(setattr, place, name, stands_in)


@contextmanager
def outside() -> Iterator[None]:
    """Let this thread meet torch as it is for a while, to set up something that stays."""
    scope, _here.scope = _here.scope, None
    try:
        yield
    finally:
        _here.scope = scope


@contextmanager
def undone(undo: Callable[[], None]) -> Iterator[None]:
    """Undo with the patches something else that a run does to the process; twice must be as good as once."""
    assert is_inside()
    mark = len(_applied)
    try:
        _applied.append(undo)
        yield
    finally:
        _undo_to(mark)


@contextmanager
def card_announced() -> Iterator[None]:
    """Have the simulated device say of itself that it is there, within a run."""
    scope = _here.scope
    assert scope is not None
    before, scope.has_card = scope.has_card, True
    try:
        yield
    finally:
        scope.has_card = before


# What is applied just now, innermost last: how each is undone. Only who holds the lock changes it.
_applied: list[Callable[[], None]] = []
_LOCK = threading.RLock()


def _undo_to(mark: int) -> None:
    while len(_applied) > mark:
        _applied[-1]()
        _applied.pop()


def _apply(patch: Patch) -> None:
    place, name, stands_in, _ = patch
    if isinstance(place, type):
        # Classes are asked through a descriptor, which hands every other thread the original itself.
        own = vars(place).get(name, _MISSING)
        kind = _GuardedData if hasattr(type(own), "__set__") else _Guarded
        _applied.append(partial(_put_back, place, name, own))
        setattr(place, name, kind(patch, own))
        return
    before = getattr(place, name, _MISSING)
    if isinstance(before, list):  # read as a global of its module, where no property can stand
        _applied.append(partial(_put_back, place, name, before))
        setattr(place, name, _GuardedList(before, stands_in))
        return
    if isinstance(place, ModuleType) and (isinstance(before, type) or not callable(before)):
        _apply_to_module(place, name, before, stands_in)
        return
    own = vars(place).get(name, _MISSING) if isinstance(place, ModuleType) else before
    _applied.append(partial(_put_back, place, name, own))
    setattr(place, name, _guarded_function(before, stands_in))


def _put_back(place: Any, name: str, own: Any) -> None:
    if own is not _MISSING:
        setattr(place, name, own)
    elif name in vars(place):
        delattr(place, name)


def _guarded_function(before: Callable[..., Any], stands_in: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(*args: Any, **kwargs: Any) -> Any:
        return (stands_in if is_inside() else before)(*args, **kwargs)

    return update_wrapper(guarded, before)


class _GuardedList(list[Any]):
    """A list that holds other things inside."""

    def __init__(self, before: list[Any], stands_in: list[Any]) -> None:
        super().__init__(before)
        self._stands_in = stands_in

    def __contains__(self, value: object) -> bool:
        return value in self._stands_in if is_inside() else super().__contains__(value)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._stands_in) if is_inside() else super().__iter__()


class _Guarded:
    """An attribute of a class that is another one inside."""

    def __init__(self, patch: Patch, own: Any) -> None:
        self.place, self.name, self.stands_in, self.outside = patch
        self.own = own
        if self.outside is _MISSING:
            self.outside = own

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if is_inside():
            return _bound(self.stands_in, instance, owner)
        if self.outside is not _MISSING:
            return _bound(self.outside, instance, owner)
        return getattr(super(self.place, owner if instance is None else instance), self.name)


class _GuardedData(_Guarded):
    """The same for a property, so that it goes on being asked before an instance's own attributes."""

    def __set__(self, instance: Any, value: Any) -> None:
        type(self.own).__set__(self.own, instance, value)


def _bound(value: Any, instance: Any, owner: Any) -> Any:
    bind = getattr(type(value), "__get__", None)
    return value if bind is None else bind(value, instance, owner)


def _apply_to_module(module: Any, name: str, before: Any, stands_in: Any) -> None:
    """Have a module answer for a class or a plain value: its type gets a property, its own names stay as they are."""
    kind: Any = type(module)
    if not issubclass(kind, _PatchedModule):
        _applied.append(partial(setattr, module, "__class__", kind))
        module.__class__ = type(kind.__name__, (_PatchedModule, kind), {})
        kind = type(module)
    own = vars(kind).get(name, _MISSING)
    _applied.append(partial(_put_back, kind, name, own))
    if isinstance(before, type) and isinstance(stands_in, type):
        stands_in = _class_for_both(before, stands_in)
    setattr(kind, name, _OfModule(name, own, stands_in))


class _PatchedModule(ModuleType):
    """A module some of whose names mean something else inside."""


class _OfModule:
    def __init__(self, name: str, below: Any, stands_in: Any) -> None:
        self.name, self.below, self.stands_in = name, below, stands_in

    def __get__(self, module: Any, owner: Any = None) -> Any:
        if is_inside():
            return self.stands_in
        try:
            return vars(module)[self.name]
        except KeyError:
            raise AttributeError(f"module {module.__name__!r} has no attribute {self.name!r}") from None

    def __set__(self, module: Any, value: Any) -> None:
        vars(module)[self.name] = value

    def __delete__(self, module: Any) -> None:
        vars(module).pop(self.name, None)


def _class_for_both(before: type, stands_in: type) -> type:
    """A library that is first imported inside keeps the class for good; outside it has to mean the original."""
    meta: Any = type(stands_in)

    class Meta(meta):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs) if is_inside() else before(*args, **kwargs)

        def __instancecheck__(self, value: object) -> bool:
            return isinstance(value, before) or super().__instancecheck__(value)

    return Meta(before.__name__, (stands_in,), {"__module__": before.__module__})


def start_inside(thread: threading.Thread) -> None:
    """Start a thread that is inside of what its starter is inside of."""
    scope, run = _here.scope, thread.run

    def run_inside() -> None:
        del thread.run
        _here.scope = scope
        run()

    thread.run = run_inside  # type: ignore[method-assign]
    _start(thread)


_start = threading.Thread.start
_START_OF_THREADS = Patch(threading.Thread, "start", start_inside)


class _ThreadState:
    """What torch keeps for each thread, as it was."""

    def __init__(self) -> None:
        self._num_modes = torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()
        self._has_gradients = torch.is_grad_enabled()
        self._has_threads = torch._C._is_multithreading_enabled()

    def put_back(self) -> None:
        """Leave the modes that an interrupt kept from being left, and the rest."""
        num_dispatch, num_function = self._num_modes
        _leave_modes(num_function, torch._C._len_torch_function_stack, _get_current_function_mode)
        _leave_modes(num_dispatch, torch._C._len_torch_dispatch_stack, _get_current_dispatch_mode)
        torch._C._set_grad_enabled(self._has_gradients)
        torch._C._set_multithreading_enabled(self._has_threads)


def _leave_modes(num_modes: int, count: Callable[[], int], current: Callable[[], Any]) -> None:
    while count() > num_modes:
        current().__exit__(None, None, None)


def _alone_after_fork() -> None:
    """A child has only the thread that forked: what another thread of the parent had put in has nobody to undo it."""
    global _LOCK
    if not is_inside():
        _undo_to(0)
        # The old lock may be held by a thread that is not here.
        _LOCK = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_alone_after_fork)
