"""Probes across ranks: each runs in child ranks of its own, and the ranks that ask exchange only verdicts.

A process group with one rank stuck in a collective cannot be recovered from within. So the ranks that torchrun
started never run a step: each starts a child, the children form a group with a rendezvous of their own, and when one
of them ends badly the others are ended from outside.

Promises:
- rank 0 leads: it searches, the others run what it asks for, and all return the same answer or raise the same error;
- out of memory, an exception or a dead child on one rank ends the probe on all of them within a second;
- a child that hangs while others wait for it is found by the session of the children, a leader by that of the ranks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from batchwright.errors import BatchwrightError, RankFailedError, StepFailedError
from batchwright.fitting.fit_result import Restored
from batchwright.fitting.messages import STOPPED, Instruction, Job, ProbeReport, Rendezvous
from batchwright.fitting.probers import probe_in_child
from batchwright.ranks.meeting import failure_of, is_consequence
from batchwright.units import PeakBytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from batchwright.device.outcome import Outcome
    from batchwright.fitting.fit_result import Fit
    from batchwright.ranks.session import Session


def join_verdicts(reports: Sequence[ProbeReport]) -> Outcome:
    """Join the reports of all ranks: one that does not fit speaks for all; if all fit, the largest peak.

    >>> from batchwright.device.outcome import Outcome
    >>> fits = Outcome(8, {}, "fits", PeakBytes(device=10), seconds=1.0, step_seconds=0.5)
    >>> cut_off = Outcome(8, {}, "failed", None, seconds=2.0, rule="stopped")
    >>> full = Outcome(8, {}, "out_of_memory", None, seconds=2.0, error="no room")
    >>> join_verdicts([ProbeReport(fits), ProbeReport(cut_off), ProbeReport(full)]).error
    'rank 2: no room'

    An error that a rank raised deliberately is raised here. The rank that ran out of memory pulls the others down with
    it: their failures are consequences, and so are those that only tell of a lost peer. If nobody ran out, the first
    to fail is the cause.
    """
    outcomes = {rank: report.outcome for rank, report in enumerate(reports) if report.outcome is not None}
    errors = {rank: report.error for rank, report in enumerate(reports) if report.error is not None}
    full = {rank: outcome for rank, outcome in outcomes.items() if outcome.verdict == "out_of_memory"}
    failed = {rank: end for rank, end in outcomes.items() if end.verdict == "failed" and end.rule != STOPPED}
    causes = {rank: outcome for rank, outcome in failed.items() if not is_consequence(outcome.error or "")}
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


@dataclass
class Ranks:
    """The ranks that search together."""

    session: Session
    number: int = 0
    _prefix: str = field(init=False)

    def __post_init__(self) -> None:
        self._prefix = self.session.new_group_prefix()

    @property
    def world_size(self) -> int:
        """How many there are."""
        return self.session.world_size

    @property
    def leads(self) -> bool:
        """Whether this rank searches."""
        return self.session.rank == 0

    @property
    def local_world_size(self) -> int:
        """Ranks on this machine."""
        return self.session.place.local_world_size

    def own_device(self, on: str) -> str:
        """Return this rank's card if cards were named without a number."""
        return on if on == "cpu" or ":" in on else f"{on}:{self.session.place.local_rank}"

    def least(self, amount: int | None) -> int | None:
        """Return the smallest amount that any rank has; None if some rank does not know."""
        amounts = self.session.gather(f"{self._prefix}/limit", amount)
        return None if None in amounts else min(amounts)

    def run(self, job: Job) -> Outcome:
        """Run this rank's part of probe `number` and return the verdict of all."""
        session, name = self.session, f"{self._prefix}/probe/{self.number}"
        assert session.address is not None
        meeting = Rendezvous(
            host=session.address.host,
            port=session.address.port,
            prefix=f"{session.prefix}/{name}",
            rank=session.rank,
            world_size=session.world_size,
            local_rank=session.place.local_rank,
        )
        stop = f"{name}/stop"
        with session.delegated():
            try:
                outcome = probe_in_child(replace(job, rendezvous=meeting), until=lambda: session.check(stop))
                report = ProbeReport(outcome)
            except BatchwrightError as error:
                if error.is_printed_elsewhere is not None:
                    raise
                report = ProbeReport(error=error)
            if report.outcome is None or not report.outcome.fits:
                session.store.set(stop, "1")
        rows = session.gather(f"{name}/verdict", report.to_dict())
        return join_verdicts([ProbeReport.from_dict(row) for row in rows])

    def ask(self, job: Job) -> Outcome:
        """Lead: have every rank run this probe."""
        self.number += 1
        self._publish(Instruction(job=job))
        return self.run(job)

    def lead(self, search: Callable[[], Fit]) -> Fit:
        """Lead: search, and end the search on every rank, with the answer or with the error."""
        try:
            answer = replace(search(), ranks=self.world_size)
        except Exception as error:
            self.number += 1
            is_ours = isinstance(error, BatchwrightError)
            shared = error if is_ours else StepFailedError(failure_of(error, 0, self.session.where).message)
            assert isinstance(shared, BatchwrightError)
            self._publish(Instruction(error=shared))
            raise
        self.number += 1
        self._publish(Instruction(answer=answer))
        return answer

    def follow(self, own: Job) -> Fit:
        """Run what rank 0 asks for until it ends the search."""
        while True:
            self.number += 1
            row = json.loads(self.session.wait_for(f"{self._prefix}/ask/{self.number}"))
            instruction = Instruction.from_dict(row)
            if instruction.error is not None:
                raise instruction.error
            if instruction.answer is not None:
                return instruction.answer
            job = instruction.job
            assert job is not None
            self.run(replace(job, target=own.target, pickled=own.pickled, on=own.on, limit_bytes=own.limit_bytes))

    def _publish(self, instruction: Instruction) -> None:
        self.session.store.set(f"{self._prefix}/ask/{self.number}", json.dumps(instruction.to_dict()))


@dataclass(frozen=True)
class AcrossRanks:
    """The prober of the leading rank."""

    job: Job
    ranks: Ranks

    @property
    def on(self) -> str:
        """The device, as each rank sees it."""
        return self.job.on

    @property
    def where(self) -> str:
        """Where probes run, in words."""
        return f"each probe in {self.ranks.world_size} child ranks of its own"

    def probe(self, micro_batch: int, shape: Mapping[str, Any]) -> Outcome:
        """Run one probe on all ranks."""
        return self.ranks.ask(replace(self.job, micro_batch=micro_batch, shape=dict(shape)))

    def restored(self) -> Restored:
        """Nothing of these processes was touched."""
        return Restored(("everything, as the probes ran in processes of their own",), ())
