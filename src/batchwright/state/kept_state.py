"""What a probe must give back: live objects copied before it and put back after it, however it ended.

Promises:
- weights, buffers, gradients, optimizer state, scalers, schedulers, modes, flags and random state come back bit for
  bit, in the tensor objects and the storage that they were in;
- entries that a probe made are gone, half-made ones too; entries that it removed are back, in their order;
- a tensor is copied once, to the CPU, however many names it has; one on the meta device is not copied;
- a thing that cannot be put back does not keep the others from it.

Not through `load_state_dict`: an optimizer's casts fp32 moments of a bf16 parameter to bf16, and puts new tensors in
place of the old. Instead the attributes of an object are walked, through lists, dicts and objects of the user's own
classes, down to tensors, and each of these is put back in place; also what hooks and other functions met on the way
hold. An object of an installed class is looked into only where it consists of numbers, text and tensors (an average, a
config). Any other is kept as a reference: it is named again, and is listed where what it holds changed.

Of a trace, which computes on fake tensors, only what names what is kept, and elements of small tensors: no other real
element is written by it.
"""

from __future__ import annotations

import contextlib
import io
import operator
import sys
from collections.abc import Callable, Iterable
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from batchwright.errors import InvalidInputError
from batchwright.state.held_objects import (
    CONTAINERS,
    MOST_ENTRIES,
    UNCHANGING,
    Reach,
    can_be_kept,
    holds_state,
    is_plain_data,
    is_users_class,
    is_users_function,
    is_users_object,
    is_walked,
    reach_of,
    slots_of,
)
from batchwright.state.kept_tensor import KeptTensor, Spans, loaded_again, num_bytes_of, turn_into
from batchwright.state.process_state import put_back_of_generator, random_sources
from batchwright.units import counted, format_bytes, shortened

