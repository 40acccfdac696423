"""One shape's answer from an earlier run: tried first, certified by one probe, or thrown away and said."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from batchwright.fitting.fingerprint import fingerprint, rounded
from batchwright.fitting.remembered import Answers, Remembered, from_remembered

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from batchwright.fitting.budget import Budget
    from batchwright.fitting.result import Fit
    from batchwright.fitting.search import Seen
    from batchwright.fitting.series import Series
    from batchwright.workload import Workload


@dataclass(frozen=True)
class AnswerBook:
    """Where answers of this workload are looked up; `settings` are the options that change an answer."""

    workload: Workload
    target: str | None
    settings: Mapping[str, Any]

    def look_up(self, shape: Mapping[str, Any], on: str, budget: Budget, *, cap: int) -> RecalledAnswer:
        """Return what is remembered for a shape, which may be nothing."""
        key = fingerprint(
            self.workload,
            target=self.target,
            on=on,
            limit_bytes=rounded(budget.probe_bytes, was_asked=budget.was_asked),
            shape=shape,
            settings={**self.settings, "cap": cap},
        )
        answers = Answers()
        known, note = answers.recall(key) if key is not None else (None, "")
        return RecalledAnswer(answers, key, known if known is not None and known.micro_batch <= cap else None, note)


@dataclass(frozen=True)
class RecalledAnswer:
    """What an earlier run answered to the same question."""

    answers: Answers
    key: str | None
    known: Remembered | None
    note: str

    @property
    def _day(self) -> str:
        return "" if self.known is None else self.known.when[:10]

    def first(self, search: Callable[[], Generator[int, Seen, None]]) -> Generator[int, Seen, None]:
        """Try the remembered size before anything else; search only where it does not fit any more."""
        return search() if self.known is None else from_remembered(self.known.micro_batch, search)

    def concluded(self, series: Series) -> Series:
        """Put in what was known of the next size, where one probe confirmed the answer."""
        if self.known is None or series.micro_batch != self.known.micro_batch or len(series.trials) > 1:
            return series
        above = self.known.next_size
        if above is not None:
            above = replace(above, why=f"{above.why} (remembered from {self._day})")
        return replace(series, next_size=above or series.next_size, reason=self.known.reason)

    def remember(self, found: Fit) -> str:
        """Keep a new answer; return what has to be said."""
        if self.key is None:
            return self.note
        if self.known is None or found.micro_batch != self.known.micro_batch:
            is_final = found.next_size is None or "--max-trials" not in found.next_size.why
            note = self.answers.remember(self.key, found) if is_final else ""
            if self.known is not None:
                note = f"micro-batch {self.known.micro_batch:,} of {self._day} fits no more; searched anew"
            return note or self.note
        return f"remembered from {self._day} and certified by one probe; --no-cache searches anew"
