"""One outcome from those of all ranks: what one of them cannot run, none of them can."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from batchwright.device.outcome import Outcome
from batchwright.device.peak_bytes import PeakBytes
from batchwright.errors import BatchwrightError, RankFailedError, StepFailedError, error_from_dict
from batchwright.fitting.isolated import STOPPED
from batchwright.ranks.failure import is_consequence

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def verdict_of(rows: Sequence[Mapping[str, Any]]) -> Outcome:
    """Join what all ranks tell, as plain data: one that does not fit speaks for all; where all fit, the largest peak.

    >>> fits = Outcome(8, {}, "fits", PeakBytes(device=10), seconds=1.0, step_seconds=0.5)
    >>> cut_off = Outcome(8, {}, "failed", None, seconds=2.0, rule="stopped")
    >>> full = Outcome(8, {}, "out_of_memory", None, seconds=2.0, error="no room")
    >>> verdict_of([outcome.to_dict() for outcome in (fits, cut_off, full)]).error
    'rank 2: no room'

    A row is an outcome, or an error that was raised on purpose, which is raised here. The rank that ran out of memory
    pulls the others down with it: their failures are consequences, and so are those that only tell of a lost peer.
    Where nobody ran out, the first to fail is the cause.
    """
    outcomes = {rank: Outcome.from_dict(row) for rank, row in enumerate(rows) if "outcome" in row}
    errors = {rank: error_from_dict(row["error"]) for rank, row in enumerate(rows) if "outcome" not in row}
    full = {rank: each for rank, each in outcomes.items() if each.verdict == "out_of_memory"}
    failed = {rank: each for rank, each in outcomes.items() if each.verdict == "failed" and each.rule != STOPPED}
    causes = {rank: each for rank, each in failed.items() if not is_consequence(each.error or "")}
    if full:
        return _first(full)
    for rank, error in sorted(errors.items(), key=lambda item: isinstance(item[1], RankFailedError)):
        if not isinstance(error, RankFailedError) or not causes:
            raise _of_rank(error, rank)
    if failed:
        return _first(causes or failed)
    slowest = max(outcomes.values(), key=lambda outcome: outcome.step_seconds or 0.0)
    return replace(slowest, peak_bytes=_largest([outcome.peak_bytes for outcome in outcomes.values()]))


def _first(bad: Mapping[int, Outcome]) -> Outcome:
    rank = min(bad, key=lambda rank: bad[rank].seconds)
    outcome = bad[rank]
    return replace(
        outcome,
        error=f"rank {rank}: {outcome.error}" if outcome.error else None,
        traceback=f"rank {rank} raised:\n{outcome.traceback}" if outcome.traceback else None,
    )


def _of_rank(error: BatchwrightError, rank: int) -> BatchwrightError:
    """Return the error with the rank it came from."""
    if isinstance(error, StepFailedError):
        return StepFailedError(f"rank {rank} raised:\n{error.problem}")
    if not isinstance(error, RankFailedError):
        error.add_note(f"(rank {rank})")
    return error


def _largest(peaks: Sequence[PeakBytes | None]) -> PeakBytes | None:
    known = [peak for peak in peaks if peak is not None]
    if not known:
        return None

    def most(kind: str) -> int | None:
        return max((value for peak in known if (value := getattr(peak, kind)) is not None), default=None)

    return PeakBytes(most("allocated"), most("reserved"), most("device"))
