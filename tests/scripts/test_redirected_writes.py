"""What a probed program writes: it sees its own files, and the user's stay byte for byte."""

from __future__ import annotations

import importlib
import io
import os
import shutil
import sqlite3
import tarfile
import tempfile
from os import remove as _remove
from pathlib import Path
from shutil import rmtree as _rmtree
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from batchwright.scripts.redirected_writes import writes_led_to

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the user's, which must be the same afterwards."""
    work = tmp_path / "work"
    (work / "out").mkdir(parents=True)
    (work / "kept.txt").write_text("mine")
    (work / "out" / "model.pt").write_bytes(b"weights")
    monkeypatch.chdir(work)
    before = contents(work)
    yield work
    assert contents(work) == before


def contents(folder: Path) -> dict[str, Any]:
    return {
        str(path.relative_to(folder)): (path.read_bytes() if path.is_file() else None, path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
    }


def write_twice() -> None:
    Path("kept.txt").write_text("theirs")
    assert Path("kept.txt").read_text() == "theirs"


def append() -> None:
    with open("kept.txt", "a") as file:
        file.write(" and theirs")
    assert Path("kept.txt").read_text() == "mine and theirs"


def update() -> None:
    with open("kept.txt", "r+") as file:
        assert file.read(1) == "m"
        file.write("y")


def make_folders() -> None:
    os.makedirs("runs/1/checkpoints")
    os.makedirs("runs/1/checkpoints", exist_ok=True)
    Path("runs/1/log.txt").write_text("loss")
    assert os.path.isdir("runs/1")
    assert os.path.exists("runs/1/log.txt")
    assert "log.txt" in os.listdir("runs/1")
    with pytest.raises(FileExistsError):
        Path("runs").mkdir()


def delete() -> None:
    os.remove("kept.txt")
    assert not os.path.exists("kept.txt")
    with pytest.raises(FileNotFoundError):
        Path("kept.txt").read_text()
    with pytest.raises(FileNotFoundError):
        os.remove("kept.txt")
    Path("kept.txt").write_text("new")
    assert Path("kept.txt").read_text() == "new"


def list_what_is_there() -> None:
    Path("out/new.txt").write_text("new")
    assert sorted(os.listdir("out")) == sorted(path.name for path in Path("out").iterdir()) == ["model.pt", "new.txt"]
    os.remove("out/model.pt")
    with os.scandir("out") as entries:
        assert [entry.name for entry in entries] == ["new.txt"]
    assert list(Path().glob("*.txt")) == [Path("kept.txt")]


def write_a_named_temporary_file() -> None:
    os.makedirs("cache/csv")
    with tempfile.NamedTemporaryFile("w", dir="cache/csv", delete=False) as file:
        file.write("rows")
    shutil.move(file.name, "cache/table.arrow")
    assert Path("cache/table.arrow").read_text() == "rows"


def write_by_keyword_and_by_names_bound_before() -> None:
    torch.save({"a": torch.ones(2)}, f="out/model.pt")
    assert torch.load(f="out/model.pt")["a"].tolist() == [1, 1]
    with tarfile.open("kept.txt", "w") as archive:
        archive.add("out")
    _remove("kept.txt")
    assert not Path("kept.txt").exists()
    _rmtree("out")
    assert not Path("out").exists()


def write_past_everything() -> None:
    with pytest.raises(PermissionError, match="batchwright refuses"):
        io.FileIO("kept.txt", "w")


def link_and_change_folder() -> None:
    os.makedirs("runs/1")
    os.symlink(os.path.abspath("runs/1"), "latest")
    assert os.path.islink("latest")
    os.chdir("runs/1")
    Path("here.txt").write_text("in the new folder")
    assert Path("here.txt").read_text() == "in the new folder"


def read_by_a_library_of_c() -> None:
    pyarrow: Any = importlib.import_module("pyarrow")

    Path("table.bin").write_bytes(b"12345")
    assert pyarrow.memory_map("table.bin").read() == pyarrow.OSFile("table.bin").read() == b"12345"


def delete_a_folder() -> None:
    shutil.rmtree("out")
    assert not os.path.exists("out/model.pt") or not os.path.exists("out")
    shutil.rmtree("nowhere", ignore_errors=True)


def rename() -> None:
    os.rename("kept.txt", "moved.txt")
    assert Path("moved.txt").read_text() == "mine"
    assert not Path("kept.txt").exists()
    Path("new.tmp").write_text("checkpoint")
    os.replace("new.tmp", "out/model.pt")
    assert Path("out/model.pt").read_text() == "checkpoint"


def write_exclusively() -> None:
    with pytest.raises(FileExistsError), open("kept.txt", "x"):
        pass
    with open("fresh.txt", "x"):
        pass
    with pytest.raises(FileNotFoundError):
        Path("nowhere/file.txt").write_text("")
    with pytest.raises(FileNotFoundError), open("nothing.txt", "r+"):
        pass


def write_by_descriptor() -> None:
    number = os.open("kept.txt", os.O_WRONLY | os.O_TRUNC)
    os.write(number, b"theirs")
    os.close(number)
    assert Path("kept.txt").read_text() == "theirs"


def save_weights() -> None:
    torch.save({"a": torch.ones(2)}, "out/model.pt")
    assert torch.load("out/model.pt")["a"].tolist() == [1, 1]
    save_file({"a": torch.ones(2)}, "out/model.safetensors")


def write_a_database() -> None:
    with sqlite3.connect("runs.db") as database:
        database.execute("create table t (x)")


def touch_and_chmod() -> None:
    os.chmod("kept.txt", 0o600)
    os.utime("kept.txt")
    Path("kept.txt").touch()


@pytest.mark.parametrize(
    "program",
    [
        *(write_twice, append, update, make_folders, delete, delete_a_folder, rename, write_exclusively),
        *(write_by_descriptor, save_weights, write_a_database, touch_and_chmod, list_what_is_there),
        *(write_by_keyword_and_by_names_bound_before, write_past_everything),
        *(write_a_named_temporary_file, link_and_change_folder, read_by_a_library_of_c),
    ],
)
def test_nothing_of_the_users_changes(program: Callable[[], None], tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    if program is read_by_a_library_of_c:
        pytest.importorskip("pyarrow")  # what a program imports is imported before it runs
    with writes_led_to(tmp_path / "scratch") as scratch:
        program()
    assert not scratch.folder.is_relative_to(Path.cwd())


def test_devices_and_other_temporary_files_pass(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    with writes_led_to(tmp_path / "scratch") as scratch:
        Path(os.devnull).write_text("gone")
        (tmp_path / "elsewhere").write_text("kept")
    assert (tmp_path / "elsewhere").read_text() == "kept"
    assert scratch.written == []
