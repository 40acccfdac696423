"""Ranks that do one thing together: they exchange JSON, and the first failure of any of them ends it for all.

Promises:
- a rank that raises, runs out of memory, hangs or dies ends the session on every rank, with the same error;
- a rank that waits for one that does nothing waits `BATCHWRIGHT_RANK_TIMEOUT` seconds, and no longer;
- one that is stuck in a collective is ended by its watching thread, as nothing else frees it: the process exits;
- the process group that ranks train in has a time limit of its own, beyond that of the watch;
- one rank prints; signal handlers are as they were afterwards; alone, a session does nothing at all.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

from batchwright.catalogue.cards import names_a_card
from batchwright.errors import BatchwrightError, RankFailedError, StepFailedError
from batchwright.ranks.meeting import (
    TERMINATED,
    Address,
    Member,
    Place,
    RankFailure,
    failure_of,
    find_address,
    find_place,
    is_consequence,
    rank_timeout,
)
from batchwright.ranks.stuck_ranks import BUSY_FACTOR, Watch
from batchwright.workload import Workload

_Takes = ParamSpec("_Takes")
_Gives = TypeVar("_Gives")
_POLL_SECONDS = 0.02
# How long a rank that only lost its peer looks for the cause, and how long the first to fail waits for the others.
_CAUSE_SECONDS = 5.0
_LEAVE_SECONDS = 5.0


class Session:
    """One rank among those that were started together; alone it answers for itself.

    >>> alone = Session(Place())
    >>> alone.gather("sizes", [8]), alone.share("answer", 3)
    ([[8]], 3)
    """

    def __init__(self, place: Place, address: Address | None = None, prefix: str = "", where: str = "") -> None:
        self.place, self.address, self.prefix = place, address, prefix
        self.rank, self.world_size = place.rank, place.world_size
        self.store: Any = None if address is None else address.connect(prefix)
        self.limit_seconds = rank_timeout()
        self.where = where
        """What this rank is doing, in words."""
        self.remedy = ""
        """What to do after a failure."""
        self.waiting_since: float | None = None
        self.ticked = time.monotonic()
        self.is_delegated = False
        """Whether a child process does this rank's part, and is watched itself."""
        self.failure: RankFailure | None = None
        self.posted: RankFailure | None = None
        """The failure, where this rank was the first to find it: then it prints it."""
        self.is_raising = False
        self.folders: list[str] = []
        """Temporary ones."""
        self.has_left = threading.Event()
        self._counts: dict[str, int] = {}
        self._num_groups = 0

    @property
    def is_alone(self) -> bool:
        """Whether there are no other ranks."""
        return self.store is None

    def own_device(self, on: str) -> str:
        """Return this rank's card if cards were named without a number."""
        return on if self.is_alone or on == "cpu" or ":" in on else f"{on}:{self.place.local_rank}"

    def tick(self) -> None:
        """Note that something was achieved."""
        self.ticked = time.monotonic()

    def ticking(self, say: Callable[[str], None]) -> Callable[[str], None]:
        """Return `say`, such that every word counts as progress."""

        def say_and_tick(text: str) -> None:
            self.tick()
            say(text)

        return say if self.is_alone else say_and_tick

    @contextmanager
    def at(self, where: str) -> Iterator[None]:
        """Name what this rank does meanwhile; a failure keeps the name."""
        before = self.where
        self._go_to(where)
        yield
        self._go_to(before)

    def _go_to(self, where: str) -> None:
        self.where = where
        self.tick()
        if not self.is_alone:
            with suppress(RuntimeError):  # the watch says what became of the store
                self.store.set(f"where/{self.rank}", where)

    @contextmanager
    def delegated(self) -> Iterator[None]:
        """Leave this rank's part to a child process, which has a session of its own."""
        self.is_delegated = True
        try:
            yield
        finally:
            self.is_delegated = False
            self.tick()

    def gather(self, name: str, data: Any) -> list[Any]:
        """Return what every rank hands in under this name, in the order of ranks; the n-th call meets the n-th."""
        if self.is_alone:
            return [data]
        key = self._key(name)
        self.store.set(f"{key}/{self.rank}", json.dumps(data))
        return [json.loads(self.wait_for(f"{key}/{rank}")) for rank in range(self.world_size)]

    def share(self, name: str, data: Any) -> Any:
        """Return what rank 0 hands in, on every rank: as JSON has it, on rank 0 too."""
        if self.is_alone:
            return data
        key = self._key(name)
        if self.rank == 0:
            self.store.set(key, json.dumps(data))
        return json.loads(self.wait_for(key))

    def wait_for(self, key: str) -> bytes:
        """Return what another rank will write; the watch ends the wait where that rank fails or does nothing."""
        self.waiting_since = time.monotonic()
        try:
            while not self.check(key):
                time.sleep(_POLL_SECONDS)
            value: bytes = self.store.get(key)
            return value
        finally:
            self.waiting_since = None

    def check(self, key: str) -> bool:
        """Whether somebody has written this; raises where a rank has failed."""
        if self.failure is not None:
            raise self._shared_error(self.failure)
        try:
            return bool(self.store.check([key]))
        except RuntimeError:
            self._finds_cause()  # the watch sees the same, and says which rank is gone
            raise self._shared_error(self.failure or self.store_is_gone()) from None

    def all_come_to(self, key: str) -> bool:
        """Whether every rank comes here too, within seconds."""
        self.store.set(f"{key}/{self.rank}", "1")
        keys = [f"{key}/{rank}" for rank in range(self.world_size)]
        return _comes_true(lambda: all(map(self.check, keys)), _CAUSE_SECONDS)

    def post(self, failure: RankFailure, store: Any = None) -> bool:
        """Write down a failure; return whether it is the first, and so the one that this rank prints.

        Another thread hands in a connection of its own: while this one joins a process group, its own is taken.
        """
        text = replace(failure, printed_by=self.rank).pack()
        try:
            first: bytes = (store or self.store).compare_set("failure", "", text)
        except RuntimeError:
            # Nobody can be asked who prints: the first rank that can still be there does.
            first = text.encode()
            is_first = self.rank <= 1
        else:
            is_first = first == text.encode()
        self.failure = RankFailure.unpack(first)
        self.posted = self.posted or (self.failure if is_first else None)
        return is_first

    def store_is_gone(self) -> RankFailure:
        """Say who went away with the store."""
        is_torchruns = self.address is not None and not self.address.is_ours
        holder = "torchrun" if is_torchruns else "rank 0"
        return RankFailure(0, 1, f"{holder}, which holds what the ranks share, is gone.")

    def fail(self, error: BaseException) -> BaseException:
        """Make an error of this rank known to all; return what to raise."""
        self.is_raising = True
        if getattr(error, "is_printed_elsewhere", None) is not None:
            return error  # known to all: it passes through one part of this session after another
        # A launcher ends the others by SIGTERM when one has died, before anybody has seen it.
        may_have_cause = is_consequence(error) or getattr(error, "exit_code", None) == TERMINATED
        if self.failure is None and not (may_have_cause and self._finds_cause()):
            self.post(failure_of(error, self.rank, self.where or "at work"))
        assert self.failure is not None
        if isinstance(error, KeyboardInterrupt) and self.failure.is_interrupt:
            # It stays what it is, for whoever catches it; all ranks may hear the same Ctrl-C, and one says so.
            error.is_printed_elsewhere = self.posted is None  # type: ignore[attr-defined]
            error.add_note(self.failure.message)
            return error
        if self.posted is not None and isinstance(error, BatchwrightError):
            error.is_printed_elsewhere = False
            return error
        return self._shared_error(self.failure)

    def _finds_cause(self) -> bool:
        """Wait until somebody says what went wrong; here the other side of a collective was lost, or SIGTERM came."""
        return _comes_true(lambda: self.failure is not None, _CAUSE_SECONDS)

    def _shared_error(self, failure: RankFailure) -> BatchwrightError:
        error = failure.to_error()
        error.is_printed_elsewhere = self.posted is None
        if self.remedy:
            error.add_note(self.remedy)
        return error

    def leave(self, *, failed: bool) -> None:
        """Say that this rank goes; the one that failed, and the holder of the store, wait for the others."""
        if self.is_alone:
            return
        with suppress(RuntimeError):
            self.store.set(f"left/{self.rank}", "1")
            holds_store = self.rank == 0 and self.address is not None and self.address.is_ours
            if holds_store or (failed and self.posted is not None):
                all_left = [f"left/{rank}" for rank in range(self.world_size)]
                _comes_true(lambda: self.store.check(all_left), _LEAVE_SECONDS)
            if holds_store:
                time.sleep(10 * _POLL_SECONDS)  # the others may still be looking whether all have left
        self.has_left.set()

    def new_group_prefix(self) -> str:
        """A name for one more process group, the same on every rank."""
        self._num_groups += 1
        return f"group/{self._num_groups}"

    def _key(self, name: str) -> str:
        self._counts[name] = self._counts.get(name, 0) + 1
        return f"{name}/{self._counts[name]}"


