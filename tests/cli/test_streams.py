"""The command on streams that are closed, gone or written in another encoding, seen from a shell."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

PLAN = f"{sys.executable} -m batchwright plan 256 --micro-batch 8"


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env={**os.environ, **environment}, timeout=60
    )


@pytest.mark.parametrize("options", ["", "--json", "--json 2>&1"])
def test_a_reader_that_goes_away_is_no_error(options: str) -> None:
    ran = shell(f"{PLAN} {options} | true; exit ${{PIPESTATUS[0]}}")
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_closed_stdout_is_refused_at_once() -> None:
    ran = shell(f"{PLAN} >&-")
    assert ran.returncode == 2
    assert ran.stderr.startswith("Error: stdout is closed, so the answer cannot be written.")


@pytest.mark.parametrize("closed", ["2>&-", "<&-", "<&- 2>&-"])
def test_the_answer_needs_neither_stdin_nor_stderr(closed: str) -> None:
    ran = shell(f"{PLAN} {closed}")
    assert ran.returncode == 0
    assert ran.stdout == shell(PLAN).stdout


def test_no_file_of_ours_takes_the_place_of_a_closed_stream(tmp_path: Path) -> None:
    opening = "import os, sys; from batchwright.cli import open_streams; open_streams(); print(os.open('f', 65))"
    ran = shell(f"cd {tmp_path}; {sys.executable} -c {opening!r} <&- 2>&-".replace("'", '"').replace('"f"', "'f'"))
    assert int(ran.stdout) > 2


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_a_stream_that_cannot_show_a_line_shows_the_nearest(encoding: str) -> None:
    plain = shell(PLAN)
    ran = shell(PLAN, PYTHONIOENCODING=encoding)
    assert (ran.returncode, ran.stderr) == (0, plain.stderr)
    assert ran.stdout == plain.stdout.replace("─", "-")


def test_a_page_that_cannot_be_shown_says_how_it_can() -> None:
    explain = f"{sys.executable} -m batchwright explain accumulation --lang zh"
    ran = shell(explain, PYTHONIOENCODING="ascii")
    assert ran.returncode == 2
    assert "try: PYTHONIOENCODING=utf-8" in ran.stderr
    as_json = shell(f"{explain} --json", PYTHONIOENCODING="ascii")
    assert json.loads(as_json.stdout) == json.loads(shell(f"{explain} --json").stdout)


@pytest.mark.parametrize("missing", ["torch", "numpy"])
def test_a_package_that_is_not_installed_is_named(tmp_path: Path, missing: str) -> None:
    # A module of that name that cannot be found, as in an environment without it.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {missing!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Missing())\n"
    )
    (tmp_path / "train.py").write_text(f"import {missing}\ndef workload(): ...\n")
    import os

    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    ran = shell(f"cd {tmp_path}; {sys.executable} -m batchwright audit train.py:workload", PYTHONPATH=path)
    assert ran.returncode == 2
    assert ran.stderr.splitlines()[-2:] == [
        f"Error: {missing} is not installed in {sys.prefix}.",
        f"  try: pip install {missing}",
    ]
