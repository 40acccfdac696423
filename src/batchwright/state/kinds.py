"""What kind of thing an object is, and so how its state is kept.

Promises:
- nothing of the user's is called: classes are looked at, and attributes that lie there.
"""

from __future__ import annotations

import argparse
import enum
import io
import sys
from collections import OrderedDict, defaultdict, deque
from functools import cache
from itertools import islice
from types import FunctionType, MemberDescriptorType, ModuleType, NoneType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from batchwright.state.random_state import put_back_of_generator
from batchwright.users_code import is_installed_or_ours

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


def is_users_class(kind: Any) -> bool:
    """Whether the user wrote this class."""
    return _is_users_class(kind)


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
    """The slots of a class and its bases; not those of C, which look alike and are torch's and Python's own."""
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
    numpy = sys.modules.get("numpy")
    if isinstance(value, torch.Tensor | io.IOBase) or (numpy is not None and isinstance(value, numpy.ndarray)):
        return True
    if can_be_kept(value):
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
