"""One outcome from those of all ranks: what one of them cannot run, none of them can."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from batchwright.device.peak_bytes import PeakBytes
from batchwright.fitting.isolated import STOPPED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchwright.device.outcome import Outcome


def verdict_of(outcomes: Sequence[Outcome]) -> Outcome:
    """Join the outcomes of all ranks: one that does not fit speaks for all; where all fit, the largest peak.

    >>> from batchwright.device.outcome import Outcome
    >>> fits = Outcome(8, {}, "fits", PeakBytes(device=10), seconds=1.0, step_seconds=0.5)
    >>> cut_off = Outcome(8, {}, "failed", None, seconds=2.0, rule="stopped")
    >>> verdict_of([fits, cut_off, Outcome(8, {}, "out_of_memory", None, seconds=2.0)]).verdict
    'out_of_memory'
    """
    # The rank that ran out of memory pulls the others down with it: their failures are consequences. Where nobody
    # ran out, the first to fail is the cause.
    for verdict in ("out_of_memory", "failed"):
        bad = [outcome for outcome in outcomes if outcome.verdict == verdict and outcome.rule != STOPPED]
        if bad:
            return min(bad, key=lambda outcome: outcome.seconds)
    slowest = max(outcomes, key=lambda outcome: outcome.step_seconds or 0.0)
    return replace(slowest, peak_bytes=_largest([outcome.peak_bytes for outcome in outcomes]))


def _largest(peaks: Sequence[PeakBytes | None]) -> PeakBytes | None:
    known = [peak for peak in peaks if peak is not None]
    if not known:
        return None

    def most(kind: str) -> int | None:
        return max((value for peak in known if (value := getattr(peak, kind)) is not None), default=None)

    return PeakBytes(most("allocated"), most("reserved"), most("device"))
