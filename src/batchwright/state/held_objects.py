"""What a function holds: the model, optimizer, averages and counters that it changes, though nobody handed them in.

Promises:
- looks where a function can hold an object: its `self`, arguments bound by `functools.partial`, defaults, closure
  cells, and the globals that its code names, also by `module.name` in a module of the user's; in functions among these
  as well, so that a decorator hides nothing;
- looks one level into lists, tuples, dicts and plain objects, no deeper, and calls nothing of the user's;
- an object is found once, under the first name that leads to it.

What it cannot see: objects that the function asks another one for (`trainer.current().model`), and what an installed
library keeps for itself.
"""

from __future__ import annotations

import argparse
import dis
import enum
import functools
import io
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from types import (
    CellType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    NoneType,
    SimpleNamespace,
)
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from batchwright.state.process_state import put_back_of_generator
from batchwright.targets import is_installed_or_ours

_WALKED = (nn.Module, torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler)
# What is emptied and refilled, by methods of these classes: those of a subclass may do anything.
CONTAINERS = (OrderedDict, defaultdict, dict, list, deque, set)
UNCHANGING = frozenset({NoneType, bool, int, float, complex, str, bytes})
MOST_ENTRIES = 10_000
_MOST_DATA = 1_000


def can_be_kept(thing: Any) -> bool:
    """Whether `KeptState` knows how to put this back.

    >>> import random
    >>> can_be_kept(random.Random(0)), can_be_kept(nn.Linear), can_be_kept("weights.pt")
    (True, False, False)
    """
    if isinstance(thing, type):
        return False
    # Asked of the class: an object that makes up attributes as they are read would say yes to anything.
    has_state = all(callable(getattr(type(thing), name, None)) for name in ("state_dict", "load_state_dict"))
    return has_state or is_walked(thing) or put_back_of_generator(thing) is not None


def is_walked(thing: Any) -> bool:
    """Whether this trains, or is trained: its attributes are walked down to the tensors."""
    # The second half are optimizers that wrap another one and do not derive from torch's.
    return isinstance(thing, _WALKED) or all(hasattr(type(thing), n) for n in ("step", "zero_grad", "load_state_dict"))


def is_users_object(value: Any) -> bool:
    """Whether this is an object of a class that the user wrote, or a plain namespace: its attributes are its state."""
    return is_users_class(type(value)) and not isinstance(value, type)


def is_users_function(function: Any) -> bool:
    """Whether the user wrote this function."""
    return isinstance(function, FunctionType) and _is_users_file(function.__code__.co_filename)


def is_plain_data(value: Any) -> bool:
    """Whether an object of an installed class consists of numbers, text and tensors: an average, a meter, a config.

    >>> import string, threading
    >>> is_plain_data(string.Formatter()), is_plain_data(threading.Thread()), is_plain_data(3)
    (False, False, False)
    """
    attributes = getattr(value, "__dict__", None)
    if type(attributes) is not dict or isinstance(value, type | ModuleType | BaseException | enum.Enum):
        return False
    if type(value).__module__.partition(".")[0] in ("builtins", "torch", "batchwright"):
        return False
    return bool(attributes) and all(_is_data(entry) for entry in attributes.values())


def _is_data(value: Any) -> bool:
    if type(value) in UNCHANGING or is_tensor_or_array(value):
        return True
    if type(value) in (list, tuple, dict, set, deque) and len(value) <= _MOST_DATA:
        entries = value.values() if isinstance(value, dict) else value
        return all(type(entry) in UNCHANGING or is_tensor_or_array(entry) for entry in entries)
    return False


def is_tensor_or_array(value: Any) -> bool:
    """Whether this is a tensor, or an array of numpy's."""
    numpy = sys.modules.get("numpy")
    return isinstance(value, torch.Tensor) or (numpy is not None and isinstance(value, numpy.ndarray))


@cache
def _is_users_file(name: str) -> bool:
    # Cells of notebooks and code by exec have names in angle brackets, those of an interpreter too.
    return name.startswith(("<ipython", "<stdin", "<string", "<doctest")) or not is_installed_or_ours(name)


