"""Answers of earlier runs: where a search starts, never what it returns unprobed.

Promises:
- an answer is remembered for a target, under a hash of its file and the other files of the user's that are imported,
  its arguments, the model as it prints itself, the request, the device, the bytes there are, and the versions of torch
  and batchwright; whatever goes wrong on the way to the hash, there is none, and the search is done in full;
- one probe certifies a remembered size before it is an answer; one that does not fit any more starts the search anew;
- reading and writing never raise: an entry that is damaged, foreign or out of reach is ignored, and a note says so;
- a file is whole or not there, also if two processes write at once;
- one small JSON file per answer, readable by a person; the last 500 used are kept.

A hash that should have changed and did not (the user's code reads a file) never yields a size that does not run,
but perhaps one that is not the largest. The files lie in `$BATCHWRIGHT_CACHE`, else in the user's cache folder, under
`fits`; deleting them is safe.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import sys
import time
import warnings
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from batchwright import __version__
from batchwright.device.device import open_device
from batchwright.fitting.fit_result import Fit, NextSize
from batchwright.planning.search import Seen, skip_known
from batchwright.state.process_state import uninterrupted
from batchwright.state.untouched import untouched
from batchwright.targets import Target, is_installed_or_ours
from batchwright.trace.run import build_skeleton
from batchwright.units import LARGEST_COUNT, shortened
from batchwright.user_files import cache_folder, read_bytes, write_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from batchwright.fitting.probers import Budget
    from batchwright.fitting.request import FitRequest
    from batchwright.workload import Workload

_SCHEMA = 1
_MOST_ENTRIES = 500
# Ours take about one KiB; whatever is larger is not ours, and is not read into memory to find out.
_MOST_BYTES = 2**16
# A temporary file this old belongs to a process that died while writing it.
_ABANDONED_SECONDS = 3600.0
_OUTCOMES = (None, "fits", "out_of_memory", "failed")
# What is free moves by itself from run to run; a budget that somebody set does not.
_FREE_STEP_BYTES = 256 * 2**20


@dataclass(frozen=True)
class AnswerBook:
    """Where answers for this target are looked up; `where` is where its probes run."""

    workload: Workload
    target: str
    request: FitRequest
    where: str
    only_evaluate: bool = False

    def look_up(self, shape: Mapping[str, Any], on: str, budget: Budget, *, cap: int) -> RecalledAnswer:
        """Return what is remembered for a shape, which may be nothing."""
        key = self.find_key(shape, on, budget, cap=cap)
        answers = Answers()
        known, note = (None, "") if key is None else answers.recall(key)
        return RecalledAnswer(answers, key, known if known is not None and known.micro_batch <= cap else None, note)

    def find_key(self, shape: Mapping[str, Any], on: str, budget: Budget, *, cap: int) -> str | None:
        """Return the hash of all that the answer depends on; None if the user's code raises on the way."""
        limit_bytes = budget.probe_bytes
        if limit_bytes is not None and not budget.was_asked:
            limit_bytes = limit_bytes // _FREE_STEP_BYTES * _FREE_STEP_BYTES
        # What does not change the answer at one shape, or is in it otherwise.
        request = replace(self.request, memory=None, margin=0.0, shapes=(), evaluate=False, isolate=None)
        options = [repr(request), self.where, self.only_evaluate, sorted(map(str, shape.items())), limit_bytes, cap]
        try:
            accelerator = None if on == "cpu" else torch.device(on)
            with (
                untouched(self.workload, accelerator=accelerator, is_traced=True),
                warnings.catch_warnings(action="ignore"),
                contextlib.redirect_stdout(io.StringIO()),
            ):
                model = repr(build_skeleton(self.workload)[0])
            # After the model was built: by then everything is imported that building it imports.
            contents = [_hash_files(self.target), Target.read(self.target).arguments, model, options, _versions(on)]
            return hashlib.sha256(json.dumps(contents).encode()).hexdigest()
        except Exception:
            # A bug in the user's own functions shows in the first probe, with its traceback.
            return None


def _hash_files(target: str) -> list[list[str]]:
    """Return names and hashes of the target's file and of all files of the user's that are imported by now."""
    read = Target.read(target)
    files = {Path(read.place if read.place.endswith(".py") else sys.modules[read.place].__file__ or "").resolve()}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        # The program that called fit is no part of the target; if it is, it is the target's own file.
        if name != "__main__" and isinstance(file, str) and os.path.isabs(file) and not is_installed_or_ours(file):
            files.add(Path(file).resolve())
    hashes = ([file.name, hashlib.sha256(file.read_bytes()).hexdigest()] for file in files if file.is_file())
    return [[read.function, ""], *sorted(hashes)]


def _versions(on: str) -> list[Any]:
    """Return what the same step takes more or less memory by: versions, threads, allocator settings, the device."""
    settings = {name: value for name, value in os.environ.items() if name.startswith(("PYTORCH_", "MALLOC_"))}
    total_bytes = None if on == "cpu" else open_device(on).total_bytes
    return [str(torch.__version__), __version__, torch.get_num_threads(), sorted(settings.items()), on, total_bytes]


