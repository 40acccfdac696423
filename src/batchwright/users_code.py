"""Whose mistake is it: find the user's own lines in a traceback."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType


def is_from_users_code(error: BaseException) -> bool:
    """Whether the error passed through a file that is neither ours nor an installed package's."""
    # A file that does not parse has no frame of its own.
    return users_traceback(error) is not None or (
        isinstance(error, SyntaxError) and not is_installed_or_ours(error.filename)
    )


def users_traceback(error: BaseException) -> TracebackType | None:
    """Return the traceback from the user's first line on: what we did before it helps nobody."""
    found = error.__traceback__.tb_next if error.__traceback__ is not None else None
    while found is not None and is_installed_or_ours(found.tb_frame.f_code.co_filename):
        found = found.tb_next
    return found


def users_traceback_text(error: BaseException) -> str:
    """Return the error as Python prints it, from the user's first line on; whole where no line is the user's."""
    found = users_traceback(error)
    if found is None and not isinstance(error, SyntaxError):
        found = error.__traceback__
    return "".join(traceback.format_exception(type(error), error, found)).rstrip()


def is_installed_or_ours(filename: str | None) -> bool:
    """Whether a file is Python's, an installed package's, ours, or none at all; so not the user's."""
    paths = sysconfig.get_paths()
    known = (str(Path(__file__).parent), paths["purelib"], paths["platlib"], paths["stdlib"], "<")
    return filename is None or filename.startswith(known)
