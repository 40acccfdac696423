"""Talk while something runs: one live line on a terminal, plain lines in a pipe, always on stderr."""

from __future__ import annotations

import sys


class Progress:
    """Says what is being done; on a terminal the line is overwritten and cleared at the end.

    >>> with Progress() as progress:
    ...     progress.say("tracing micro-batch 8")
    """

    def __enter__(self) -> Progress:
        self._is_live = sys.stderr.isatty()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """Say one thing."""
        if self._is_live:
            print(f"\r\033[K{text} ...", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)
