"""Leads the calls that write while a program is probed to a scratch folder, so that nothing of the user's is changed.

Promises:
- every call of Python that writes, moves, deletes or looks at files sees the program's `ScratchFolder`;
- a name that was bound before is led away too; what gets past all the same is refused if it would change a file;
- writes that Python does not see (a library's own C code, other programs) are not led away; torch.save, safetensors,
  sqlite3 and pyarrow's are. Other programs that are started are named.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import shutil
import sqlite3
import sys
import threading
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.machinery import PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self
from unittest.mock import patch

from batchwright.scripts.scratch_folder import ScratchFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@contextmanager
def writes_led_to(folder: Path, free: Path | None = None) -> Iterator[ScratchFolder]:
    """Lead what the program writes to a folder until this ends; `free` is a folder around it that is not led away."""
    scratch = ScratchFolder(folder, free)
    with ExitStack() as stack:
        stack.enter_context(_net_below(scratch))
        calls = list(_python_calls(scratch))
        for place, name, replacement in (*calls, *_bound_elsewhere(calls), *_library_calls(scratch), *_uploads()):
            stack.enter_context(patch.object(place, name, replacement))
        finder = _WrittenModules(scratch)
        sys.meta_path.append(finder)
        stack.callback(sys.meta_path.remove, finder)
        yield scratch


def _bound_elsewhere(calls: list[tuple[Any, str, Any]]) -> Iterator[tuple[Any, str, Any]]:
    """Modules that have taken such a function under a name of their own: `from shutil import rmtree`."""
    replacements = {id(getattr(place, name)): replacement for place, name, replacement in calls}
    for module in list(sys.modules.values()):
        name = getattr(module, "__name__", "")
        if not isinstance(module, ModuleType) or name.startswith("batchwright") or name in _OF_PYTHON:
            continue
        # No copy of each module's names: the holes that it leaves in the heap would serve the program.
        held = [(bound, id(value)) for bound, value in vars(module).items() if id(value) in replacements]
        yield from ((module, bound, replacements[key]) for bound, key in held if callable(vars(module)[bound]))


_OF_PYTHON = ("builtins", "io", "_io", "os", "posix", "nt", "shutil")
_CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.truncate")
_STARTS = ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec")
_nets: list[ScratchFolder] = []


@contextmanager
def _net_below(scratch: ScratchFolder) -> Iterator[None]:
    """Refuse what would change a file of the user's past all of this, and hear of programs that are started."""
    if not _nets:
        sys.addaudithook(_hear)
    _nets.append(scratch)
    try:
        yield
    finally:
        _nets[_nets.index(scratch)] = _NO_NET


def _hear(event: str, args: tuple[Any, ...]) -> None:
    scratch = _nets[-1]
    if scratch is _NO_NET or getattr(_inside, "is_answering", False):
        return
    if event in _STARTS:
        scratch.programs.append(os.path.basename(str(args[0]).split()[0]))
    is_writing = event == "open" and (
        bool(set(args[1]) & set("wax+")) if isinstance(args[1], str) else bool(args[2] and args[2] & _WRITING_FLAGS)
    )
    if not is_writing and event not in _CHANGES:
        return
    _inside.is_answering = True
    try:
        if scratch.is_led_away(args[0]) and os.path.exists(args[0]):
            raise PermissionError(f"batchwright refuses to have '{args[0]}' changed by a probe ({event})")
    finally:
        _inside.is_answering = False


_NO_NET: Any = object()


