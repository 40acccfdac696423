"""One shape's answer from an earlier run: tried first, certified by one probe, or thrown away and said."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchwright.fitting.cache_key import fingerprint, rounded
from batchwright.fitting.fit_result import NextSize
from batchwright.fitting.search import Seen
from batchwright.state.interrupts import uninterrupted
from batchwright.units import LARGEST_COUNT, shortened
from batchwright.user_files import read_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from batchwright.fitting.budget import Budget
    from batchwright.fitting.driver import Series
    from batchwright.fitting.fit_result import Fit
    from batchwright.workload import Workload


# Answers of earlier runs: where a search starts, never what it returns unprobed.
#
# Promises:
# - reading and writing never raise: an answer that is damaged, alien or cannot be reached is ignored, and a note says
#   so;
# - a file is whole or not there, also where two processes write at once;
# - one small JSON file per answer, readable by a person, the last 500 used are kept.
#
# The files lie in `$BATCHWRIGHT_CACHE`, else in the user's cache folder, under `fits`; deleting them is always safe.

_SCHEMA = 1
_MOST_ENTRIES = 500
# Ours take about one KiB; whatever is larger is not ours, and is not read into memory to find out.
_MOST_BYTES = 2**16
# A temporary file this old belongs to a process that died while writing it.
_ABANDONED_SECONDS = 3600.0
_OUTCOMES = (None, "fits", "out_of_memory", "failed")


@dataclass(frozen=True)
class Remembered:
    """An answer of an earlier run: a size to certify, and what was known of the size above it then."""

    micro_batch: int
    next_size: NextSize | None
    peak_bytes: int | None
    reason: str
    when: str


class Answers:
    """The answers that are remembered, each under a key of `fingerprint`.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Answers(Path(folder)).recall("0" * 64)
    (None, '')
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = _default_folder() if folder is None else folder

    def recall(self, key: str) -> tuple[Remembered | None, str]:
        """Return the answer under a key, or None; the note says why one that is there was ignored."""
        if self._folder is None:
            return None, ""
        file = self._file(self._folder, key)
        try:
            text = read_bytes(file, most_bytes=_MOST_BYTES, may_be_pipe=False)
        except FileNotFoundError:
            return None, ""
        except OSError as error:
            return None, f"a remembered answer was ignored: it cannot be read ({_said(error)})"
        try:
            found = _read(text, key)
        except (ValueError, RecursionError) as error:
            return None, f"a remembered answer was ignored: the file is damaged ({_said(error)}): {file}"
        # The oldest are deleted first, and one that is in use is not old.
        with contextlib.suppress(OSError):
            os.utime(file)
        return found, ""

    def remember(self, key: str, fit: Fit) -> str:
        """Keep an answer that was certified; the note is empty, or says why it could not be kept."""
        if fit.micro_batch is None or not fit.certified:
            return ""
        if self._folder is None:
            return "the answer is not remembered: there is no home folder (set BATCHWRIGHT_CACHE)"
        entry = {
            "schema": _SCHEMA,
            "key": key,
            "name": fit.name,
            "on": fit.on,
            "limit_bytes": fit.limit_bytes,
            "shape": {str(name): str(value) for name, value in fit.shape.items()},
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "micro_batch": fit.micro_batch,
            "peak_bytes": fit.peak,
            "next_size": None if fit.next_size is None else asdict(fit.next_size),
            "reason": fit.reason,
        }
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            _write_whole(self._file(self._folder, key), json.dumps(entry, indent=2))
        except (OSError, ValueError, TypeError) as error:
            return f"the answer is not remembered: {self._folder} cannot be written to ({_said(error)})"
        _delete_oldest(self._folder)
        return ""

    def forget(self, key: str) -> None:
        """Drop the answer under a key, if there is one."""
        if self._folder is not None:
            with contextlib.suppress(OSError, ValueError):
                self._file(self._folder, key).unlink()

    @staticmethod
    def _file(folder: Path, key: str) -> Path:
        assert key.isalnum(), "a key is a hash in hex, so that it can be the name of a file"
        return folder / f"{key}.json"


def from_remembered(size: int, fallback: Callable[[], Generator[int, Seen, None]]) -> Generator[int, Seen, None]:
    """Try a remembered size first: one probe certifies it; where it does not fit, search as if nothing were known.

    >>> from batchwright.fitting.search import by_doubling
    >>> search = from_remembered(4, lambda: by_doubling(64))
    >>> size, tried = next(search), []
    >>> while size:
    ...     tried.append(size)
    ...     try:
    ...         size = search.send(Seen(size, fits=size <= 2))
    ...     except StopIteration:
    ...         size = 0
    >>> tried
    [4, 1, 2, 3]

    `fallback` is called only where it is needed, since to make one may mean to trace the step.
    """
    seen = yield size
    if seen.fits:
        return
    search = fallback()
    proposed = next(search, None)
    while proposed is not None:
        # The search is told what is known already: this size does not fit, so no larger one does.
        told = Seen(proposed, fits=False) if proposed >= size else (yield proposed)
        try:
            proposed = search.send(told)
        except StopIteration:
            return


