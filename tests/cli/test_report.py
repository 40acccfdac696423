"""`batchwright report` as a person types it, the wrong files too."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from batchwright.cli import group
from batchwright.errors import BatchwrightError, InvalidInputError

if TYPE_CHECKING:
    from click.testing import Result

SAMPLE = Path(__file__).parents[1] / "report" / "sample_run.json"


def report(*args: str | Path) -> Result:
    return CliRunner().invoke(group, ["report", *(str(arg) for arg in args)], catch_exceptions=False)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return Path(shutil.copy(SAMPLE, tmp_path / "run.json"))


def test_the_page_is_written_and_its_place_printed(run_file: Path, tmp_path: Path) -> None:
    ran = report(run_file, "-o", tmp_path / "report.html")
    assert (ran.exit_code, ran.stdout) == (0, f"{tmp_path / 'report.html'}\n")
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_without_a_name_it_stands_beside_the_run(run_file: Path) -> None:
    assert report(run_file).stdout == f"{run_file.with_suffix('.html')}\n"


def test_json_names_what_was_written(run_file: Path, tmp_path: Path) -> None:
    page = tmp_path / "a.html"
    ran = report(run_file, "-o", page, "--json")
    assert json.loads(ran.stdout) == {"schema": 1, "written": [str(page)]}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "damaged"),
        ("not JSON", "damaged"),
        (SAMPLE.read_text(encoding="utf-8")[:5000], "damaged"),
        ("[1, 2]", "no run"),
        ('{"schema": 1, "micro_batch": 8}', "no run"),
        ('{"schema": 2, "kind": "batchwright run"}', "schema 2"),
        ('{"schema": null, "kind": "batchwright run"}', "schema"),
        ('{"schema": 1, "kind": "batchwright run"}', "damaged"),
    ],
)
def test_a_file_that_is_no_run_is_refused_with_what_to_do(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInputError, match=told):
        report(tmp_path / "run.json")
    assert list(tmp_path.iterdir()) == [tmp_path / "run.json"]


def test_a_run_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"no run at .*nowhere\.json"):
        report(tmp_path / "nowhere.json")


def test_a_folder_that_is_not_there_is_wrong_usage(run_file: Path, tmp_path: Path) -> None:
    with pytest.raises(BatchwrightError, match="no such folder") as error:
        report(run_file, "-o", tmp_path / "no" / "report.html")
    assert error.value.exit_code == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_ends_with_1(run_file: Path) -> None:
    with pytest.raises(BatchwrightError, match="no space left on device") as error:
        report(run_file, "-o", "/dev/full")
    assert error.value.exit_code == 1


def test_a_write_that_fails_leaves_the_report_before(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "report.html"
    page.write_text("before")
    write = Path.write_bytes

    def runs_full(file: Path, content: bytes) -> int:
        write(file, content[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", runs_full)
    with pytest.raises(BatchwrightError, match="no space left on device"):
        report(run_file, "-o", page)
    assert page.read_text() == "before"
    assert sorted(tmp_path.iterdir()) == [page, run_file]


def test_the_run_itself_is_never_written_over(run_file: Path, tmp_path: Path) -> None:
    before = run_file.read_bytes()
    (tmp_path / "link.html").symlink_to(run_file)
    for place in (run_file, tmp_path / "link.html"):
        with pytest.raises(InvalidInputError, match="the run itself"):
            report(run_file, "-o", place)
    assert run_file.read_bytes() == before


def test_a_run_from_a_pipe_needs_a_name_for_its_page(run_file: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "batchwright", "report", "/dev/stdin"],
        input=run_file.read_text(encoding="utf-8"),
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, "-o report.html" in ran.stderr) == (2, True)
    assert not Path("/dev/stdin.html").exists()


def test_places_that_no_file_can_have_are_explained(run_file: Path, tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / ("x" * 300)):
        with pytest.raises(BatchwrightError, match="cannot be written"):
            report(run_file, "-o", place)


@pytest.fixture
def other_file(tmp_path: Path) -> Path:
    run = json.loads(SAMPLE.read_text(encoding="utf-8"))
    run["fit"]["micro_batch"] *= 2
    run["recommendation"]["effective_batch"] = 160
    run["recommendation"]["critical_batch"]["value"] = 900
    run["noise"] = {"skipped": "as asked"}
    file = tmp_path / "other.json"
    file.write_text(json.dumps(run), encoding="utf-8")
    return file


def test_two_runs_are_drawn_side_by_side_with_what_changed(run_file: Path, other_file: Path) -> None:
    ran = report(run_file, other_file)
    page = run_file.with_name("run-other.html")
    assert ran.stdout == f"{page}\n"
    text = page.read_text(encoding="utf-8")
    assert "Train with an effective batch of 80" in text
    assert "Train with an effective batch of 160" in text
    assert "x 2" in text
    assert "within the intervals" in text, "a critical batch of 900 is inside of [640, 1,105]"
    assert "noise is not in other.json: as asked" in text


def test_a_run_beside_itself_changed_nothing(run_file: Path) -> None:
    assert report(run_file, run_file, "-o", run_file.with_name("same.html")).exit_code == 0
    assert "Nothing that was measured or predicted differs." in run_file.with_name("same.html").read_text(
        encoding="utf-8"
    )


def test_three_runs_are_refused(run_file: Path) -> None:
    with pytest.raises(InvalidInputError, match="one run or two; received 3"):
        report(run_file, run_file, run_file)


def test_neither_of_two_runs_is_written_over(run_file: Path, other_file: Path) -> None:
    before = other_file.read_bytes()
    with pytest.raises(InvalidInputError, match="is the run itself"):
        report(run_file, other_file, "-o", other_file)
    assert other_file.read_bytes() == before
