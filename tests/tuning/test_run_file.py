"""The run's file: whole or not at all, and clear words where it cannot be read."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from batchwright.errors import BatchwrightError, InvalidInputError
from batchwright.tuning.run_file import SECTIONS, new_run, read_run_file, read_run_to_resume, write_run
from tests.tuning.runs import by_hand


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
        ('{"schema": 99, "kind": "batchwright run"}', "pip install --upgrade"),
        ('{"schema": true, "kind": "batchwright run"}', "which schema"),
        ('{"schema": 0, "kind": "batchwright run"}', "which schema"),
        ('{"kind": "batchwright run"}', "which schema"),
        (json.dumps({**new_run("today"), "branches": []}), "it has no branches"),
        (json.dumps({**new_run("today"), "fit": "many"}), "it has no fit"),
        ("[" * 100_000, "damaged"),
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

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(BatchwrightError, match="no space left on device"):
        write_run(new_run("second"), file)
    assert json.loads(file.read_text())["created"] == "first"


def test_a_number_that_is_none_costs_no_measurement(tmp_path: Path) -> None:
    run = {**new_run("today"), "noise": {"losses": [1.0, math.nan], "high": math.inf}}
    write_run(run, tmp_path / "run.json")
    assert read_run_file(tmp_path / "run.json")["noise"] == {"losses": [1.0, None], "high": None}
    (tmp_path / "other.json").write_text(json.dumps(run))  # NaN and Infinity, as others write them
    assert read_run_file(tmp_path / "other.json")["noise"] == {"losses": [1.0, None], "high": None}


def test_places_that_no_file_can_have_are_explained(tmp_path: Path) -> None:
    for place in (tmp_path, Path(""), tmp_path / ("x" * 300), tmp_path / "no" / "run.json"):
        with pytest.raises(BatchwrightError, match="cannot be written"):
            write_run(new_run("today"), place)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("section", "content"),
    [
        ("fit", {}),
        ("fit", {"skipped": 5}),
        ("fit", {"micro_batch": "many", "limit": 1, "limit_bytes": 1, "line": None, "peak_bytes": {}}),
        ("fit", {"micro_batch": True, "limit": 1, "limit_bytes": 1, "line": None, "peak_bytes": {}}),
        ("throughput", {"fastest_micro_batch": 8, "times": {"points": [{"micro_batch": 8, "seconds": "long"}]}}),
        ("noise", {"effective_batch": 64, "critical_batch": None}),
        ("noise", {"effective_batch": 64, "critical_batch": {"value": "big"}}),
        ("audit", {"exact": "yes"}),
    ],
)
def test_a_section_that_is_damaged_is_measured_again_and_the_others_kept(
    section: str, content: object, tmp_path: Path
) -> None:
    whole = by_hand()
    whole["fit"]["peak_bytes"] = {"device": 2**29}
    write_run(whole, tmp_path / "run.json")
    assert read_run_to_resume(tmp_path / "run.json") == (whole, [])
    write_run({**whole, section: content}, tmp_path / "run.json")
    run, damaged = read_run_to_resume(tmp_path / "run.json")
    assert damaged == [section]
    assert run[section] == {"skipped": "its section was damaged"}
    assert {name: run[name] for name in whole if name != section} == {n: whole[n] for n in whole if n != section}


def test_a_run_that_does_not_say_what_was_asked_cannot_be_resumed(tmp_path: Path) -> None:
    for about in ({}, {"skipped": "x"}, {"name": 5}):
        write_run(by_hand(workload=about), tmp_path / "run.json")
        with pytest.raises(InvalidInputError, match="what was asked"):
            read_run_to_resume(tmp_path / "run.json")