def _python_calls(scratch: ScratchFolder) -> Iterator[tuple[Any, str, Any]]:
    open_file, open_descriptor = io.open, os.open

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not isinstance(mode, str) or not scratch.is_led_away(file):
            return open_file(file, mode, *args, **kwargs)
        if kwargs.get("opener") is not None:  # as for named temporary files: it opens what it likes, by os.open
            return open_file(file, mode, *args, **{**kwargs, "opener": _as_of_the_program(kwargs["opener"])})
        if not set(mode) & set("wax+"):
            return open_file(scratch.to_read(file), mode, *args, **kwargs)
        if "x" in mode and scratch.exists(file):
            raise FileExistsError(17, os.strerror(17), os.fspath(file))
        if "r" in mode and not scratch.exists(file):
            raise FileNotFoundError(2, os.strerror(2), os.fspath(file))
        return open_file(scratch.to_write(file, keep="w" not in mode), mode, *args, **kwargs)

    def opened_descriptor(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if kwargs.get("dir_fd") is not None:
            return open_descriptor(path, flags, *args, **kwargs)
        if not flags & _WRITING_FLAGS:
            return open_descriptor(scratch.to_read(path), flags, *args, **kwargs)
        return open_descriptor(scratch.to_write(path, keep=True), flags, *args, **kwargs)

    yield builtins, "open", _wrapped(open_file, opened)
    yield io, "open", _wrapped(open_file, opened)
    yield os, "open", _wrapped(open_descriptor, opened_descriptor)
    mkdir = os.mkdir
    yield os, "mkdir", _wrapped(mkdir, lambda path, *a, **k: mkdir(scratch.make_folder(path), *a, **k))
    for name in ("remove", "unlink", "rmdir"):
        original = getattr(os, name)
        yield os, name, _wrapped(original, _deleting(scratch, original))
    rmtree = shutil.rmtree
    yield shutil, "rmtree", _wrapped(rmtree, _deleting(scratch, rmtree, is_lenient=True))
    for name in ("rename", "replace"):
        original = getattr(os, name)
        yield os, name, _wrapped(original, _moving(scratch, original))
    for name in ("stat", "lstat", "statvfs", "readlink", "access", "chdir"):
        if original := getattr(os, name, None):
            yield os, name, _wrapped(original, _looking(scratch, original))
    listdir, scandir = os.listdir, os.scandir
    yield os, "listdir", _wrapped(listdir, lambda path=".": [name for name, _ in scratch.list_folder(path, listdir)])
    yield os, "scandir", _wrapped(scandir, lambda path=".": _Entries(scratch.list_folder(path, scandir)))
    for name in ("link", "symlink"):
        original = getattr(os, name)
        yield os, name, _wrapped(original, _linking(scratch, original))
    for name in ("truncate", "chmod", "utime"):
        original = getattr(os, name)
        yield os, name, _wrapped(original, _changing(scratch, original))


_inside = threading.local()


def _wrapped(original: Any, replacement: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement for calls of the program; what we call ourselves to answer one is the original."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if getattr(_inside, "is_answering", False):
            return original(*args, **kwargs)
        _inside.is_answering = True
        try:
            return replacement(*args, **kwargs)
        finally:
            _inside.is_answering = False

    return call


def _as_of_the_program(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the program that is called while we answer it."""

    def call(*args: Any) -> Any:
        _inside.is_answering = False
        try:
            return function(*args)
        finally:
            _inside.is_answering = True

    return call


class _Entries:
    """What `os.scandir` returns, of two folders at once."""

    def __init__(self, entries: list[tuple[str, Any]]) -> None:
        self._entries = iter([entry for _, entry in entries])

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is held."""


def _deleting(scratch: ScratchFolder, original: Any, *, is_lenient: bool = False) -> Callable[..., Any]:
    def delete(path: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dir_fd") is not None:
            return original(path, *args, **kwargs)
        try:
            is_done = scratch.delete(path)
        except FileNotFoundError:
            if is_lenient and (kwargs.get("ignore_errors") or (args and args[0])):
                return None
            raise
        return None if is_done else original(path, *args, **kwargs)

    return delete


def _moving(scratch: ScratchFolder, original: Any) -> Callable[..., Any]:
    def move(source: Any, target: Any, **kwargs: Any) -> Any:
        if not scratch.is_led_away(source) and not scratch.is_led_away(target):
            return original(source, target, **kwargs)
        origin = scratch.to_read(source)
        if not os.path.exists(origin):
            raise FileNotFoundError(2, os.strerror(2), os.fspath(source))
        place = scratch.to_write(target, keep=False)
        if os.path.isdir(origin):
            shutil.copytree(origin, place, dirs_exist_ok=True)
        else:
            shutil.copyfile(origin, place)
        if not scratch.delete(source):
            os.remove(source)
        return None

    return move


def _looking(scratch: ScratchFolder, original: Any) -> Callable[..., Any]:
    def look(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
        return original(scratch.to_read(path), *args, **kwargs)

    return look


def _linking(scratch: ScratchFolder, original: Any) -> Callable[..., Any]:
    def link(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        if scratch.is_led_away(target) and scratch.exists(target):
            raise FileExistsError(17, os.strerror(17), os.fspath(target))
        return original(scratch.to_read(source), scratch.to_write(target, keep=False), *args, **kwargs)

    return link


def _changing(scratch: ScratchFolder, original: Any) -> Callable[..., Any]:
    def change(path: Any, *args: Any, **kwargs: Any) -> Any:
        return original(scratch.to_write(path, keep=True), *args, **kwargs)

    return change


# Readers and writers in C++ and Rust, which Python's own calls do not see: module, name, where the path stands among
# the arguments and what it is called there. A module may hold another's under a name of its own.
_READERS = (
    *(("torch", "load", 0, "f"), ("torch.jit", "load", 0, "f"), ("safetensors", "safe_open", 0, "filename")),
    ("pyarrow", "memory_map", 0, "path"),
)
_WRITERS = (
    *(("torch", "save", 1, "f"), ("torch.jit", "save", 1, "f"), ("safetensors", "serialize_file", 1, "filename")),
    ("pyarrow.parquet", "write_table", 1, "where"),
)


def _library_calls(scratch: ScratchFolder) -> Iterator[tuple[Any, str, Any]]:
    new_file = partial(scratch.to_write, keep=False)
    for module, name, position, called in (*_READERS, *_WRITERS):
        lead = new_file if (module, name, position, called) in _WRITERS else scratch.to_read
        yield from _led_wherever_held(module, name, partial(_at, position, called, lead))
    yield from _led_wherever_held("pyarrow", "OSFile", partial(_by_mode, scratch))
    connect = sqlite3.connect
    yield sqlite3, "connect", _at(0, "database", partial(_database, scratch), connect)


def _led_wherever_held(module: str, name: str, lead: Callable[[Any], Any]) -> Iterator[tuple[Any, str, Any]]:
    original = getattr(sys.modules.get(module), name, None)
    if original is None:
        return
    for place in list(sys.modules.values()):
        if getattr(place, "__dict__", {}).get(name) is original:
            yield place, name, lead(original)


def _by_mode(scratch: ScratchFolder, original: Any) -> Callable[..., Any]:
    def opened_file(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        led = scratch.to_write(path, keep="a" in mode) if set(mode) & set("wa") else scratch.to_read(path)
        return original(os.fspath(led), mode, *args, **kwargs)

    return _wrapped(original, opened_file)


class _WrittenModules:
    """Finds modules that the program wrote itself, as downloaders of code do: imports look past Python's calls."""

    def __init__(self, scratch: ScratchFolder) -> None:
        self._scratch = scratch

    def find_spec(self, name: str, path: Any = None, _: Any = None) -> Any:
        """Look for a module in the scratch folder, where nothing was found in the real ones."""
        places = [str(self._scratch.place_of(place)) for place in (sys.path if path is None else path)]
        return PathFinder.find_spec(name, [place for place in places if os.path.isdir(place)])


def _uploads() -> Iterator[tuple[Any, str, Any]]:
    """A probe makes no repository on a hub, and uploads nothing there."""
    hub = sys.modules.get("huggingface_hub")
    if hub is None:
        return
    api: Any = hub.HfApi
    yield api, "create_repo", lambda _, repo_id, **__: hub.RepoUrl(f"https://huggingface.co/{repo_id}")
    for name in ("create_commit", "upload_file", "upload_folder", "upload_large_folder"):
        if hasattr(api, name):
            yield api, name, lambda *_, **__: None
    for name in ("create_repo", "create_commit", "upload_file", "upload_folder", "upload_large_folder"):
        if hasattr(hub, name):
            yield hub, name, lambda *_, **__: None


def _at(position: int, name: str, lead: Callable[[Any], Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Call the original with the path, by its position or its name, led elsewhere."""

    def led(path: Any) -> Any:
        # What is a path of text stays one: some take nothing else.
        return os.fspath(lead(path)) if isinstance(path, str) else lead(path)

    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > position:
            args = (*args[:position], led(args[position]), *args[position + 1 :])
        elif name in kwargs:
            kwargs[name] = led(kwargs[name])
        return original(*args, **kwargs)

    return _wrapped(original, call)


def _database(scratch: ScratchFolder, database: Any) -> Any:
    is_file = isinstance(database, str | bytes | os.PathLike) and os.fspath(database) not in (":memory:", "", b"")
    return scratch.to_write(database, keep=True) if is_file and not str(database).startswith("file:") else database
