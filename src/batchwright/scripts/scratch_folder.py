"""The files of a program as it sees them while it is probed: its own changes in a scratch folder, above the real ones.

Promises:
- a file that exists is never overwritten, appended to, renamed or deleted: a copy in the scratch folder is;
- the program sees its own writes: what it wrote it reads, what it deleted is gone, folders that it made are there;
- reading, writing to a device or pipe, and what the program makes in a temporary folder pass unchanged.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_MARK = ".deleted-by-the-program"


class ScratchFolder:
    """The files of a program as it sees them: the real ones below, its own changes above.

    Args:
        folder: where its changes go.
        free: a folder around it that goes with the probes: what lies there is not led away.
    """

    def __init__(self, folder: Path, free: Path | None = None) -> None:
        self.folder = Path(os.path.realpath(folder))
        self.written: list[str] = []
        self.programs: list[str] = []
        """Other programs that were started: what they write is not led away."""
        self._temporary = Path(os.path.realpath(tempfile.gettempdir()))
        self._free = [Path("/dev"), Path("/proc"), Path(os.path.realpath(free or folder))]
        self._work = Path(os.path.realpath(os.getcwd()))
        self._start = time.time()
        self._own: set[Path] = set()

    def is_led_away(self, path: Any) -> bool:
        """Whether writes to this path go to the scratch folder."""
        if not isinstance(path, str | bytes | os.PathLike):
            return False  # a descriptor
        real = self._real(path)
        if any(real.is_relative_to(place) for place in self._free):
            return False
        # A program that lies in the temporary folder has its own files there.
        if real.is_relative_to(self._work):
            return True
        if self._is_own_temporary(real):
            return False
        return not real.exists() or stat.S_ISREG(mode := real.stat().st_mode) or stat.S_ISDIR(mode)

    def _is_own_temporary(self, real: Path) -> bool:
        """Whether something in a temporary folder is the program's: it made it, or makes it now."""
        if not real.is_relative_to(self._temporary):
            return False
        if any(place in self._own for place in (real, *real.parents)):
            return True
        if not real.exists():
            self._own.add(real)
            return True
        return stat.S_ISREG(real.stat().st_mode) and real.stat().st_ctime >= self._start

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

    def list_folder(self, path: Any, look: Callable[[Any], Any]) -> list[tuple[str, Any]]:
        """Return what the program sees in a folder, by name: its own files, and the real ones that it left alone."""
        if not self.is_led_away(path):
            return [(name_of(entry), entry) for entry in look(path)]
        place, real = self.place_of(path), self._real(path)
        if not place.is_dir() or not self.exists(path):
            return [(name_of(entry), entry) for entry in look(self.to_read(path))]
        own = {name_of(entry): entry for entry in look(place)}
        below = look(real) if real.is_dir() and not self._mark(place).exists() else ()
        entries = {name_of(entry): entry for entry in below} | own
        gone = {name.removesuffix(_MARK) for name in own if name.endswith(_MARK)} - own.keys()
        return [(n, entry) for n, entry in entries.items() if not n.endswith(_MARK) and n not in gone]

    def _check_parent(self, path: Any, real: Path, place: Path) -> None:
        if not real.parent.is_dir() and not place.parent.is_dir():
            raise FileNotFoundError(2, os.strerror(2), os.fspath(path))

    @staticmethod
    def _mark(place: Path) -> Path:
        return place.with_name(place.name + _MARK)

    @staticmethod
    def _real(path: Any) -> Path:
        return Path(os.path.realpath(os.fsdecode(path)))


def name_of(entry: Any) -> str:
    """Return the name of what `os.listdir` or `os.scandir` gives."""
    name: str = os.fsdecode(getattr(entry, "name", entry))
    return name
