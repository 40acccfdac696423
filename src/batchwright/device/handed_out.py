"""Calls a function of the user's that hands out a model, an optimizer or a scaler.

Promises:
- what it hands out and somebody else holds, too (`model=lambda: model`), is kept before anything is done with it;
- what it builds anew is nobody's, and costs neither a copy nor, as a rule, a second call.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from batchwright.state.random_state import random_sources
from batchwright.state.untouched import current_keep, survivors

if TYPE_CHECKING:
    from collections.abc import Callable


def handed_out(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what the function does."""
    keep = current_keep()
    if keep.knows_builder(function):
        return function(*arguments)
    # Under a trace no number is drawn for real.
    sources = {} if torch._C._len_torch_dispatch_stack() else random_sources(None)
    made = [function(*arguments)]
    shared = [thing for thing in _each(made[0]) if keep.state.has_met(thing)]
    for thing in shared:
        keep.keep_live(thing)
    if len(shared) == len(_each(made[0])) or _are_ours_alone(made):
        return made[0]
    del shared
    things = _each(made.pop())
    alive = survivors(things)
    for thing in alive:
        keep.keep_live(thing)
    if not alive:
        keep.note_builder(function)
    for put_back in sources.values():
        put_back()
    return function(*arguments)


def _each(made: Any) -> list[Any]:
    return list(made) if isinstance(made, list | tuple) else [made]


def _are_ours_alone(made: list[Any]) -> bool:
    """Whether nothing but what was returned refers to the objects; one that refers to itself seems shared."""
    return all(count <= _ALONE for count in _references(made))


def _references(made: list[Any]) -> list[int]:
    inside = made[0] if isinstance(made[0], list | tuple) else made
    return [sys.getrefcount(thing) for thing in inside]


_ALONE = _references([object()])[0]
