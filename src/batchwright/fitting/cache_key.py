"""What an answer depends on, as one hash: the key under which it is remembered.

Promises:
- the same work gives the same hash in another process;
- the model is built on the meta device and two samples are made; no optimizer is made and no step is run;
- random state comes back as it was; whatever goes wrong on the way, the answer is None, never an exception.

In it: the model's structure; the code of the workload's functions and what they hold, so the optimizer and its settings
too; with a target, the bytes of its file and of every file of the user's that is imported; shapes and dtypes of two
samples; the device; the bytes there are; what steers allocators; versions. Not in it: values inside tensors, files that
the user's code reads, and what hides in objects of installed packages beyond their plain attributes. A hash that should
have changed and did not costs no wrong size, for the answer is probed again, but perhaps one that is no longer the
largest.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import platform
import random
import re
import sys
import warnings
from collections import deque
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, cached_property, partial
from importlib import metadata
from itertools import islice
from pathlib import Path, PurePath
from types import BuiltinFunctionType, CodeType, EllipsisType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from batchwright import __version__
from batchwright.device.batches import make_batch, tensors_in
from batchwright.device.device import open_device
from batchwright.state.untouched import untouched
from batchwright.targets import Target, is_installed_or_ours
from batchwright.trace.fake_model import build_skeleton

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from batchwright.workload import Workload


# Names for code and for the values it holds: plain data that another process would write in the same way.
#
# Promises:
# - no address, no `hash()`, no order of a set is in a name;
# - of the user's functions and classes the code is in it, and whatever that reaches; of installed ones the name, and
#   the
#   package is noted, for its version;
# - it ends, with an error where more is held than can be named in reasonable time.

# Of a longer container its length and its first entries are enough; a graph of more values is nobody's set-up.
_MOST_ENTRIES, _MOST_NAMES = 1000, 300_000
_NAMED_BY_REPR = (
    *(float, complex, range, slice, EllipsisType, PurePath, Enum),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class UnnameableError(Exception):
    """More is held than can be named in reasonable time."""


class Names:
    """Names of values. Functions, classes and objects are numbered as they are met, and described once, at the end.

    >>> def names_of(*values):
    ...     names = Names()
    ...     return [names.of(value) for value in values], names.objects()
    >>> names_of(3, "a", {1.5})
    ([3, 'a', ['builtins.set', ['["builtins.float", "1.5"]']]], [])
    >>> names_of(nn.ReLU, nn.ReLU)
    ([{'see': 0}, {'see': 0}], [['class', 'torch.nn.modules.activation.ReLU']])
    >>> names_of(lambda x: x + 1) == names_of(lambda x: x + 1), names_of(lambda x: x + 1) == names_of(lambda x: x + 2)
    (True, False)
    """

    def __init__(self) -> None:
        # Queued, not described on the spot: the user's functions can call each other deeper than Python recurses. And
        # held, because an id is unique only as long as its object lives.
        self._queue: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._num_left = _MOST_NAMES
        self.packages: set[str] = set()

    def of(self, value: Any, *, follow: bool = True) -> Any:
        """Return the name of a value; without `follow`, what is neither plain nor a container goes by its type."""
        if value is None or isinstance(value, bool | int | str):
            return value
        self._num_left -= 1
        if self._num_left < 0:
            raise UnnameableError
        numpy = sys.modules.get("numpy")
        kind = _type_name(type(value))
        if isinstance(value, bytes):
            return [kind, hashlib.sha256(value).hexdigest()]
        if isinstance(value, _NAMED_BY_REPR):
            return [kind, _ADDRESS.sub("", repr(value))]
        if isinstance(value, CodeType):
            arguments = value.co_varnames[: value.co_argcount + value.co_kwonlyargcount]
            constants = [self.of(constant) for constant in value.co_consts]
            return [kind, value.co_code.hex(), constants, list(value.co_names), list(arguments)]
        if isinstance(value, torch.Tensor):
            if is_lazy(value):
                return [kind, "lazy"]
            # Numbered, so that tied weights differ from two of the same shape.
            return [kind, list(value.shape), str(value.dtype), value.requires_grad, self._number(value)]
        if numpy is not None and isinstance(value, numpy.ndarray):
            return [kind, list(value.shape), str(value.dtype)]
        if isinstance(value, list | tuple | deque):
            return [kind, len(value), [self.of(entry, follow=follow) for entry in islice(value, _MOST_ENTRIES)]]
        if isinstance(value, set | frozenset):
            return [kind, sorted(json.dumps(self.of(entry, follow=follow), sort_keys=True) for entry in value)]
        if isinstance(value, dict):
            pairs = islice(dict.items(value), _MOST_ENTRIES)
            return [kind, len(value), [[self.of(key, follow=False), self.of(v, follow=follow)] for key, v in pairs]]
        return {"see": self._number(value)} if follow else [kind]

    def objects(self) -> list[Any]:
        """Describe everything that was numbered, and what is met on the way."""
        return [self._description(value) for value in self._queue]

    def _number(self, value: Any) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._queue)
            self._queue.append(value)
        return self._numbers[id(value)]

    def _description(self, value: Any) -> Any:
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, ModuleType):
            return [
                "module",
                Path(vars(value).get("__file__") or "").name if _is_users(vars(value)) else value.__name__,
            ]
        if isinstance(value, torch.Tensor):
            return None
        kind = self.of(type(value))
        if isinstance(value, MethodType):
            return [kind, self.of(value.__func__), self.of(value.__self__)]
        if isinstance(value, partial):
            return [kind, self.of([value.func, value.args, value.keywords])]
        if isinstance(value, property | staticmethod | classmethod | cached_property):
            return [kind, self.of([getattr(value, name, None) for name in ("__func__", "fget", "func")])]
        if isinstance(value, BuiltinFunctionType):
            return [kind, str(value.__module__), value.__qualname__]
        if is_dataclass(value) and not hasattr(value, "__dict__"):
            return [kind, [[field.name, self.of(getattr(value, field.name, None))] for field in fields(value)]]
        return [kind, self._attributes(value)]

    def _function(self, function: FunctionType) -> Any:
        held = [self.of(function.__defaults__), self.of(function.__kwdefaults__)]
        for cell in function.__closure__ or ():
            try:
                held.append(self.of(cell.cell_contents))
            except ValueError:  # named before it is assigned
                held.append("empty")
        around = function.__globals__
        if not _is_users(around):
            self._note_package(function.__module__)
            # Decorators of installed packages hold the user's functions; what else they reach is their own.
            return ["function", self.of(function.__code__), held]
        used = sorted(set(_names_in(function.__code__)))
        return ["function", self.of(function.__code__), held, self._values_of(around, used, set())]

    def _values_of(self, namespace: dict[str, Any], used: list[str], entered: set[int]) -> list[Any]:
        """Name what code finds under global names; in the user's own modules also what it reads from them."""
        found: list[Any] = []
        for name in used:
            if name not in namespace or name in ("__name__", "__file__", "__builtins__"):
                continue
            value = namespace[name]
            found.append([name, self.of(value)])
            if isinstance(value, ModuleType) and _is_users(vars(value)) and id(value) not in entered:
                found.append(self._values_of(vars(value), used, entered | {id(value)}))
        return found

    def _class(self, kind: type) -> Any:
        if not _is_users(_namespace_of(kind)):
            self._note_package(kind.__module__)
            return ["class", _type_name(kind)]
        members = {
            name: self.of(member)
            for name, member in sorted(vars(kind).items())
            # Python keeps notes of its own in a class, and some appear only when it is first copied or pickled.
            if isinstance(member, FunctionType) or not (name.startswith("__") and name.endswith("__"))
        }
        return ["class", kind.__qualname__, [self.of(base) for base in kind.__bases__], members]

    def _attributes(self, value: Any) -> list[Any]:
        """Name the attributes of an object. Where its class is installed, not all of them say what it was set to.

        Private numbers there are counters and hashes, private containers caches, and objects of loggers and the like
        lead to the state of the whole process.
        """
        is_module = isinstance(value, nn.Module)
        is_users = _is_users(_namespace_of(type(value)))
        follow = is_users or is_module or is_dataclass(value)
        found: list[Any] = []
        if is_module:
            parts = (value.named_parameters(recurse=False), value.named_buffers(recurse=False), value.named_children())
            found += [[[name, self.of(part)] for name, part in some] for some in parts]
        for name, held in sorted(getattr(value, "__dict__", {}).items()):
            # Hooks are numbered through the whole process.
            if is_module and (name in ("_parameters", "_buffers", "_modules") or "_hooks" in name):
                continue
            if is_users or not name.startswith("_") or isinstance(held, bool | str):
                found.append([name, self.of(held, follow=follow)])
        return found

    def _note_package(self, module: str | None) -> None:
        self.packages.add((module or "builtins").partition(".")[0])


