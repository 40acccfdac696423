"""What a program writes while it is probed goes to a scratch folder, and nothing of the user's is changed.

Promises:
- a file that exists is never overwritten, appended to, renamed or deleted: a copy in the scratch folder is;
- the program sees its own writes: what it wrote it reads, what it deleted is gone, folders that it made are there;
- reading, and writing below a temporary folder or to a device or pipe, passes unchanged;
- writes that Python does not see (a library's own C code) are not led away; torch.save, safetensors and sqlite3 are.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import shutil
import sqlite3
import stat
import sys
import tempfile
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_MARK = ".deleted-by-the-program"


class ScratchFolder:
    """The files of a program as it sees them: the real ones below, its own changes above."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(os.path.realpath(folder))
        self.written: list[str] = []
        self._free = [Path(os.path.realpath(tempfile.gettempdir())), Path("/dev"), Path("/proc"), self.folder]
        self._work = Path(os.path.realpath(os.getcwd()))

    def is_led_away(self, path: Any) -> bool:
        """Whether writes to this path go to the scratch folder."""
        if not isinstance(path, str | bytes | os.PathLike):
            return False  # a descriptor
        real = self._real(path)
        # A program that lies in the temporary folder has its own files there.
        if real.is_relative_to(self._work) and not real.is_relative_to(self.folder):
            return True
        if any(real.is_relative_to(place) for place in self._free):
            return False
        return not real.exists() or stat.S_ISREG(mode := real.stat().st_mode) or stat.S_ISDIR(mode)

    def place_of(self, path: Any) -> Path:
        """Where the program's own version of a file lies, whether it exists or not."""
        real = self._real(path)
        return self.folder.joinpath(*(part.replace(":", "") for part in real.parts if part != real.anchor))

    def to_read(self, path: Any) -> Any:
        """Return the path to read from: the program's own version, if there is one."""
        if not self.is_led_away(path):
            return path
        place = self.place_of(path)
        if self._mark(place).exists():
            return place  # deleted: the answer is that there is no such file
        return place if place.exists() else path

    def to_write(self, path: Any, *, keep: bool) -> Any:
        """Return the path to write to; `keep` copies what the file holds."""
        if not self.is_led_away(path):
            return path
        place, real = self.place_of(path), self._real(path)
        self._check_parent(path, real, place)
        place.parent.mkdir(parents=True, exist_ok=True)
        if keep and real.is_file() and not place.exists() and not self._mark(place).exists():
            shutil.copyfile(real, place)
        self._mark(place).unlink(missing_ok=True)
        self.written.append(str(real))
        return place

    def make_folder(self, path: Any) -> Any:
        """Return the place of a folder that the program makes."""
        if not self.is_led_away(path):
            return path
        if self.exists(path):
            raise FileExistsError(17, os.strerror(17), os.fspath(path))
        place = self.place_of(path)
        self._check_parent(path, self._real(path), place)
        place.parent.mkdir(parents=True, exist_ok=True)
        self._mark(place).unlink(missing_ok=True)
        return place

    def delete(self, path: Any) -> bool:
        """Delete the program's version and hide the real one; False for a path that is not led away."""
        if not self.is_led_away(path):
            return False
        if not self.exists(path):
            raise FileNotFoundError(2, os.strerror(2), os.fspath(path))
        place = self.place_of(path)
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)
        if self._real(path).exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            self._mark(place).touch()
        return True

    def exists(self, path: Any) -> bool:
        """Whether the program sees something at a path."""
        place = self.place_of(path)
        return place.exists() or (self._real(path).exists() and not self._mark(place).exists())

    def _check_parent(self, path: Any, real: Path, place: Path) -> None:
        if not real.parent.is_dir() and not place.parent.is_dir():
            raise FileNotFoundError(2, os.strerror(2), os.fspath(path))

    @staticmethod
    def _mark(place: Path) -> Path:
        return place.with_name(place.name + _MARK)

    @staticmethod
    def _real(path: Any) -> Path:
        return Path(os.path.realpath(os.fsdecode(path)))


@contextmanager
def writes_led_to(folder: Path) -> Iterator[ScratchFolder]:
    """Lead what the program writes to a folder until this ends."""
    scratch = ScratchFolder(folder)
    with ExitStack() as stack:
        for place, name, replacement in (*_python_calls(scratch), *_library_calls(scratch)):
            stack.enter_context(patch.object(place, name, replacement))
        yield scratch


def _python_calls(scratch: ScratchFolder) -> Iterator[tuple[Any, str, Any]]:
    open_file, open_descriptor = io.open, os.open

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not isinstance(mode, str) or not scratch.is_led_away(file):
            return open_file(file, mode, *args, **kwargs)
        if not set(mode) & set("wax+"):
            return open_file(scratch.to_read(file), mode, *args, **kwargs)
        if "x" in mode and scratch.exists(file):
            raise FileExistsError(17, os.strerror(17), os.fspath(file))
        if "r" in mode and not scratch.exists(file):
            raise FileNotFoundError(2, os.strerror(2), os.fspath(file))
        return open_file(scratch.to_write(file, keep="w" not in mode), mode, *args, **kwargs)

    def opened_descriptor(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if not flags & _WRITING_FLAGS or kwargs.get("dir_fd") is not None:
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
    for name in ("stat", "listdir", "scandir", "access"):
        original = getattr(os, name)
        yield os, name, _wrapped(original, _looking(scratch, original))
    for name in ("truncate", "chmod", "utime"):
        original = getattr(os, name)
        yield os, name, _wrapped(original, _changing(scratch, original))


_inside = threading.local()


def _wrapped(original: Any, replacement: Callable[..., Any]) -> Any:
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


def _deleting(scratch: ScratchFolder, original: Any, *, is_lenient: bool = False) -> Callable[..., Any]:
    def delete(path: Any, *args: Any, **kwargs: Any) -> Any:
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


def _changing(scratch: ScratchFolder, original: Any) -> Callable[..., Any]:
    def change(path: Any, *args: Any, **kwargs: Any) -> Any:
        return original(scratch.to_write(path, keep=True), *args, **kwargs)

    return change


def _library_calls(scratch: ScratchFolder) -> Iterator[tuple[Any, str, Any]]:
    """Writers in C++ and Rust, which Python's own calls do not see."""
    connect = sqlite3.connect
    yield (
        sqlite3,
        "connect",
        _wrapped(connect, lambda database, *a, **k: connect(_database(scratch, database), *a, **k)),
    )
    torch = sys.modules.get("torch")
    if torch is not None:
        save, load = torch.save, torch.load
        yield (
            torch,
            "save",
            _wrapped(save, lambda value, f, *a, **k: save(value, scratch.to_write(f, keep=False), *a, **k)),
        )
        yield torch, "load", _wrapped(load, lambda f, *a, **k: load(scratch.to_read(f), *a, **k))
    safetensors = sys.modules.get("safetensors.torch")
    if safetensors is not None:
        write: Any = safetensors.serialize_file
        yield (
            safetensors,
            "serialize_file",
            _wrapped(write, lambda values, f, *a, **k: write(values, scratch.to_write(f, keep=False), *a, **k)),
        )


def _database(scratch: ScratchFolder, database: Any) -> Any:
    is_file = isinstance(database, str | bytes | os.PathLike) and os.fspath(database) not in (":memory:", "", b"")
    return scratch.to_write(database, keep=True) if is_file and not str(database).startswith("file:") else database