def _comes_true(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait so long at most until a condition holds; return whether it does."""
    end = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
    return holds


_current: Session | None = None
_calls = 0


@contextmanager
def together(where: str = "") -> Iterator[Session]:
    """Do something on all ranks: whatever ends it on one of them ends it on all; inside another session, be part of it.

    >>> with together("an example") as ranks:
    ...     ranks.is_alone
    True
    """
    global _current, _calls
    if _current is not None:
        with _current.at(where or _current.where):
            yield _current
        return
    place = find_place()
    if place.is_alone:
        yield Session(place)
        return
    _calls += 1
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    session = Session(place, find_address(place, _calls), f"batchwright/{attempt}/{_calls}", where)
    with _running(session):
        yield session


def on_all_ranks(what: str) -> Callable[[Callable[_Takes, _Gives]], Callable[_Takes, _Gives]]:
    """Have a function that takes a workload or a target run within a session, from its first line on.

    A plain function as work, and a simulated card, need no other ranks.
    """

    def decorate(function: Callable[_Takes, _Gives]) -> Callable[_Takes, _Gives]:
        @functools.wraps(function)
        def run(*args: _Takes.args, **kwargs: _Takes.kwargs) -> _Gives:
            work = args[0] if args else kwargs.get("work")
            on = kwargs.get("on")
            is_alone = isinstance(on, str) and names_a_card(on)
            if is_alone or not isinstance(work, str | Workload):
                return function(*args, **kwargs)
            with together(what):
                return function(*args, **kwargs)

        return run

    return decorate


@contextmanager
def join_as_child(
    place: Place, address: Address, prefix: str, *, on_failure: Callable[[RankFailure], None]
) -> Iterator[Session]:
    """Be one of the child ranks of a probe: whoever started them looks after those that raise or die.

    One that hangs is handed to `on_failure` on every child, in another thread, which writes it down and exits.
    """
    session = Session(place, address, prefix, "starting a probe")
    watch = Watch(session, on_failure=on_failure)
    watch.start()
    try:
        yield session
    finally:
        session.leave(failed=False)
        watch.stop()


@contextmanager
def _running(session: Session) -> Iterator[None]:
    global _current
    watch = Watch(session)
    session.store.set(f"member/{session.rank}", Member.of_this_process().pack())
    watch.start()
    _current = session
    failed = True
    try:
        # Everybody is here before anything of the user's runs: who fails then is known to all.
        session.gather("begin", None)
        yield
        with session.at(f"the end of {session.where or 'it'}"):
            session.gather("end", None)
        failed = False
    except BaseException as error:
        raised = session.fail(error)
        if raised is error:
            raise
        raise raised from (None if isinstance(error, BatchwrightError) else error)
    finally:
        _current = None
        # The watch goes first: it must not ask a store that is gone.
        watch.stop()
        session.leave(failed=failed)


@contextmanager
def process_group(on: str) -> Iterator[str]:
    """Join the other ranks under torchrun, and yield this rank's device; alone, or inside a group, do nothing.

    >>> with process_group("cpu") as device:
    ...     device
    'cpu'
    """
    import torch.distributed as dist

    with together() as ranks:
        if ranks.is_alone or dist.is_initialized():
            yield on
            return
        hook_before = sys.excepthook  # torch puts the rank before every later traceback
        prefix = ranks.new_group_prefix()
        join_group(ranks, ranks.store, prefix)
        try:
            yield ranks.own_device(on)
            dist.barrier()
        except BaseException as error:
            # What all ranks refuse alike is no reason to end them. Else the others lose their peer with the group, and
            # must know why before it goes.
            is_refusal = isinstance(error, BatchwrightError) and not isinstance(
                error, StepFailedError | RankFailedError
            )
            raised = error if is_refusal and ranks.all_come_to(f"{prefix}/refused") else ranks.fail(error)
            if raised is error:
                raise
            raise raised from error
        finally:
            dist.destroy_process_group()
            sys.excepthook = hook_before


def join_group(ranks: Session, store: Any, prefix: str) -> None:
    """Make the default process group of a session's ranks."""
    from torch.distributed import PrefixStore, init_process_group  # type: ignore[attr-defined]

    init_process_group(
        store=PrefixStore(prefix, store),
        rank=ranks.rank,
        world_size=ranks.world_size,
        # The watch judges earlier, and knows who is late; this is for a rank whose watch is dead.
        timeout=timedelta(seconds=(BUSY_FACTOR + 1) * ranks.limit_seconds),
        # gloo for what lives on the CPU, the accelerator's own for the rest: torch picks by device.
    )