# What functions hold besides models and optimizers may be a whole dataset.
_MOST_HELD_BYTES, _MOST_VALUES = 256 * 2**20, 200_000
# Values of tensors up to a few KiB are known to a trace, which writes them for real: counters of steps, flags, lengths.
_LARGEST_COUNTER_BYTES = 2**20
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

    The random state of torch, Python, the accelerator and, where it is imported, numpy is always among them. Without
    `copies_elements` the elements of tensors in modules and optimizers are not copied: for a trace.
    """

    def __init__(
        self,
        objects: Iterable[Any] = (),
        *,
        accelerator: torch.device | None = None,
        copies_elements: bool = True,
        keeps_random: bool = True,
    ) -> None:
        self.copies_elements = copies_elements
        self._not_kept: dict[str, None] = {}
        self._logs: list[tuple[str, list[Any], int]] = []
        self._watched: list[tuple[str, Any, dict[str, Any]]] = []
        self.cells: list[CellType] = []
        self.stored_globals: list[tuple[dict[str, Any], str]] = []
        self._is_held = False
        self._held_bytes = self._num_held = 0
        self._put_backs: list[tuple[str, Callable[[], object]]] = []
        # Objects, not just their ids: an id is unique only as long as its object lives.
        self._met: dict[int, Any] = {}
        self._spans: Spans = {}
        self._words: dict[int, str] = {}
        self._owner = "the random state"
        sources = random_sources(accelerator) if keeps_random else {}
        for put_back in sources.values():
            self._later(put_back)
        self._random_words = f"random state of {', '.join(sources)}"
        for thing in objects:
            self.keep(thing)

    @property
    def covered(self) -> tuple[str, ...]:
        """What comes back, in words."""
        held = (f"what the functions hold ({counted(self._num_held, 'value')})",) if self._num_held else ()
        return (*self._words.values(), *held, self._random_words)

    @property
    def not_kept(self) -> tuple[str, ...]:
        """What does not, as far as it is known by now."""
        logs = (f"{name}: what was appended to it" for name, log, length in self._logs if len(log) > length)
        changed = (
            f"{name or 'a value'}: what changed inside of a {type(thing).__name__} of {type(thing).__module__}"
            for name, thing, before in self._watched
            if (now := vars(thing)).keys() != before.keys() or any(now[key] is not before[key] for key in before)
        )
        return tuple(dict.fromkeys((*self._not_kept, *logs, *changed)))

    @property
    def values(self) -> Iterable[Any]:
        """Everything that was met: objects, containers and tensors."""
        return list(self._met.values())

    def keep(self, thing: Any) -> None:
        """Copy a thing as it is now; one that is kept already stays as it was then."""
        if id(thing) in self._words:
            return
        if not can_be_kept(thing):
            raise InvalidInputError(f"what a probe restores must be {_ACCEPTED}; received {shortened(thing)}.")
        self._owner = type(thing).__name__
        # A trace that is under way must not take the copies for its own.
        outside = torch._C.DisableTorchFunction(), _disable_current_modes()
        with outside[0], outside[1], torch.inference_mode(mode=False), torch.no_grad():
            if is_walked(thing) or put_back_of_generator(thing):
                self._walk(thing)
            else:
                self._later(loaded_again(thing.load_state_dict, thing.state_dict()))
        self._words[id(thing)] = _words_for(thing)

    def has_met(self, thing: Any) -> bool:
        """Whether a thing is kept, by itself or as part of another."""
        return id(thing) in self._met

    def keep_all(self, things: Iterable[Any]) -> tuple[str, ...]:
        """Keep what can be kept, and say of the rest why not: an idle data loader of accelerate's has no state yet."""
        not_kept = []
        for thing in things:
            try:
                self.keep(thing)
            except Exception as error:
                # What a probe trains must come back, or there must be no probe.
                if is_walked(thing) or not can_be_kept(thing):
                    raise
                reason = "it has a state_dict that raises or cannot be copied"
                not_kept.append(f"{type(thing).__name__}: {reason} ({type(error).__name__})")
        return tuple(not_kept)

    def keep_held(self, reach: Reach) -> None:
        """Keep what functions hold besides such things: tensors, numbers, lists, tables and objects of their own.

        A list that a function names and appends numbers or text to is a log: it stays as the function leaves it, and
        is listed.
        """
        owner, self._owner = self._owner, "what the functions hold"
        was_held, self._is_held = self._is_held, True
        met_before = len(self._met)
        for function in reach.functions:
            self._met.setdefault(id(function), function)
        for cell in reach.cells:
            if id(cell) not in self._met:
                self._met[id(cell)] = cell
                self.cells.append(cell)
                self._later(_refill_cell, cell, *_contents(cell))
        for namespace, name in reach.stored_globals:
            self.stored_globals.append((namespace, name))
            self._later(_rebind, namespace, name, *([namespace[name]] if name in namespace else []))
        for cached in reach.caches:
            if cached.cache_info().currsize == 0:
                self._later(cached.cache_clear)
        try:
            with torch.inference_mode(mode=False), torch.no_grad():
                for name, value in reach.values:
                    self._walk(value, name, is_named=True)
        finally:
            self._is_held, self._owner = was_held, owner
        if not was_held:
            self._num_held += len(self._met) - met_before

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

    def _walk(self, value: Any, name: str = "", *, is_named: bool = False) -> None:
        """Keep what can change in place: the value itself, and what it leads to."""
        if type(value) in UNCHANGING or id(value) in self._met:
            return
        if self._is_held and len(self._met) >= _MOST_VALUES:
            self._not_kept[f"more than {_MOST_VALUES:,} values are held; the rest was not looked at"] = None
            return
        self._met[id(value)] = value
        numpy = sys.modules.get("numpy")
        if isinstance(value, torch.Tensor):
            self._keep_tensor(value, name)
        elif isinstance(value, CONTAINERS):
            self._keep_container(value, name, is_named=is_named)
        elif isinstance(value, tuple):
            for inner in value:
                self._walk(inner, name)
        elif numpy is not None and isinstance(value, numpy.ndarray):
            if value.flags.writeable and self._may_copy(value.nbytes, name, "array"):
                self._later(numpy.copyto, value, value.copy())
        elif is_walked(value):
            self._keep_attributes(value, name)
        elif put_back := put_back_of_generator(value):
            self._later(put_back)
        elif isinstance(value, io.IOBase):
            if not value.closed and value.readable() and value.seekable() and not value.writable():
                self._later(_seek, value, value.tell())
        elif isinstance(value, FunctionType):
            if is_users_function(value):
                self.keep_held(reach_of(value))
        elif isinstance(value, MethodType):
            self._walk(value.__self__, name)
            self._walk(value.__func__, name)
        elif isinstance(value, partial):
            for inner in (value.func, value.args, value.keywords):
                self._walk(inner, name)
        elif isinstance(value, type):
            if is_users_class(value):
                self._keep_class(value, name)
        elif is_users_object(value) or is_plain_data(value):
            self._keep_attributes(value, name)
        elif hasattr(type(value), "__next__"):
            how_far = f"how far a {type(value).__name__} has been read cannot be put back"
            self._not_kept[f"{name or 'a value'}: {how_far}"] = None
        elif type(attributes := getattr(value, "__dict__", None)) is dict and not isinstance(value, ModuleType):
            # Of a class that is not the user's: what else hangs on it, nobody here knows.
            self._watched.append((name, value, dict(attributes)))

    def _keep_container(self, value: Any, name: str, *, is_named: bool) -> None:
        if not self._may_copy(8 * len(value), name, type(value).__name__):
            return
        is_log = is_named and self._is_held and type(value) is list
        before = list(value.items() if isinstance(value, dict) else value)
        self._later(_refill, value, before, is_log)
        if is_log:
            self._logs.append((name, value, len(value)))
        if type(getattr(value, "__dict__", None)) is dict:
            self._walk(value.__dict__, name)
        entries = [entry for _, entry in before] if isinstance(value, dict) else before
        if not self._is_held or len(value) <= MOST_ENTRIES:
            for inner in entries:
                self._walk(inner, name)
        elif any(type(entry) not in UNCHANGING for entry in entries):
            self._not_kept[f"{name or 'a value'}: what changes inside of its {len(value):,} entries"] = None

    def _keep_class(self, kind: type, name: str) -> None:
        """Keep what a class of the user's holds for all its objects, and what its methods hold."""
        attributes = {key: value for key, value in vars(kind).items() if not _is_dunder(key)}
        self._later(_put_back_class, kind, attributes)
        for key, value in attributes.items():
            self._walk(getattr(value, "__func__", getattr(value, "fget", value)), f"{kind.__name__}.{key}")
        for key, value in vars(kind).items():
            if _is_dunder(key) and isinstance(value, FunctionType):
                self._walk(value, kind.__name__)

    def _keep_tensor(self, tensor: torch.Tensor, name: str) -> None:
        kept_tensor = KeptTensor(tensor)
        self._later(kept_tensor.put_back)
        for part in kept_tensor.parts:
            self._walk(part, name)
        if not self._is_held and not self.copies_elements and num_bytes_of(tensor) > _LARGEST_COUNTER_BYTES:
            return
        if self._is_held and not self._may_copy(num_bytes_of(tensor), name, "tensor"):
            return
        if put_back := kept_tensor.copy_elements(self._spans):
            self._later(put_back)

    def _may_copy(self, num_bytes: int, name: str, kind: str) -> bool:
        """Whether what a function holds is small enough to be copied; what belongs to a model always is."""
        if not self._is_held:
            return True
        if self._held_bytes + num_bytes > _MOST_HELD_BYTES:
            size = format_bytes(num_bytes)
            self._not_kept[f"{name or 'a value'}: a {kind} of {size} is too large to be copied"] = None
            return False
        self._held_bytes += num_bytes
        return True

    def _keep_attributes(self, thing: Any, name: str = "") -> None:
        was_held, self._is_held = self._is_held, self._is_held and not is_walked(thing)
        try:
            self._later(turn_into, thing, type(thing))
            for kind in type(thing).__mro__:
                if is_users_class(kind):
                    self._walk(kind, name)
            for slot in slots_of(type(thing)):
                with contextlib.suppress(AttributeError):  # never assigned
                    value = slot.__get__(thing)
                    self._later(slot.__set__, thing, value)
                    self._walk(value, slot.__name__)
            self._walk(getattr(thing, "__dict__", None), name)
            if isinstance(thing, nn.Module):
                # A scripted module holds them elsewhere than in its attributes.
                for tensor in (*thing.parameters(recurse=False), *thing.buffers(recurse=False)):
                    self._walk(tensor)
                if isinstance(thing, torch.jit.ScriptModule):
                    for child in thing.children():
                        self._walk(child)
                    self._later(setattr, thing, "training", thing.training)
                if type(thing).get_extra_state is not nn.Module.get_extra_state:
                    # Comes back before the attributes do: setting it may replace tensors that they name.
                    self._later(loaded_again(thing.set_extra_state, thing.get_extra_state()))
        finally:
            self._is_held = was_held