def is_users_class(kind: Any) -> bool:
    """Whether the user wrote this class."""
    return _is_users_class(kind)


@cache
def _is_users_class(kind: type) -> bool:
    if kind in (SimpleNamespace, argparse.Namespace):
        return True
    if issubclass(kind, type | ModuleType | BaseException | enum.Enum) or kind.__module__ == "builtins":
        return False
    module = sys.modules.get(kind.__module__)
    if module is None or module.__name__ == "__main__":
        return True
    file = getattr(module, "__file__", None)
    # Neither file nor spec: made by exec, as notebooks do.
    return getattr(module, "__spec__", None) is None if file is None else not is_installed_or_ours(file)


def slots_of(kind: Any) -> tuple[Any, ...]:
    """Return the slots of a class and its bases; not those of C, which look alike and are torch's and Python's own."""
    return _slots_of(kind)


@cache
def _slots_of(kind: type) -> tuple[Any, ...]:
    return tuple(
        member
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for name, member in vars(base).items()
        if isinstance(member, MemberDescriptorType) and name != "__weakref__"
    )


def holds_state(value: Any, depth: int = 4) -> bool:
    """Whether a value is, or leads to, a tensor, an array, a generator, or something that trains.

    >>> holds_state({"shadow": [torch.zeros(2)]}), holds_state(["a log", 3])
    (True, False)
    """
    if type(value) in UNCHANGING:
        return False
    if is_tensor_or_array(value) or isinstance(value, io.IOBase) or can_be_kept(value):
        return True
    if depth == 0:
        return False
    if isinstance(value, (*CONTAINERS, tuple)):
        entries = value.values() if isinstance(value, dict) else value
        return any(holds_state(entry, depth - 1) for entry in islice(entries, MOST_ENTRIES))
    if is_users_object(value):
        slots = [getattr(value, slot.__name__, None) for slot in slots_of(type(value))]
        return any(holds_state(entry, depth - 1) for entry in (*getattr(value, "__dict__", {}).values(), *slots))
    return False


def held_objects(function: Callable[..., Any]) -> dict[str, Any]:
    """Return what a function holds and `KeptState` can keep, by the name it goes under there.

    >>> import torch
    >>> def make_step():
    ...     model = torch.nn.Linear(2, 1)
    ...     optimizers = [torch.optim.SGD(model.parameters())]
    ...     def step(batch_size):
    ...         model(torch.ones(batch_size, 2)).sum().backward()
    ...         optimizers[0].step()
    ...     return step
    >>> list(held_objects(make_step()))
    ['model', 'optimizers[0]']
    """
    held: dict[str, Any] = {}
    met: set[int] = set()
    for name, value in _reached(function, {}):
        for inner_name, inner in _one_level(name, value):
            if id(inner) not in met and can_be_kept(inner):
                met.add(id(inner))
                # Two functions may use one name for different objects; neither must be lost.
                held[inner_name if inner_name not in held else f"{inner_name} ({len(held)})"] = inner
    return held


@dataclass(frozen=True)
class Reach:
    """Everything that a function names, and where its code may put another value under a name."""

    values: list[tuple[str, Any]]
    cells: list[CellType] = field(default_factory=list)
    stored_globals: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    caches: list[Any] = field(default_factory=list)
    functions: list[Any] = field(default_factory=list)


def reach_of(function: Callable[..., Any]) -> Reach:
    """Return what a function reaches.

    >>> def counting():
    ...     count = 0
    ...     def step(batch_size):
    ...         nonlocal count
    ...         count += batch_size
    ...     return step
    >>> reach = reach_of(counting())
    >>> reach.values, len(reach.cells)
    ([('count', 0)], 1)
    """
    seen: dict[int, Any] = {}
    reach = Reach(list(_reached(function, seen)))
    for inner in seen.values():
        if isinstance(inner, functools._lru_cache_wrapper):
            reach.caches.append(inner)
        elif isinstance(inner, FunctionType):
            reach.functions.append(inner)
            reach.cells.extend(inner.__closure__ or ())
            reach.stored_globals.extend((inner.__globals__, name) for name in _stored_names(inner.__code__))
    return reach


