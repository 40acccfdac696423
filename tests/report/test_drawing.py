"""What a person sees: nothing cut, nothing unescaped, nothing left out."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

import batchwright as bw
from batchwright.errors import MissingExtraError, import_extra
from batchwright.report.display import render_plain, table_to_html
from batchwright.units import shortened


def seen_on_a_terminal(columns: int, *args: str) -> str:
    """Run the command on a real pseudo-terminal of so many columns."""
    parent, child = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "LINES": "50", "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-m", "batchwright", *args], stdout=child, stderr=child, stdin=child, env=environment
    )
    os.close(child)
    output = b""
    while True:
        try:
            chunk = os.read(parent, 65536)
        except OSError:
            break
        if not chunk:
            break
        output += chunk
    process.wait()
    os.close(parent)
    return output.decode()


@pytest.mark.parametrize("columns", [40, 80])
def test_no_number_is_cut_on_a_terminal(columns: int) -> None:
    huge = ["plan", "1000000000", "--micro-batch", "100000", "--devices", "8", "--samples", "1000000000000"]
    shown = seen_on_a_terminal(columns, *huge)
    assert "\u2026" not in shown
    # 10^12 samples in passes of 100,000 on 8 devices.
    assert "1,250,000" in shown
    advice = ["advise", "unstable", "--micro-batch", "2", "--accumulation", "1600", "--learning-rate", "1.2345e-5"]
    assert "1.23e-05" in seen_on_a_terminal(columns, *advice)


def test_the_usual_table_fits_80_columns() -> None:
    lines = render_plain(bw.plan(1024, micro_batch=48, devices=4, samples=100_000)).splitlines()
    rule = next(number for number, line in enumerate(lines) if line.startswith("\u2500"))
    assert max(map(len, lines[rule - 2 : rule + 8])) <= 80


def test_a_page_is_drawn_on_a_terminal() -> None:
    shown = seen_on_a_terminal(80, "explain", "batch-size")
    assert "| homework 1 | homework 2 | homework 3 |" in shown


def test_html_is_escaped() -> None:
    html = table_to_html("<b>", [("<i>", ["<u>"])], ["<s>"])
    assert not any(tag in html for tag in ("<b><b>", "<i>", "<u>", "<s>"))


def test_every_result_shows_itself_in_a_notebook() -> None:
    plan = bw.plan(32, micro_batch=8, samples=100)
    assert "<td" in plan._repr_html_()
    assert "why: " in plan._repr_html_()
    assert "4 (kept)" not in bw.advise("oom", micro_batch=8)._repr_html_()
    assert "8 (kept)" in bw.advise("oom", micro_batch=8)._repr_html_()


def test_a_broken_extra_shows_its_own_error(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    from pathlib import Path

    Path(str(tmp_path), "halfway.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency") as error:
        import_extra("halfway", extra="transformers", purpose="drawing")
    assert not isinstance(error.value, MissingExtraError)


def test_a_number_of_any_size_can_be_named() -> None:
    assert shortened(10**5000) == "a number of 16610 bits"
