"""The run's file: whole or not at all, and clear words where it cannot be read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from batchwright.errors import BatchwrightError, InvalidInputError
from batchwright.tuning.run_file import SECTIONS, new_run, read_run_file, write_run


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    run = new_run("2026-11-16")
    write_run(run, tmp_path / "run.json")
    assert read_run_file(tmp_path / "run.json") == run
    assert [name for name in run if name in SECTIONS] == list(SECTIONS)
    assert os.listdir(tmp_path) == ["run.json"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "damaged"),
        ('{"schema": 1, "kind": "batchwright run", "fit": {', "damaged"),
        ("[1, 2]", "is no run"),
        ('{"schema": 1}', "is no run"),
        ('{"schema": 2, "kind": "batchwright run"}', "schema 2, and this batchwright reads up to 1"),
        ('{"schema": 1, "kind": "batchwright run"}', "it has no workload, estimate"),
    ],
)
def test_a_file_that_cannot_be_used_is_explained(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "run.json"
    file.write_text(text)
    with pytest.raises(InvalidInputError, match=words):
        read_run_file(file)


def test_a_file_that_is_not_there_is_explained(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="no run at"):
        read_run_file(tmp_path / "none.json")


def test_a_write_that_fails_leaves_the_run_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.json"
    write_run(new_run("first"), file)

    def full(self: Path, *_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(BatchwrightError, match="No space left on device"):
        write_run(new_run("second"), file)
    assert json.loads(file.read_text())["created"] == "first"
