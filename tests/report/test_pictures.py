"""The picture of a run: a real PNG, whatever was skipped."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from batchwright.errors import BatchwrightError, InvalidInputError, MissingExtraError
from batchwright.report.pictures import draw_png

HERE = Path(__file__).parent


def sample(name: str = "sample_run") -> dict[str, Any]:
    run: dict[str, Any] = json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))
    return run


def size_of(picture: Path) -> tuple[int, int]:
    start = picture.read_bytes()[:24]
    assert start.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", start[16:24])
    return width, height


@pytest.mark.parametrize("name", ["sample_run", "skipped_run"])
def test_a_run_becomes_one_picture(name: str, tmp_path: Path) -> None:
    draw_png(sample(name), tmp_path / "run.png")
    width, height = size_of(tmp_path / "run.png")
    assert width > 1000
    assert height > 1000


def test_a_name_is_never_read_as_a_formula_or_lacking_letters_an_error(tmp_path: Path) -> None:
    run = sample()
    run["workload"]["name"] = "cost $x^{ \\frac \u6279\u91cf"
    run["fit"] = {"skipped": "it cost $5 and $6_"}
    draw_png(run, tmp_path / "run.png")
    assert size_of(tmp_path / "run.png")


def test_without_matplotlib_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'batchwright\[plot\]'"):
        draw_png(sample(), tmp_path / "run.png")


def test_places_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"ends in \.png"):
        draw_png(sample(), tmp_path / "run.gif")
    with pytest.raises(BatchwrightError, match="cannot be written"):
        draw_png(sample(), tmp_path / "nowhere" / "run.png")


@pytest.mark.parametrize("name", ["x" * 10_000, "word " * 3000, "\x00\ud800", "\u202e\u05d0\U0001f600"])
@pytest.mark.filterwarnings("error")
def test_texts_of_any_kind_leave_room_for_the_charts(name: str, tmp_path: Path) -> None:
    run = sample()
    run["workload"]["name"] = name
    run["estimate"]["parts"][name] = 2**24
    run["noise"]["critical_batch"]["unit"] = name
    run["throughput"] = {"skipped": name}
    draw_png(run, tmp_path / "run.png")
    assert size_of(tmp_path / "run.png")
