"""Measured seconds of whole optimizer steps, as people write them."""

from __future__ import annotations

from batchwright.errors import InvalidInputError
from batchwright.units import parse_whole_number, positive_seconds, shortened


def parse_step_times(text: str) -> dict[int, float]:
    """Read `32=0.11,64=0.19`: the effective batch, and the seconds of one optimizer step at it.

    >>> parse_step_times("32=0.11, 64=0.19")
    {32: 0.11, 64: 0.19}
    """
    times: dict[int, float] = {}
    for part in text.split(","):
        batch, equals, seconds = part.strip().partition("=")
        if not equals:
            raise InvalidInputError(
                f"--times is written BATCH=SECONDS, such as 32=0.11,64=0.19; received {shortened(part.strip())}."
            )
        size = parse_whole_number(batch, "batch in --times")
        if size in times:
            raise InvalidInputError(f"--times names the batch {size} twice.")
        times[size] = positive_seconds(seconds, f"time of batch {size}")
    if len(times) < 2:
        raise InvalidInputError(
            "--times needs two batches or more, to tell what a step costs from what a sample costs.",
            remedy="32=0.11,64=0.19,128=0.36",
        )
    return times
