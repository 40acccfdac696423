"""Whatever the user's code raises is shown as its own traceback, and the command ends with 3."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Run

# click itself gives the first five a meaning: a reader that went away, an interrupt, an exit code, a message of ours.
ERRORS = [
    "BrokenPipeError(32, 'the worker is gone')",
    "EOFError('nothing to read')",
    "click.Abort()",
    "click.exceptions.Exit(7)",
    "click.ClickException('of the user')",
    "GeneratorExit()",
    "asyncio.CancelledError()",
    "OSError(28, 'no space left')",
    "RecursionError()",
    "Mute()",
]
MUTE = "class Mute(Exception):\n    def __str__(self):\n        raise ValueError\n    __repr__ = __str__\n"


@pytest.mark.parametrize("error", ERRORS)
def test_it_is_shown_from_the_users_first_line_on(error: str, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(f"import asyncio\nimport click\n{MUTE}def workload():\n    raise {error}\n")
    ran = run("estimate", f"{file}:workload")
    assert (ran.code, ran.out) == (3, "")
    assert f'Traceback (most recent call last):\n  File "{file}", line' in ran.err
    assert error.partition("(")[0].rpartition(".")[2] in ran.err.splitlines()[-1]


def test_an_interrupt_inside_the_users_code_is_still_an_interrupt(run: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def workload():\n    raise KeyboardInterrupt\n")
    ran = run("estimate", f"{tmp_path / 'train.py'}:workload")
    assert ran.code == 130
    assert ran.err.endswith("Interrupted.\n")
