"""Probes across ranks: each runs in child ranks of its own, and the ranks that ask exchange only verdicts.

A process group with one rank stuck in a collective cannot be recovered from within. So the ranks that torchrun
started never run a step: each starts a child, the children form a group with a rendezvous of their own, and when one
of them ends badly the others are ended from outside.

Promises:
- rank 0 leads: it searches, the others run what it asks for, and all return the same answer or raise the same error;
- out of memory, an exception or a dead child on one rank ends the probe on all of them within a second;
- a rank that says nothing for `RANK_TIMEOUT_SECONDS` ends the search with an error that names it.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from batchwright.device.outcome import Outcome
from batchwright.errors import BatchwrightError, StepFailedError
from batchwright.fitting.isolated import probe_in_child
from batchwright.fitting.job import Job, Rendezvous
from batchwright.fitting.result import Restored
from batchwright.fitting.verdict_of_ranks import verdict_of
from batchwright.users_code import users_traceback_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from batchwright.fitting.result import Fit

# How long a collective of a probe may wait, and how long the others wait for a rank's verdict after their own.
RANK_TIMEOUT_SECONDS = 60.0
_POLL_SECONDS = 0.05


@dataclass
class Ranks:
    """The ranks that were started together, and the store through which they speak."""

    rank: int
    world_size: int
    local_rank: int
    host: str
    port: int
    store: Any
    number: int = 0

    @staticmethod
    def are_here() -> bool:
        """Whether several ranks were started: by torchrun, or in a process group that exists already."""
        from torch import distributed

        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_world_size() > 1
        return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ

    @staticmethod
    def meet() -> Ranks:
        """Join the other ranks: through their group's store rank 0 tells where its own store listens."""
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        known, rank, world_size = _users_store()
        # Every rank calls fit equally often, so its own count names this call on all of them.
        call = known.add(f"batchwright/calls/{rank}", 1)
        wait = timedelta(seconds=RANK_TIMEOUT_SECONDS)
        if rank == 0:
            host = os.environ.get("MASTER_ADDR", "") or socket.gethostname()
            own = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=wait)
            known.set(f"batchwright/at/{call}", f"{host} {own.port}")
        else:
            host, _, port = known.get(f"batchwright/at/{call}").decode().partition(" ")
            own = TCPStore(host, int(port), is_master=False, timeout=wait)
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        return Ranks(rank, world_size, local_rank, host, own.port, PrefixStore("fit", own))

    @property
    def local_world_size(self) -> int:
        """Ranks on this machine."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))

    def own_device(self, on: str) -> str:
        """Return this rank's card where cards were asked for without a number."""
        return on if on == "cpu" or ":" in on else f"{on}:{self.local_rank}"

    def least(self, amount: int | None) -> int | None:
        """Return the smallest amount that any rank has; None where some rank does not know."""
        self.store.set(f"limit/{self.rank}", json.dumps(amount))
        amounts = [json.loads(self.store.get(f"limit/{rank}")) for rank in range(self.world_size)]
        return None if None in amounts else min(amounts)

    def run(self, job: Job) -> Outcome:
        """Run this rank's part of probe `number` and return the verdict of all."""
        meeting = Rendezvous(
            host=self.host,
            port=self.port,
            prefix=f"probe/{self.number}",
            rank=self.rank,
            world_size=self.world_size,
            local_rank=self.local_rank,
            timeout_seconds=RANK_TIMEOUT_SECONDS,
        )
        stop = f"{self.number}/stop"
        try:
            outcome = probe_in_child(replace(job, rendezvous=meeting), until=lambda: self.store.check([stop]))
            told: dict[str, Any] = outcome.to_dict()
        except BatchwrightError as error:
            told = {"error": pickle.dumps(error).hex()}
        if told.get("outcome") != "fits":
            self.store.set(stop, "1")
        self.store.set(f"{self.number}/told/{self.rank}", json.dumps(told))
        return self._verdict_of_all()

    def ask(self, job: Job) -> Outcome:
        """Lead: have every rank run this probe."""
        self.number += 1
        self.store.set(f"{self.number}/job", json.dumps({"job": job.to_dict()}))
        return self.run(job)

    def lead(self, search: Callable[[], Fit]) -> Fit:
        """Lead: search, and end the search on every rank, with the answer or with the error."""
        try:
            found = replace(search(), ranks=self.world_size)
        except BaseException as error:
            known = isinstance(error, BatchwrightError | KeyboardInterrupt)
            self._finish(None, error if known else StepFailedError(users_traceback_text(error)))
            raise
        self._finish(found, None)
        return found

    def _finish(self, found: Fit | None, error: BaseException | None) -> None:
        self.store.set(f"{self.number + 1}/job", json.dumps({"end": pickle.dumps((found, error)).hex()}))
        # The store lives in this process: it may go only when everybody has read the end.
        self._wait_for(f"{self.number + 1}/read", range(1, self.world_size), fail=False)

    def follow(self, own: Job) -> Fit:
        """Run what rank 0 asks for until it ends the search."""
        while True:
            self.number += 1
            key = f"{self.number}/job"
            while not self._has(key):
                time.sleep(_POLL_SECONDS)
            asked = json.loads(self.store.get(key))
            if "end" in asked:
                self.store.set(f"{self.number}/read/{self.rank}", "1")
                found, error = pickle.loads(bytes.fromhex(asked["end"]))
                if error is not None:
                    raise error
                answer: Fit = found
                return answer
            job = Job.from_dict(asked["job"])
            self.run(replace(job, target=own.target, pickled=own.pickled, on=own.on, limit_bytes=own.limit_bytes))

    def _verdict_of_all(self) -> Outcome:
        self._wait_for(f"{self.number}/told", range(self.world_size))
        outcomes: list[Outcome] = []
        for rank in range(self.world_size):
            told = json.loads(self.store.get(f"{self.number}/told/{rank}"))
            if isinstance(told.get("error"), str) and "outcome" not in told:
                raised: BatchwrightError = pickle.loads(bytes.fromhex(told["error"]))
                raise raised
            outcomes.append(Outcome.from_dict(told))
        return verdict_of(outcomes)

    def _wait_for(self, prefix: str, ranks: Sequence[int], *, fail: bool = True) -> None:
        end = time.monotonic() + RANK_TIMEOUT_SECONDS
        missing = list(ranks)
        while missing and time.monotonic() < end:
            missing = [rank for rank in missing if not self._has(f"{prefix}/{rank}")]
            if missing:
                time.sleep(_POLL_SECONDS)
        if missing and fail:
            raise BatchwrightError(
                f"rank {missing[0]} gave no verdict within {RANK_TIMEOUT_SECONDS:.0f} s of rank {self.rank}'s.",
                remedy="look at that rank's own output; it may have died",
            )

    def _has(self, key: str) -> bool:
        try:
            return bool(self.store.check([key]))
        except RuntimeError as error:
            raise BatchwrightError("rank 0, which leads the search, is gone.", details=[str(error)[:200]]) from None


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


def _users_store() -> tuple[Any, int, int]:
    from torch import distributed
    from torch.distributed.distributed_c10d import _get_default_store

    if distributed.is_initialized():
        return _get_default_store(), distributed.get_rank(), distributed.get_world_size()
    store, rank, world_size = next(distributed.rendezvous("env://"))  # type: ignore[attr-defined]
    return store, rank, world_size