def _words_for(thing: Any) -> str:
    name = type(thing).__name__
    if isinstance(thing, nn.Module):
        tensors = {id(tensor) for tensor in (*thing.parameters(), *thing.buffers())}
        return f"weights and buffers of {name} ({counted(len(tensors), 'tensor')})"
    return f"random state of a {name}" if put_back_of_generator(thing) else f"state of {name}"


def _seek(file: Any, position: int) -> None:
    if not file.closed:
        file.seek(position)


def _contents(cell: CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _refill_cell(cell: CellType, *before: Any) -> None:
    if before:
        cell.cell_contents = before[0]
    elif _contents(cell):
        del cell.cell_contents


def _rebind(namespace: dict[str, Any], name: str, *before: Any) -> None:
    if before:
        namespace[name] = before[0]
    else:
        namespace.pop(name, None)


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _put_back_class(kind: type, before: dict[str, Any]) -> None:
    for name in [name for name in vars(kind) if not _is_dunder(name) and name not in before]:
        delattr(kind, name)
    for name, value in before.items():
        if vars(kind).get(name) is not value:
            setattr(kind, name, value)


def _refill(container: Any, before: list[Any], is_log: bool) -> None:
    """Put the very entries back that a container had; one that still has them is left alone."""
    now = list(container.items() if isinstance(container, dict) else container)
    if len(now) == len(before) and all(map(_is_same_entry, now, before)):
        return
    has_grown = is_log and len(now) > len(before) and all(map(operator.is_, now, before))
    if has_grown and not any(map(holds_state, now[len(before) :])):
        return
    kind: Any = next(kind for kind in CONTAINERS if isinstance(container, kind))
    kind.clear(container)
    (kind.extend if hasattr(kind, "extend") else kind.update)(container, before)


def _is_same_entry(now: Any, before: Any) -> bool:
    if type(now) is tuple and type(before) is tuple and len(now) == len(before) == 2:  # of a dict, made anew
        return now is before or (now[0] is before[0] and now[1] is before[1])
    return now is before
