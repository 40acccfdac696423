"""Go on with another search where the first one cannot.

A trace can fail at a size though a smaller one was fine: a step may refuse large batches, or look at values there. What
was probed until then stays known, and no size is probed twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from batchwright.fitting.search import Seen


class CannotPredictError(Exception):
    """The trace of one size failed; the reason is its cause."""


def or_else(
    first: Generator[int, Seen, None], second: Callable[[], Generator[int, Seen, None]]
) -> Generator[int, Seen, None]:
    """Run a search, and the second one where the first gives up with `CannotPredictError`."""
    seen: dict[int, Seen] = {}
    try:
        size = next(first, None)
        while size is not None:
            seen[size] = yield size
            size = first.send(seen[size])
    except StopIteration:
        return
    except CannotPredictError:
        yield from _without_repeats(second(), seen)


def _without_repeats(search: Generator[int, Seen, None], seen: dict[int, Seen]) -> Generator[int, Seen, None]:
    size = next(search, None)
    while size is not None:
        if size not in seen:
            seen[size] = yield size
        try:
            size = search.send(seen[size])
        except StopIteration:
            return
