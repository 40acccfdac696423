"""stdin, stdout and stderr as the command finds them, made fit to use.

Promises:
- a closed stdout is refused at once: the answer would have nowhere to go; a closed stdin or stderr is the null device;
- no file that is opened later takes the number of a closed stream, where native code would write into it;
- a stream that cannot show a character (ASCII, Latin-1) shows the nearest it can, and never ends in a traceback.
"""

from __future__ import annotations

import codecs
import os
import sys

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
