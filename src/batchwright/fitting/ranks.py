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

from batchwright.errors import BatchwrightError, StepFailedError, error_from_dict
from batchwright.fitting.isolated import probe_in_child
from batchwright.fitting.job import Job, Rendezvous
from batchwright.fitting.result import Fit, Restored
from batchwright.fitting.verdict_of_ranks import verdict_of
from batchwright.ranks.failure import failure_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from batchwright.device.outcome import Outcome
    from batchwright.ranks.session import Session


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
        """Return this rank's card where cards were asked for without a number."""
        return on if on == "cpu" or ":" in on else f"{on}:{self.session.place.local_rank}"

    def least(self, amount: int | None) -> int | None:
        """Return the smallest amount that any rank has; None where some rank does not know."""
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
                row: dict[str, Any] = outcome.to_dict()
            except BatchwrightError as error:
                if error.is_printed_elsewhere is not None:
                    raise
                row = {"error": error.to_dict()}
            if row.get("outcome") != "fits":
                session.store.set(stop, "1")
        return verdict_of(session.gather(f"{name}/verdict", row))

    def ask(self, job: Job) -> Outcome:
        """Lead: have every rank run this probe."""
        self.number += 1
        self._publish({"job": job.to_dict()})
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
            self._publish({"error": shared.to_dict()})
            raise
        self.number += 1
        self._publish({"answer": answer.to_dict()})
        return answer

    def follow(self, own: Job) -> Fit:
        """Run what rank 0 asks for until it ends the search."""
        while True:
            self.number += 1
            row = json.loads(self.session.wait_for(f"{self._prefix}/ask/{self.number}"))
            if "error" in row:
                raise error_from_dict(row["error"])
            if "answer" in row:
                return Fit.from_dict(row["answer"])
            job = Job.from_dict(row["job"])
            self.run(replace(job, target=own.target, pickled=own.pickled, on=own.on, limit_bytes=own.limit_bytes))

    def _publish(self, row: dict[str, Any]) -> None:
        self.session.store.set(f"{self._prefix}/ask/{self.number}", json.dumps(row))


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
