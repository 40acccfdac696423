"""What a probe must give back: live objects copied before it and put back after it, however it ended.

Promises:
- weights, buffers, gradients, optimizer state, scalers, schedulers, modes, flags and random state come back bit for
  bit, in the tensor objects and the storage that they were in;
- entries that a probe made are gone, half-made ones too; entries that it removed are back, in their order;
- a tensor is copied once, to the CPU, however many names it has; one on the meta device is not copied;
- a thing that cannot be put back does not keep the others from it.

Not through `load_state_dict`: an optimizer's casts fp32 moments of a bf16 parameter to bf16, and puts new tensors in
place of the old. Instead the attributes of an object are walked, through lists and dicts, down to tensors, and each
of these is put back in place. An object of any other class met on the way, such as a config, is kept as a reference:
the attribute names it again, but what a probe changed inside of it stays changed.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
from collections import OrderedDict, defaultdict, deque
from functools import partial
from types import FunctionType, NoneType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from batchwright.errors import InvalidInputError
from batchwright.state.kept_tensor import KeptTensor, Spans, loaded_again, turn_into
from batchwright.state.random_state import put_back_of_generator, random_sources
from batchwright.units import counted, shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_WALKED = (nn.Module, torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler)
# Their subclasses may do anything when an entry is set, so only these are emptied and refilled.
_CONTAINERS = (dict, OrderedDict, defaultdict, list, deque, set)
_UNCHANGING = frozenset({NoneType, bool, int, float, str, bytes, FunctionType})
_ACCEPTED = (
    "a module, an optimizer, a learning-rate scheduler, a GradScaler, a random generator of torch, numpy or Python, "
    "or anything with state_dict() and load_state_dict()"
)


class KeptState:
    """Copies of live objects, taken when it is made, put back as often as `restore` is called.

    >>> model = nn.Linear(2, 1)
    >>> weight = model.weight.tolist()
    >>> state = KeptState([model])
    >>> model.weight.data = torch.zeros(5, 5)
    >>> state.restore()
    >>> model.weight.tolist() == weight
    True
    >>> state.covered[0]
    'weights and buffers of Linear (2 tensors)'

    The random state of torch, Python, the accelerator and, where it is imported, numpy is always among them.
    """

    def __init__(self, objects: Iterable[Any] = (), *, accelerator: torch.device | None = None) -> None:
        self._put_backs: list[tuple[str, Callable[[], object]]] = []
        # Objects, not just their ids: an id is unique only as long as its object lives.
        self._met: dict[int, Any] = {}
        self._spans: Spans = {}
        self._words: dict[int, str] = {}
        self._owner = "the random state"
        sources = random_sources(accelerator)
        for put_back in sources.values():
            self._later(put_back)
        self._random_words = f"random state of {', '.join(sources)}"
        for thing in objects:
            self.keep(thing)

    @property
    def covered(self) -> tuple[str, ...]:
        """What comes back, in words."""
        return (*self._words.values(), self._random_words)

    def keep(self, thing: Any) -> None:
        """Copy a thing as it is now; one that is kept already stays as it was then."""
        if id(thing) in self._words:
            return
        if not can_be_kept(thing):
            raise InvalidInputError(f"what a probe gives back must be {_ACCEPTED}; received {shortened(thing)}.")
        self._owner = type(thing).__name__
        with torch.inference_mode(mode=False), torch.no_grad():
            if _is_walked(thing) or put_back_of_generator(thing):
                self._walk(thing)
            else:
                self._later(loaded_again(thing.load_state_dict, thing.state_dict()))
        self._words[id(thing)] = _words_for(thing)

    def keep_all(self, things: Iterable[Any]) -> tuple[str, ...]:
        """Keep what can be kept, and say of the rest why not: an idle data loader of accelerate's has no state yet."""
        not_kept = []
        for thing in things:
            try:
                self.keep(thing)
            except Exception as error:
                # What a probe trains must come back, or there must be no probe.
                if _is_walked(thing) or not can_be_kept(thing):
                    raise
                why = "it has a state_dict that raises or cannot be copied"
                not_kept.append(f"{type(thing).__name__}: {why} ({type(error).__name__})")
        return tuple(not_kept)

    def restore(self) -> None:
        """Put everything back, all that can be; what could not is raised at the end, as an `ExceptionGroup`."""
        failures: list[Exception] = []
        interrupt: KeyboardInterrupt | None = None
        with torch.inference_mode(mode=False), torch.no_grad():
            # Backwards: what was kept first has the last word, random state after all that may draw from it, and a
            # gradient has its own shape and device again before its parameter receives it.
            for owner, put_back in reversed(self._put_backs):
                try:
                    try:
                        put_back()
                    except KeyboardInterrupt as stop:
                        # Each can be repeated, and half of it is worse than an interrupt that waits.
                        interrupt = stop
                        put_back()
                except Exception as error:
                    error.add_note(f"while putting back {owner}")
                    failures.append(error)
        problem = f"{counted(len(failures), 'part')} could not be put back as before the probe; all others were"
        if interrupt is not None:
            if failures:
                interrupt.add_note(f"{problem}: {shortened(failures, 400)}")
            raise interrupt
        if failures:
            raise ExceptionGroup(problem, failures)

    def _later(self, put_back: Callable[..., object], *arguments: Any) -> None:
        self._put_backs.append((self._owner, partial(put_back, *arguments)))

    def _walk(self, value: Any) -> None:
        """Keep what can change in place: the value itself, and what it leads to."""
        if type(value) in _UNCHANGING or id(value) in self._met:
            return
        self._met[id(value)] = value
        numpy = sys.modules.get("numpy")
        if isinstance(value, torch.Tensor):
            kept_tensor = KeptTensor(value)
            self._later(kept_tensor.put_back)
            for part in kept_tensor.parts:
                self._walk(part)
            if put_back := kept_tensor.copy_elements(self._spans):
                self._later(put_back)
        elif type(value) in _CONTAINERS:
            self._later(_refill, value, copy.copy(value))
            for inner in list(value.values() if isinstance(value, dict) else value):
                self._walk(inner)
        elif isinstance(value, tuple):
            for inner in value:
                self._walk(inner)
        elif numpy is not None and isinstance(value, numpy.ndarray):
            if value.flags.writeable:
                self._later(numpy.copyto, value, value.copy())
        elif _is_walked(value):
            self._keep_attributes(value)
        elif put_back := put_back_of_generator(value):
            self._later(put_back)

    def _keep_attributes(self, thing: Any) -> None:
        self._later(turn_into, thing, type(thing))
        self._walk(vars(thing))
        if isinstance(thing, nn.Module):
            # A scripted module holds them elsewhere than in its attributes.
            for tensor in (*thing.parameters(recurse=False), *thing.buffers(recurse=False)):
                self._walk(tensor)
            if type(thing).get_extra_state is not nn.Module.get_extra_state:
                # Comes back before the attributes do: setting it may replace tensors that they name.
                self._later(loaded_again(thing.set_extra_state, thing.get_extra_state()))


