"""Files that the user names: whatever stands there, an answer or a message comes at once."""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import batchwright as bw
from batchwright import user_files as users_files
from batchwright.errors import BatchwrightError, InvalidInputError
from batchwright.memory.on_card import read_run
from batchwright.tuning.run_file import read_run_file
from batchwright.user_files import check_place, read_bytes, read_text, replace_file

if TYPE_CHECKING:
    from collections.abc import Callable

replace: Callable[..., None] = partial(replace_file, what="the run", option="file=FILE")


def a_pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe.json")
    return folder / "pipe.json"


def no_text(folder: Path) -> Path:
    (folder / "weights.json").write_bytes(b"\x80\x00\xff")
    return folder / "weights.json"


def an_empty_file(folder: Path) -> Path:
    (folder / "empty.json").touch()
    return folder / "empty.json"


def deep_json(folder: Path) -> Path:
    (folder / "deep.json").write_text("[" * 100_000)
    return folder / "deep.json"


def a_huge_file(folder: Path) -> Path:
    with (folder / "huge.json").open("wb") as file:
        file.truncate(1 << 40)
    return folder / "huge.json"


def a_name_that_is_none(folder: Path) -> Path:
    return folder / "zero\0byte.json"


PLACES = [
    *(a_pipe, no_text, an_empty_file, deep_json, a_huge_file, a_name_that_is_none),
    *(lambda folder: folder, lambda _: Path("/dev/zero"), lambda _: Path("/dev/null"), lambda _: Path("/dev/tty")),
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "read",
    [
        bw.check_config,
        read_run,
        read_run_file,
        lambda file: bw.TokenBatchSampler(len, 10, dataset=["a", "bc"], remember=file),
    ],
    ids=["plan --check", "--calibrate", "report and --resume", "remember="],
)
def test_whatever_cannot_be_read_is_refused_at_once(
    read: Callable[[Path], object], place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(users_files, "_WRITER_SECONDS", 0.05)
    file = place(tmp_path)
    with pytest.raises(InvalidInputError) as refused:
        read(file)
    assert str(file) in str(refused.value) or "named by its path" in str(refused.value)


@pytest.mark.parametrize(
    "check",
    [
        lambda place: bw.record_run(None, micro_batch=1, file=place),  # type: ignore[arg-type]
        partial(check_place, what="the run", option="file=FILE"),
        partial(replace, content=b"text"),
    ],
)
def test_a_place_that_cannot_be_written_to_is_refused(check: Callable[..., object], tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    for place in (tmp_path / "folder.png", tmp_path / "no" / "run.png", tmp_path / "zero\0byte.png"):
        with pytest.raises(BatchwrightError, match="cannot be written"):
            check(place)
    assert list(tmp_path.iterdir()) == [tmp_path / "folder.png"]


def test_a_file_that_may_not_be_written_to_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "kept.json"
    file.write_text("mine")
    # Not by chmod: tests may run as root, whom it does not stop.
    monkeypatch.setattr(os, "access", lambda place, mode: place != file)
    with pytest.raises(BatchwrightError, match="permission denied"):
        replace(file, b"theirs")
    assert file.read_text() == "mine"


def test_who_may_read_a_file_stays_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "secret.json"
    file.write_text("mine")
    file.chmod(0o600)
    replace(file, b"new")
    assert (file.read_text(), stat.S_IMODE(file.stat().st_mode)) == ("new", 0o600)


def test_what_is_no_plain_file_is_written_into_and_never_replaced(tmp_path: Path) -> None:
    pipe = a_pipe(tmp_path)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    replace(pipe, b"text")
    assert os.read(reader, 65536) == b"text"
    os.close(reader)
    with pytest.raises(BatchwrightError, match="it is a pipe, and nobody reads from it"):
        replace(pipe, b"text")
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to("run.json")
    replace(tmp_path / "link.json", b"text")
    assert (tmp_path / "link.json").is_symlink()
    assert read_bytes(tmp_path / "run.json") == b"text"


def test_a_pipe_whose_writer_is_slow_is_read(tmp_path: Path) -> None:
    pipe = a_pipe(tmp_path)

    def write_slowly() -> None:
        with pipe.open("w") as stream:
            time.sleep(0.2)
            stream.write(json.dumps("text"))

    writer = threading.Timer(0.1, write_slowly)
    writer.start()
    assert read_text(pipe) == '"text"'
    writer.join()
