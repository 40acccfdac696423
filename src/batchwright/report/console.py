"""The one way an answer reaches stdout: coloured on a terminal, plain and unwrapped in a pipe."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

# Nothing we draw is wider; rich would otherwise fold tables at 80 columns when nobody looks at them.
_WIDTH_OF_A_PIPE = 400


def render_plain(renderable: RenderableType, *, width: int = _WIDTH_OF_A_PIPE) -> str:
    """Draw something as plain text: no colour, no trailing spaces.

    >>> render_plain("[bold]43[/bold] samples")
    '43 samples'
    """
    from rich.console import Console

    # A notebook is no terminal either: what is captured there must be the same text.
    console = Console(width=width, color_system=None, force_terminal=False, force_jupyter=False, highlight=False)
    with console.capture() as capture:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def print_answer(renderable: RenderableType) -> None:
    """Print an answer to stdout."""
    if not sys.stdout.isatty():
        print(render_plain(renderable))
        return
    from rich.console import Console

    # Not cropped: a line that is too long runs over, and no number is cut.
    Console(highlight=False).print(renderable, crop=False)