@contextlib.contextmanager
def kept(objects: Iterable[Any] = (), *, accelerator: torch.device | None = None) -> Iterator[KeptState]:
    """Put objects and random state back on the way out, whatever happened inside.

    >>> import random
    >>> with kept() as state:
    ...     first = random.random()
    >>> random.random() == first
    True
    """
    state = KeptState(objects, accelerator=accelerator)
    try:
        yield state
    finally:
        try:
            state.restore()
        finally:
            gc.collect()


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
    return has_state or _is_walked(thing) or put_back_of_generator(thing) is not None


def _is_walked(thing: Any) -> bool:
    # The second half are optimizers that wrap another one and do not derive from torch's.
    return isinstance(thing, _WALKED) or all(hasattr(type(thing), n) for n in ("step", "zero_grad", "load_state_dict"))


def _words_for(thing: Any) -> str:
    name = type(thing).__name__
    if isinstance(thing, nn.Module):
        tensors = {id(tensor) for tensor in (*thing.parameters(), *thing.buffers())}
        return f"weights and buffers of {name} ({counted(len(tensors), 'tensor')})"
    return f"random state of a {name}" if put_back_of_generator(thing) else f"state of {name}"


def _refill(container: Any, before: Any) -> None:
    """Put the very entries back that a container had; one that still has them is left alone."""
    if _identities(container) != _identities(before):
        container.clear()
        (container.extend if hasattr(container, "extend") else container.update)(before)


def _identities(container: Any) -> list[int]:
    return [id(entry) for entry in (*container, *(container.values() if isinstance(container, dict) else ()))]