def is_installed(file: str) -> bool:
    """Whether a file belongs to Python, to an installed package or to us."""
    # A relative one is made up: torch.ops says that it comes from "_ops.py".
    return not os.path.isabs(file) or _is_installed_folder(os.path.dirname(file))


@cache
def _is_installed_folder(folder: str) -> bool:
    # The first half knows also the folders of other set-ups, such as pip's --user.
    in_packages = {"site-packages", "dist-packages"} & set(Path(folder).parts)
    return bool(in_packages) or is_installed_or_ours(os.path.join(folder, "x"))


def _is_users(namespace: Mapping[str, Any]) -> bool:
    """Whether what is in front of us is the user's own module, told by its globals."""
    file = namespace.get("__file__")
    if namespace.get("__name__") == "__main__":
        return True
    # Neither file nor spec: made by exec, as notebooks do.
    return not is_installed(file) if isinstance(file, str) else namespace.get("__spec__") is None


def _namespace_of(kind: type) -> dict[str, Any]:
    """Return the globals that a class was made among; empty where nobody knows the module any more."""
    module = sys.modules.get(kind.__module__)
    return {} if module is None else vars(module)


def _type_name(kind: type) -> str:
    # A target's module may go under another name in each process.
    return kind.__qualname__ if _is_users(_namespace_of(kind)) else f"{kind.__module__}.{kind.__qualname__}"


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


