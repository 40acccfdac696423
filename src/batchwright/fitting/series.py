"""Drive one search: run its probes, say each, and tell what the end means.

Promises:
- a mistake in the user's step ends the series at once, with the user's own exception;
- the answer is a size that ran, and no smaller size failed for want of memory;
- the series never runs more than `max_trials` probes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchwright.errors import StepFailedError
from batchwright.fitting.result import NextSize, limited_peak
from batchwright.fitting.search import Seen
from batchwright.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from batchwright.device.outcome import Outcome


@dataclass(frozen=True)
class Cap:
    """The largest size that may be tried, and what set it."""

    size: int
    why: str


@dataclass(frozen=True)
class Series:
    """The probes of one search in order, and the answer they give; None where nothing fits."""

    trials: tuple[Outcome, ...]
    micro_batch: int | None
    next_size: NextSize
    reason: str


def run_series(
    search: Generator[int, Seen, None],
    probe: Callable[[int], Outcome],
    *,
    cap: Cap,
    max_trials: int,
    say: Callable[[str], None],
    is_stepwise: bool = False,
    tells_what_ran: bool = True,
) -> Series:
    """Run a search to its end, or to `max_trials`; `is_stepwise` where sizes between those tried are not wanted."""
    trials: list[Outcome] = []
    size = next(search, None)
    while size is not None and len(trials) < max_trials:
        say(f"trying micro-batch {size:,}")
        outcome = probe(size)
        trials.append(outcome)
        say(describe(outcome))
        if outcome.verdict == "failed" and not outcome.is_too_small:
            raise_failure(outcome, ran=[trial.micro_batch for trial in trials if trial.fits and tells_what_ran])
        # A size that is too small for the step is passed over: larger ones are the question.
        seen = Seen(size, outcome.fits or outcome.is_too_small, limited_peak(outcome) if outcome.fits else None)
        try:
            size = search.send(seen)
        except StopIteration:
            size = None
    return _concluded(trials, cap, unfinished=size is not None, max_trials=max_trials, is_stepwise=is_stepwise)


def raise_failure(outcome: Outcome, *, ran: Sequence[int] = ()) -> None:
    """Raise what the user's step raised, and say which sizes had run before."""
    told = outcome.traceback or outcome.error or "the step failed and left no word."
    error = outcome.exception if outcome.exception is not None else StepFailedError(told)
    if ran:
        sizes = ", ".join(f"{size:,}" for size in sorted(ran))
        error.add_note(f"It failed at micro-batch {outcome.micro_batch:,}; {sizes} had run: --limit {max(ran)}.")
    raise error


def describe(outcome: Outcome) -> str:
    """Say in one line how a probe went.

    >>> from batchwright.device.outcome import Outcome
    >>> from batchwright.device.peak_bytes import PeakBytes
    >>> describe(Outcome(8, {}, "fits", PeakBytes(device=2**30), seconds=1.5, step_seconds=0.5))
    'micro-batch 8 fits: peak 1 GiB, 16.0 samples/s'
    """
    size = f"micro-batch {outcome.micro_batch:,}"
    if outcome.is_too_small:
        return f"{size} is too small for this step: {(outcome.error or '').removeprefix('ValueError: ')}"
    if not outcome.fits:
        return f"{size} {'ran out of memory' if outcome.verdict == 'out_of_memory' else 'failed'}"
    peak, speed = limited_peak(outcome), outcome.samples_per_second
    told = [f"peak {format_bytes(peak)}"] if peak is not None else []
    if speed:
        told.append(f"{speed:,.1f} samples/s")
    return f"{size} fits{': ' if told else ''}{', '.join(told)}"


def _concluded(trials: list[Outcome], cap: Cap, *, unfinished: bool, max_trials: int, is_stepwise: bool) -> Series:
    smallest_failure = min((t.micro_batch for t in trials if t.verdict == "out_of_memory"), default=cap.size + 1)
    answer = max((t.micro_batch for t in trials if t.fits and t.micro_batch < smallest_failure), default=None)
    above = (answer or 0) + 1
    failed = next((t for t in trials if t.micro_batch == smallest_failure), None)
    if above > cap.size:
        return Series(tuple(trials), answer, NextSize(above, None, f"not tried: {cap.why}"), cap.why)
    if failed is None or (above < smallest_failure and unfinished):
        why = f"{max_trials} trials were used up (--max-trials)"
        return Series(tuple(trials), answer, NextSize(above, None, f"not tried: {why}"), why)
    if above < smallest_failure and is_stepwise:
        why = f"only powers of two are tried, and micro-batch {smallest_failure:,} ran out of memory"
        return Series(tuple(trials), answer, NextSize(above, None, f"not tried: {why}"), why)
    reason = f"micro-batch {smallest_failure:,} ran out of memory"
    told = f"{reason}: {failed.rule}" if failed.rule else reason
    if above < smallest_failure:
        # The search saw that the gap is narrower than its readings are exact.
        between = f"micro-batch {above:,}" + (f" to {smallest_failure - 1:,}" if above + 1 < smallest_failure else "")
        told += f" ({between} not tried: they differ from it by less than two runs of one size do)"
    return Series(tuple(trials), answer, NextSize(smallest_failure, "out_of_memory", told), reason)
