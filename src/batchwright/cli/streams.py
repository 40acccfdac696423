"""stdin, stdout and stderr, made usable; and answers printed on stdout.

Promises:
- a closed stdout is refused at once: the answer would have nowhere to go; a closed stdin or stderr is the null device;
- no file that is opened later takes the number of a closed stream, where native code would write into it;
- a stream that cannot show a character (ASCII, Latin-1) shows the nearest it can, and never ends in a traceback.
"""

from __future__ import annotations

import codecs
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import click

from batchwright.errors import InvalidInputError

# What we draw beyond ASCII, and what to draw instead.
_PLAIN = {"─": "-", "━": "-", "│": "|", "█": "#", "\N{MULTIPLICATION SIGN}": "x", "…": "...", "≥": ">=", "≤": "<="}
_HANDLER = "batchwright-plain"


def open_streams() -> None:
    """Make the three streams usable, or say why the answer cannot be written."""
    closed = [number for number in (0, 1, 2) if not _is_open(number)]
    for number in closed:
        null = os.open(os.devnull, os.O_RDONLY if number == 0 else os.O_WRONLY)
        if null != number:
            os.dup2(null, number)
            os.close(null)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - it lives as long as the process
    codecs.register_error(_HANDLER, _nearest)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=_HANDLER)
    if sys.stdout is None or 1 in closed:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        raise InvalidInputError(
            "stdout is closed, so the answer cannot be written.", remedy="> /dev/null if only the exit code is wanted"
        )


def can_show(text: str) -> bool:
    """Whether stdout has every character of a text.

    >>> can_show("batch")
    True
    """
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _nearest(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    return "".join(_PLAIN.get(character, "?") for character in text), error.end


def print_json(data: dict[str, Any]) -> None:
    """Print plain data as JSON on stdout."""
    text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
    click.echo(text if can_show(text) else json.dumps(data, indent=2, allow_nan=False))


def print_result(result: Any, *, as_json: bool) -> None:
    """Print a result: as JSON, or drawn for the terminal."""
    if as_json:
        print_json(result.to_dict())
        return
    from batchwright.report.display import print_answer

    print_answer(result)


@contextmanager
def report_progress(target: str, *, prints: bool = True) -> Iterator[Callable[[str], None]]:
    """Yield what tells the person how far the work is; what the user's code prints goes to stderr meanwhile.

    `prints` is false on all ranks but one.
    """
    from batchwright.report.display import Progress

    with Progress() as progress, redirect_stdout(sys.stderr):
        say = progress.say if prints else lambda _: None
        say(f"loading {target}")
        yield say