_FREE_STEP_BYTES = 256 * 2**20
_SETTINGS_OF_ALLOCATORS = re.compile(r"PYTORCH_\w+|MALLOC_\w+|GLIBC_TUNABLES|LD_PRELOAD|CUBLAS_WORKSPACE_CONFIG")


def fingerprint(
    workload: Workload,
    *,
    target: str | None,
    on: str,
    limit_bytes: int | None,
    shape: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> str | None:
    """Return the key of an answer, or None where something that it depends on cannot be named.

    >>> from torch import nn
    >>> from batchwright.workload import Workload
    >>> def key(width):
    ...     workload = Workload(
    ...         model=lambda: nn.Linear(width, 1),
    ...         batch=lambda n: torch.randn(n, width),
    ...         loss=lambda model, batch: model(batch).mean(),
    ...     )
    ...     return fingerprint(workload, target=None, on="cpu", limit_bytes=2**30, shape={}, settings={})
    >>> key(8) == key(8), key(8) == key(16)
    (True, False)

    `settings` are the options of the search and of the step that change the answer. `limit_bytes` is what `rounded`
    made of the bytes there are.
    """
    try:
        found = _ingredients(workload, target, on, limit_bytes, shape, settings)
        return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
    except Exception:
        # A bug in the user's own functions shows in the first probe, with its traceback; here it only means no key.
        return None


def rounded(limit_bytes: int | None, *, was_asked: bool) -> int | None:
    """Return the bytes that go into the key: as asked for, else what is free, rounded down to 256 MiB.

    >>> [rounded(1_000_000_000, was_asked=was_asked) for was_asked in (True, False)]
    [1000000000, 805306368]

    What is free moves by itself from run to run; what was asked for does not.
    """
    if limit_bytes is None or was_asked:
        return limit_bytes
    return limit_bytes // _FREE_STEP_BYTES * _FREE_STEP_BYTES


def _ingredients(
    workload: Workload,
    target: str | None,
    on: str,
    limit_bytes: int | None,
    shape: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    names = Names()
    found: dict[str, Any] = {
        # First, for the user's functions may change it.
        "default_dtype": str(torch.get_default_dtype()),
        "device": _device(on),
        "limit_bytes": limit_bytes,
        "shape": names.of(dict(shape)),
        "settings": names.of(dict(settings)),
        "allocators": {name: os.environ[name] for name in os.environ if _SETTINGS_OF_ALLOCATORS.fullmatch(name)},
    }
    accelerator = None if on == "cpu" else torch.device(on)
    with (
        untouched(workload, accelerator=accelerator, is_traced=True),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        found |= _from_users_code(workload, shape, names)
    # Last: by now everything is imported that the user's functions import when they are called.
    found["objects"] = names.objects()
    found["files"] = None if target is None else _files(target)
    found["arguments"] = None if target is None else list(Target.read(target).arguments)
    found["versions"] = {
        "python": sys.version,
        "platform": platform.platform(),
        "torch": [str(torch.__version__), torch.version.cuda, torch.version.hip],
        "batchwright": __version__,
        "packages": {name: _version(name) for name in names.packages},
    }
    return found


def _from_users_code(workload: Workload, shape: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """Call what builds the model and a batch, and describe what comes out."""
    found: dict[str, Any] = {
        field.name: names.of(getattr(workload, field.name))
        for field in fields(workload)
        if field.name not in ("data", "name")
    }
    _seed()
    found["built_model"] = names.of(build_skeleton(workload)[0])
    num_samples = 2
    if workload.data is not None:
        num_samples = min(num_samples, len(workload.data))
        found["data"] = [len(workload.data), names.of(type(workload.data))]
    _seed()
    batch = make_batch(workload, num_samples, shape, torch.device("cpu"))
    found["made_batch"] = [names.of(type(batch)), [names.of(tensor) for tensor in tensors_in(batch)]]
    return found


def _seed() -> None:
    """Make what the user's functions draw the same each time; the caller puts the random state back."""
    torch.default_generator.manual_seed(0)
    random.seed(0)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(0)


def _files(target: str) -> list[list[str]]:
    """Return names and hashes of the target's file and of all files of the user's that are imported by now."""
    place = Target.read(target).place
    found = {Path(place if place.endswith(".py") else sys.modules[place].__file__ or "").resolve()}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        # The program that asks is not part of the target; where it is, it is the target's own file.
        if name != "__main__" and isinstance(file, str) and not is_installed(file):
            found.add(Path(file).resolve())
    return sorted([file.name, hashlib.sha256(file.read_bytes()).hexdigest()] for file in found if file.is_file())


def _device(on: str) -> list[Any]:
    if on == "cpu":
        # Both change what kernels allocate: their own layouts, and a buffer per thread.
        return [on, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()]
    device = torch.device(on)
    read_name = getattr(torch.get_device_module(device), "get_device_name", None)
    return [on, read_name(device) if read_name else platform.processor(), open_device(on).total_bytes]


def _version(package: str) -> str | None:
    # Not by `__version__`: asking a lazy package for an attribute may import half of it.
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