@dataclass(frozen=True)
class RecalledAnswer:
    """What an earlier run answered to the same request; `known` is None if nothing did."""

    answers: Answers
    key: str | None
    known: Remembered | None
    note: str

    def try_first(self, search: Callable[[], Generator[int, Seen, None]]) -> Generator[int, Seen, None]:
        """Try the remembered size before anything else; search only if it does not fit any more."""
        return search() if self.known is None else from_remembered(self.known.micro_batch, search)

    def conclude(self, fit: Fit, *, is_final: bool) -> Fit:
        """Remember a new answer; complete a confirmed one by what was known of its next size; note either."""
        known, note = self.known, self.note
        if known is not None and fit.micro_batch == known.micro_batch:
            day, next_size = known.when[:10], known.next_size or fit.next_size
            if known.next_size is not None:
                next_size = replace(known.next_size, why=f"{known.next_size.why} (remembered from {day})")
            fit = replace(fit, next_size=next_size, reason=known.reason)
            note = f"remembered from {day} and certified by one probe; without the cache it is searched anew"
        else:
            if self.key is not None and is_final:
                note = self.answers.remember(self.key, fit) or note
            if known is not None:
                note = f"micro-batch {known.micro_batch:,} of {known.when[:10]} fits no more; searched anew"
        return replace(fit, notes=(*fit.notes, note)) if note else fit


def from_remembered(size: int, fallback: Callable[[], Generator[int, Seen, None]]) -> Generator[int, Seen, None]:
    """Try a remembered size first: one probe certifies it; if it does not fit, search as if nothing were known.

    `fallback` is called only if it is needed, since to make one may mean to trace the step.
    """
    seen = yield size
    if not seen.fits:
        # This size does not fit, so no larger one does.
        yield from skip_known(fallback(), lambda larger: Seen(larger, fits=False) if larger >= size else None)


@dataclass(frozen=True)
class Remembered:
    """An answer of an earlier run: a size to certify, and what was known of the size above it then."""

    micro_batch: int
    next_size: NextSize | None
    reason: str
    when: str


class Answers:
    """The answers that are remembered, each under a key of `AnswerBook`."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = answers_folder() if folder is None else folder

    def recall(self, key: str) -> tuple[Remembered | None, str]:
        """Return the answer under a key, or None; the note says why an entry was ignored."""
        if self._folder is None:
            return None, ""
        file = self._folder / f"{key}.json"
        try:
            text = read_bytes(file, most_bytes=_MOST_BYTES, may_be_pipe=False)
        except FileNotFoundError:
            return None, ""
        except OSError as error:
            return None, f"a remembered answer was ignored: it cannot be read ({_describe(error)})"
        try:
            answer = _read_entry(text, key)
        except (ValueError, RecursionError) as error:
            return None, f"a remembered answer was ignored: the file is damaged ({_describe(error)}): {file}"
        # The oldest are deleted first, and one that is in use is not old.
        with contextlib.suppress(OSError):
            os.utime(file)
        return answer, ""

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
            with uninterrupted():
                write_whole(self._folder / f"{key}.json", json.dumps(entry, indent=2).encode())
        except (OSError, ValueError, TypeError) as error:
            return f"the answer is not remembered: {self._folder} cannot be written to ({_describe(error)})"
        _delete_oldest(self._folder)
        return ""


def answers_folder() -> Path | None:
    """Return where answers are kept; None if the user has no home."""
    folder = cache_folder()
    return None if folder is None else folder / "fits"


def _read_entry(text: bytes, key: str) -> Remembered:
    """Check every field, for anybody may have written the file; a ValueError says what is wrong."""
    entry = json.loads(text)
    if not isinstance(entry, dict):
        raise ValueError("it is no JSON object")
    if entry.get("schema") != _SCHEMA or entry.get("key") != key:
        raise ValueError(f"schema {shortened(entry.get('schema'))} and key {shortened(entry.get('key'))} are foreign")
    size, when, reason = _field(entry, "micro_batch", int), _field(entry, "when", str), _field(entry, "reason", str)
    datetime.fromisoformat(when)
    following, next_size = entry.get("next_size"), None
    if following is not None:
        if not isinstance(following, dict) or following.get("outcome") not in _OUTCOMES:
            raise ValueError(f"next_size is {shortened(following)}")
        above, why = _field(following, "micro_batch", int, least=size + 1), _field(following, "why", str)
        next_size = NextSize(above, following.get("outcome"), why)
    return Remembered(size, next_size, reason, when)


def _field(entry: Mapping[str, Any], name: str, kind: type, *, least: int = 1) -> Any:
    value = entry.get(name)
    # Not isinstance: True is no size.
    if type(value) is not kind or (isinstance(value, int) and not least <= value <= LARGEST_COUNT):
        raise ValueError(f"{name} is {shortened(value)}")
    return value


def _delete_oldest(folder: Path) -> None:
    # Another process may be deleting the same ones; what is left over then goes the next time.
    with contextlib.suppress(OSError):
        entries = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime)
        abandoned = [f for f in folder.glob(".*.json.*") if f.stat().st_mtime < time.time() - _ABANDONED_SECONDS]
        for file in (*abandoned, *entries[: max(0, len(entries) - _MOST_ENTRIES)]):
            file.unlink(missing_ok=True)


def _describe(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
