"""Files that the user names, read and written without harm, whatever stands there.

Promises:
- what cannot be read raises OSError, whose `strerror` says why, and what cannot be written a message; neither waits;
- a pipe without another end is refused, not waited for; a device is never read, as it may never end;
- a file is replaced at once: a full disk, or a process that is killed, leaves the one before;
- only a plain file that may be written to is replaced: a device or a pipe is written into, a link stays a link.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from contextlib import suppress
from pathlib import Path

from batchwright.errors import BatchwrightError, InvalidInputError

# How long a pipe may stay without a writer before it is refused.
_WRITER_SECONDS = 3
# Far beyond any run or config: so much text is no file that was meant.
MOST_BYTES = 256 << 20
_PIECE_BYTES = 1 << 20
_ELSEWHERE = "another place: {}, in a folder that exists and has room"


def read_text(file: str | Path, encoding: str = "utf-8") -> str:
    """Return the text of a file, or of a pipe once something writes into it."""
    try:
        return read_bytes(file).decode(encoding)
    except UnicodeDecodeError:
        raise OSError(errno.EILSEQ, "it is not text") from None


def read_bytes(file: str | Path, *, most_bytes: int = MOST_BYTES, may_be_pipe: bool = True) -> bytes:
    """Return what a file holds, or a pipe once something writes into it."""
    with open(_opened(file, os.O_RDONLY), "rb") as stream:
        status = os.fstat(stream.fileno())
        kind = status.st_mode
        if stat.S_ISDIR(kind):
            raise OSError(errno.EISDIR, "it is a folder")
        begun = b""
        if stat.S_ISFIFO(kind) and may_be_pipe:
            begun = _first_byte(stream.fileno())
            os.set_blocking(stream.fileno(), True)
        elif not stat.S_ISREG(kind):
            raise OSError(errno.EINVAL, "it is not a plain file")
        content, size = bytearray(begun), status.st_size
        while size <= most_bytes and (piece := stream.read(_PIECE_BYTES)):
            content += piece
            size = max(size, len(content))
    if size > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes:,} bytes")
    return bytes(content)


def cache_folder() -> Path | None:
    """Return where what batchwright remembers is kept: $BATCHWRIGHT_CACHE, else in the user's cache folder, if any."""
    given = os.environ.get("BATCHWRIGHT_CACHE")
    try:
        if given:
            return Path(given).expanduser()
        local = os.environ.get("LOCALAPPDATA" if os.name == "nt" else "XDG_CACHE_HOME", "")
        # A relative path is to be ignored, by the XDG specification.
        caches = Path(local) if local and Path(local).is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None  # the user has no home
    return caches / "batchwright"


def replace_file(file: str | Path, content: bytes, *, what: str, option: str) -> None:
    """Write a file beside and put it in its place, or leave the one before and raise an error that names `what`."""
    try:
        write_whole(Path(file), content)
    except OSError as error:
        raise BatchwrightError(*_cannot_write(file, what, error), remedy=_ELSEWHERE.format(option)) from None


def check_place(file: str | Path, *, what: str, option: str) -> None:
    """Refuse a place that cannot be written to, as far as it is known before work begins.

    >>> check_place("nowhere/run.json", what="the run", option="file=FILE")
    Traceback (most recent call last):
    ...
    batchwright.errors.InvalidInputError: the run cannot be written to 'nowhere/run.json': there is no such folder.
      try: another place: file=FILE, in a folder that exists and has room
    """
    try:
        _check(Path(file))
    except OSError as error:
        raise InvalidInputError(*_cannot_write(file, what, error), remedy=_ELSEWHERE.format(option)) from None


def _cannot_write(file: str | Path, what: str, error: OSError) -> tuple[str]:
    why = error.strerror or str(error)
    return (f"{what} cannot be written to '{file}': {why[:1].lower()}{why[1:]}.",)


def write_whole(file: Path, content: bytes) -> None:
    """Write beside a file, then rename: nobody ever reads a half of it. What exists and is no plain file is kept."""
    # To replace a device would destroy it: as root, `--run-file /dev/null` would take it from the whole machine.
    if _exists(file) and not file.is_file() and not file.is_dir():
        with open(_opened(file, os.O_WRONLY), "wb") as stream:
            os.set_blocking(stream.fileno(), True)
            stream.write(content)
        return
    _check(file)
    place = Path(os.path.realpath(file))
    beside = place.parent / f".{place.name}.{os.getpid()}.{threading.get_ident()}"
    try:
        beside.write_bytes(content)
        if place.exists():
            beside.chmod(stat.S_IMODE(place.stat().st_mode))
        beside.replace(place)
    except OSError:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def _check(file: Path) -> None:
    if _exists(file):
        if file.is_dir():
            raise OSError(errno.EISDIR, "it is a folder")
        if not os.access(file, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return
    folder = Path(os.path.realpath(file)).parent
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such folder")
    if not os.access(folder, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _exists(file: Path) -> bool:
    if "\0" in str(file):
        raise OSError(errno.EINVAL, "no file can have this name")
    return file.exists()


def _opened(file: str | Path, flags: int) -> int:
    """Open at once, also a pipe whose other end nobody has."""
    try:
        return os.open(file, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except ValueError:  # a zero byte
        raise OSError(errno.EINVAL, "no file can have this name") from None
    except OSError as error:
        if error.errno == errno.ENXIO and flags == os.O_WRONLY and Path(file).is_fifo():
            raise OSError(errno.ENXIO, "it is a pipe, and nobody reads from it") from None
        raise


def _first_byte(pipe: int) -> bytes:
    """Return the first byte of a pipe; nothing where a writer has it open and takes the time it needs."""
    end = time.monotonic() + _WRITER_SECONDS
    while True:
        try:
            begun = os.read(pipe, 1)  # nothing at all: nobody has it open for writing
        except BlockingIOError:
            return b""
        if begun:
            return begun
        if time.monotonic() > end:
            raise OSError(errno.EPIPE, f"it is a pipe, and nobody wrote into it for {_WRITER_SECONDS} s")
        time.sleep(0.02)