def _default_folder() -> Path | None:
    """Return where answers are kept; None where the user has no home."""
    given = os.environ.get("BATCHWRIGHT_CACHE")
    try:
        if given:
            return Path(given).expanduser() / "fits"
        local = os.environ.get("LOCALAPPDATA" if os.name == "nt" else "XDG_CACHE_HOME", "")
        # A relative path is to be ignored, by the XDG specification.
        caches = Path(local) if local and Path(local).is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return caches / "batchwright" / "fits"


def _read(text: bytes, key: str) -> Remembered:
    """Check every field, for anybody may have written the file; a ValueError says what is wrong."""
    entry = json.loads(text)
    if not isinstance(entry, dict):
        raise ValueError("it is no JSON object")
    if entry.get("schema") != _SCHEMA:
        raise ValueError(f"schema {shortened(entry.get('schema'))}, expected {_SCHEMA}")
    if entry.get("key") != key:
        raise ValueError(f"it was written for another key, {shortened(entry.get('key'))}")
    micro_batch = _whole(entry, "micro_batch", least=1)
    when = _text(entry, "when")
    datetime.fromisoformat(when)
    following = entry.get("next_size")
    next_size = None
    if following is not None:
        if not isinstance(following, dict):
            raise ValueError(f"next_size is {shortened(following)}")
        outcome = following.get("outcome")
        if outcome not in _OUTCOMES:
            raise ValueError(f"the outcome of next_size is {shortened(outcome)}")
        above = _whole(following, "micro_batch", least=micro_batch + 1)
        next_size = NextSize(above, outcome, _text(following, "why"))
    peak_bytes = None if entry.get("peak_bytes") is None else _whole(entry, "peak_bytes", least=0, most=2**63)
    return Remembered(micro_batch, next_size, peak_bytes, _text(entry, "reason"), when)


def _whole(entry: dict[str, Any], name: str, *, least: int, most: int = LARGEST_COUNT) -> int:
    value = entry.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name} is {shortened(value)}, expected a whole number of at least {least:,}")
    return value


def _text(entry: dict[str, Any], name: str) -> str:
    value = entry.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} is {shortened(value)}, expected text")
    return value


def _write_whole(file: Path, text: str) -> None:
    """Write beside the file, then rename: nobody ever reads a half of it."""
    with uninterrupted():
        descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=".", suffix=".tmp")
        try:
            with open(descriptor, "w", encoding="utf-8") as opened:
                opened.write(text)
            os.replace(temporary, file)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


def _delete_oldest(folder: Path) -> None:
    # Another process may be deleting the same ones.
    with contextlib.suppress(OSError):
        for abandoned in folder.glob(".*.tmp"):
            if _modified(abandoned) < time.time() - _ABANDONED_SECONDS:
                _delete(abandoned)
        entries = sorted(folder.glob("*.json"), key=_modified)
        for oldest in entries[: max(0, len(entries) - _MOST_ENTRIES)]:
            _delete(oldest)


def _modified(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _delete(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.unlink()


def _said(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


@dataclass(frozen=True)
class AnswerBook:
    """Where answers of this workload are looked up; `settings` are the options that change an answer."""

    workload: Workload
    target: str | None
    settings: Mapping[str, Any]

    def look_up(self, shape: Mapping[str, Any], on: str, budget: Budget, *, cap: int) -> RecalledAnswer:
        """Return what is remembered for a shape, which may be nothing."""
        key = fingerprint(
            self.workload,
            target=self.target,
            on=on,
            limit_bytes=rounded(budget.probe_bytes, was_asked=budget.was_asked),
            shape=shape,
            settings={**self.settings, "cap": cap},
        )
        answers = Answers()
        known, note = answers.recall(key) if key is not None else (None, "")
        return RecalledAnswer(answers, key, known if known is not None and known.micro_batch <= cap else None, note)


@dataclass(frozen=True)
class RecalledAnswer:
    """What an earlier run answered to the same question."""

    answers: Answers
    key: str | None
    known: Remembered | None
    note: str

    @property
    def _day(self) -> str:
        return "" if self.known is None else self.known.when[:10]

    def first(self, search: Callable[[], Generator[int, Seen, None]]) -> Generator[int, Seen, None]:
        """Try the remembered size before anything else; search only where it does not fit any more."""
        return search() if self.known is None else from_remembered(self.known.micro_batch, search)

    def concluded(self, series: Series) -> Series:
        """Put in what was known of the next size, where one probe confirmed the answer."""
        if self.known is None or series.micro_batch != self.known.micro_batch or len(series.trials) > 1:
            return series
        above = self.known.next_size
        if above is not None:
            above = replace(above, why=f"{above.why} (remembered from {self._day})")
        return replace(series, next_size=above or series.next_size, reason=self.known.reason)

    def remember(self, found: Fit) -> str:
        """Keep a new answer; return what has to be said."""
        if self.key is None:
            return self.note
        if self.known is None or found.micro_batch != self.known.micro_batch:
            is_final = found.next_size is None or "--max-trials" not in found.next_size.why
            note = self.answers.remember(self.key, found) if is_final else ""
            if self.known is not None:
                note = f"micro-batch {self.known.micro_batch:,} of {self._day} fits no more; searched anew"
            return note or self.note
        return f"remembered from {self._day} and certified by one probe; --no-cache searches anew"