@functools.lru_cache(maxsize=4096)
def _stored_names(code: CodeType) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_stored_in(code)))


def _stored_in(code: CodeType) -> Iterator[str]:
    """Names that code binds under `global`."""
    yield from (
        str(one.argval) for one in dis.get_instructions(code) if one.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")
    )
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _stored_in(constant)


def _reached(function: Any, seen: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    """Yield everything that a function names, and that functions among it name, with the name."""
    if id(function) in seen:
        return
    seen[id(function)] = function
    if isinstance(function, MethodType):
        yield "self", function.__self__
        yield from _reached(function.__func__, seen)
    elif isinstance(function, functools.partial):
        bound = [(f"args[{i}]", value) for i, value in enumerate(function.args)]
        yield from _with_functions([*bound, *function.keywords.items()], seen)
        yield from _reached(function.func, seen)
    elif isinstance(function, FunctionType):
        yield from _with_functions(_held_by(function), seen)
        names = list(dict.fromkeys(_names_in(function.__code__)))
        named = [(name, function.__globals__[name]) for name in names if name in function.__globals__]
        for name, value in list(named):
            if isinstance(value, ModuleType) and not is_installed_or_ours(getattr(value, "__file__", None)):
                named += [(f"{name}.{inner}", vars(value)[inner]) for inner in names if inner in vars(value)]
        yield from named
        # Only into functions beside it or in another file of the user's: what a library's reach is the library's own.
        for _, value in named:
            inner = getattr(value, "__wrapped__", None) if isinstance(value, functools._lru_cache_wrapper) else value
            if isinstance(inner, FunctionType) and (
                inner.__globals__ is function.__globals__ or is_users_function(inner)
            ):
                yield from _reached(value, seen)
        yield from _reached(getattr(function, "__wrapped__", None), seen)
    elif isinstance(function, functools._lru_cache_wrapper):
        yield from _reached(function.__wrapped__, seen)
    elif can_be_kept(function):
        yield type(function).__name__, function
    elif function is not None and not isinstance(function, type):
        yield "self", function
        yield from _reached(type(function).__dict__.get("__call__"), seen)


def _with_functions(named: list[tuple[str, Any]], seen: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    yield from named
    for _, value in named:
        if isinstance(value, FunctionType | MethodType | functools.partial | functools._lru_cache_wrapper):
            yield from _reached(value, seen)


def _held_by(function: FunctionType) -> list[tuple[str, Any]]:
    """Return the defaults and closure cells of a function, by name."""
    code = function.__code__
    named: list[tuple[str, Any]] = []
    defaults = function.__defaults__ or ()
    positional = code.co_varnames[: code.co_argcount]
    named += zip(positional[len(positional) - len(defaults) :], defaults, strict=True)
    named += (function.__kwdefaults__ or {}).items()
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            named.append((name, cell.cell_contents))
        except ValueError:
            # Named before it is assigned, as in a function that closes over itself while being decorated.
            continue
    return named


def _names_in(code: CodeType) -> Iterator[str]:
    """Global names in a function's code and in the functions inside it; attribute names are among them, harmlessly."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _one_level(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a value, or what a container or a plain object holds."""
    if isinstance(value, list | tuple | dict) or can_be_kept(value):
        yield from _entries(name, value)
    elif not isinstance(value, type | ModuleType | FunctionType | MethodType | functools.partial):
        for key, inner in getattr(value, "__dict__", {}).items():
            yield from _entries(f"{name}.{key}", inner)


def _entries(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list | tuple):
        yield from ((f"{name}[{i}]", inner) for i, inner in enumerate(value))
    elif isinstance(value, dict):
        # Past its own `items`, which may import or build what it lists.
        yield from ((f"{name}[{key!r}]", inner) for key, inner in dict.items(value))
    else:
        yield name, value
