"""A thread that watches over a session: says how this rank is, looks at the others, and ends a process that is stuck.

Promises:
- it ends the process only where the main thread does not come out of what it does within seconds of the verdict;
- a rank is called hung where others wait for it and it stands still for the whole of the time limit, or works without
  getting anywhere for five times that; where all wait for each other, that is said;
- a thread whose stack stays the same while no processor time is used stands still: asleep, or waiting for something;
- one that stands in a collective, or in a backward, which holds collectives, waits for other ranks;
- a process that is gone is noticed within a second on the same machine, within the time limit on another.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from batchwright.ranks.meeting import INTERRUPTED, TIMEOUT_VARIABLE, Member, RankFailure, Record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from batchwright.ranks.session import Session


# Of one core. Threads of gloo and a poll now and then take less; work beside many other processes takes more.
_BUSY_SHARE = 0.02
_DEEPEST = 60


@dataclass
class Activity:
    """Looks at one thread again and again."""

    thread: int
    counts_children: bool = True
    place: str = "nowhere"
    is_in_collective: bool = False
    _stack: tuple[tuple[int, int], ...] = ()
    _same_since: float = field(default_factory=time.monotonic)
    _still_since: float = field(default_factory=time.monotonic)
    _looked: float = field(default_factory=time.monotonic)
    _used: float = 0.0

    def look(self) -> None:
        """Look once."""
        now = time.monotonic()
        frame = sys._current_frames().get(self.thread)
        stack = tuple((id(inner.f_code), inner.f_lasti) for inner in islice(_frames(frame), _DEEPEST))
        used = _processor_seconds(with_children=self.counts_children)
        if stack != self._stack:
            self._stack, self._same_since, self._still_since = stack, now, now
        if used - self._used > _BUSY_SHARE * (now - self._looked):
            self._still_since = now
        self._looked, self._used = now, used
        self.place, self.is_in_collective = _place(frame), _is_in_collective(frame)
        del frame  # it holds the locals of user code

    @property
    def same_seconds(self) -> float:
        """How long the stack has been the same."""
        return self._looked - self._same_since

    @property
    def still_seconds(self) -> float:
        """How long nothing at all has happened."""
        return self._looked - self._still_since


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those that called it, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _place(frame: FrameType | None) -> str:
    """Name the innermost line of the user's, else the innermost line."""
    from batchwright.targets import is_installed_or_ours

    users = (inner for inner in _frames(frame) if not is_installed_or_ours(inner.f_code.co_filename))
    shown = next(users, frame)
    return "nowhere" if shown is None else f'File "{shown.f_code.co_filename}", line {shown.f_lineno}'


def _is_in_collective(frame: FrameType | None) -> bool:
    """Whether the innermost frames are torch's, and one of them waits for other ranks."""
    for inner in _frames(frame):
        file = inner.f_code.co_filename.replace(os.sep, "/")
        if "/torch/" not in file:
            return False
        is_distributed = "/torch/distributed/" in file or file.endswith("/nn/parallel/distributed.py")
        if is_distributed or inner.f_code.co_name == "_engine_run_backward":
            return True
    return False


def _processor_seconds(*, with_children: bool) -> float:
    """Seconds of this process without those of the calling thread, and of what it started that still runs."""
    used = time.process_time() - time.thread_time()
    if not with_children:
        return used
    pids, seen = [os.getpid()], set[int]()
    while pids and len(seen) < 200:
        pid = pids.pop()
        seen.add(pid)
        # A system without these files (or a process that just ended) counts nothing.
        with suppress(OSError, ValueError, IndexError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                pids += {int(word) for word in (task / "children").read_text().split()} - seen
            if pid != os.getpid():
                numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                used += (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")
    return used


_LOOK_SECONDS = 0.25
# The verdict and the way out take some of the time that was promised.
_SHARE_OF_LIMIT = 0.8
BUSY_FACTOR = 5
# How long the main thread may take to leave by itself once there is a verdict, and after a signal.
_GRACE_SECONDS = 2.0
# Between the last rank's word and the exit of a stuck one.
_TOGETHER_SECONDS = 0.5
# And how much longer where it is on its way out: it waits there for the others.
_LEAVING_SECONDS = 10.0
# These ranks look at all the others; every rank looks at these.
_JUDGES = 2
_STACK_BYTES = 512 * 1024


@dataclass(frozen=True)
class Status(Record):
    """How a rank is; durations, as clocks of different machines do not agree."""

    beat: int
    waits: bool
    """In a collective, or for something that another rank writes."""
    waited_seconds: float
    still_seconds: float
    quiet_seconds: float
    """Since something was achieved."""
    where: str
    place: str


class Watch(threading.Thread):
    """Watches over one session until it is stopped."""

    def __init__(self, session: Session, *, on_failure: Callable[[RankFailure], None] | None = None) -> None:
        super().__init__(name="batchwright-watch", daemon=True)
        assert session.address is not None
        self._session, self._on_failure = session, on_failure
        self._store = session.address.connect(session.prefix)  # a request of the main thread may take long
        self._activity = Activity(threading.get_ident(), counts_children=on_failure is None)
        self._limit = session.limit_seconds
        self._began = time.monotonic()
        self._beat = 0
        self._seen: dict[int, tuple[int, float]] = {}
        self._members: dict[int, Member] = {}
        self._stopping = threading.Event()
        self._broken_since: float | None = None
        self._signals = _Signals() if on_failure is None else None
        self._signalled: tuple[int, float] | None = None

    def start(self) -> None:
        """Start; the stack is small, as it counts against a budget of memory."""
        before = threading.stack_size()
        with suppress(ValueError, RuntimeError):
            threading.stack_size(_STACK_BYTES)
        try:
            super().start()
        finally:
            threading.stack_size(before)

    def stop(self) -> None:
        """End the watching, and put signal handlers back."""
        self._stopping.set()
        if self._signals is not None:
            self._signals.wake()
        self.join(timeout=5)
        if self._signals is not None:
            self._signals.put_back()

    def run(self) -> None:
        """Look, again and again."""
        every, looked = min(1.0, self._limit / 10), 0.0
        while not self._stopping.is_set():
            # Memory may run out under the budget of a probe, in this thread too: then it looks again.
            with suppress(MemoryError):
                try:
                    now = time.monotonic()
                    failure = self._known_failure() or self._dead_neighbour() or self._after_signal()
                    if failure is None and now - looked >= every:
                        looked = now
                        self._say_how_this_rank_is()
                        failure = self._judge()
                    self._broken_since = None
                except RuntimeError:
                    failure = self._without_store()
                if failure is not None and self._end(failure):
                    return
            self._wait()

    def _wait(self) -> None:
        if self._signals is None:
            self._stopping.wait(_LOOK_SECONDS)
        elif (number := self._signals.wait(_LOOK_SECONDS)) and self._signalled is None:
            self._signalled = (number, time.monotonic())

    def _say_how_this_rank_is(self) -> None:
        session, activity, now = self._session, self._activity, time.monotonic()
        activity.look()
        self._beat += 1
        since = session.waiting_since
        waits = since is not None or activity.is_in_collective
        status = Status(
            beat=self._beat,
            waits=waits and not session.is_delegated,
            waited_seconds=0.0 if not waits else now - since if since is not None else activity.same_seconds,
            still_seconds=0.0 if session.is_delegated else min(activity.still_seconds, now - session.ticked),
            quiet_seconds=0.0 if session.is_delegated else now - session.ticked,
            where=session.where,
            place=activity.place,
        )
        self._store.set(f"status/{session.rank}", status.pack())

    def _known_failure(self) -> RankFailure | None:
        if self._session.failure is None and self._store.check(["failure"]):
            self._session.failure = RankFailure.unpack(self._store.get("failure"))
        return self._session.failure

    def _dead_neighbour(self) -> RankFailure | None:
        """Find a rank of this machine whose process is gone though it never left."""
        if self._on_failure is not None:  # children are looked after by those who started them
            return None
        for rank in range(self._session.world_size):
            if rank == self._session.rank or self._is_alive(rank) or self._has_left(rank):
                continue
            time.sleep(0.1)  # what it wrote at its end may be under way
            if self._store.check(["failure"]):
                return self._known_failure()
            if not self._has_left(rank):
                return self._died(rank, f"process {self._members[rank].pid} ended without a word")
        return None

    def _is_alive(self, rank: int) -> bool:
        if rank not in self._members:
            if not self._store.check([f"member/{rank}"]):
                return True
            self._members[rank] = Member.unpack(self._store.get(f"member/{rank}"))
        member = self._members[rank]
        return member.host != socket.gethostname() or is_running(member.pid)

    def _has_left(self, rank: int) -> bool:
        return bool(self._store.check([f"left/{rank}"]))

    def _died(self, rank: int, how: str) -> RankFailure:
        key = f"where/{rank}"
        where = f" ({self._store.get(key).decode()})" if self._store.check([key]) else ""
        reasons = "The system kills a process where memory runs out; other reasons are a crash, or code that exits."
        return RankFailure(rank, 1, f"rank {rank} died{where}: {how}. {reasons}")

    def _judge(self) -> RankFailure | None:
        """Look at the others: does one keep the rest waiting, or is one gone without a word?"""
        session, now = self._session, time.monotonic()
        limit = _SHARE_OF_LIMIT * self._limit
        looked_at = range(session.world_size if session.rank < _JUDGES else min(_JUDGES, session.world_size))
        statuses: dict[int, Status] = {}
        for rank in looked_at:
            if self._has_left(rank):
                continue
            key = f"status/{rank}"
            status = Status.unpack(self._store.get(key)) if self._store.check([key]) else None
            beat = -1 if status is None else status.beat
            if self._seen.get(rank, (None, now))[0] != beat:
                self._seen[rank] = (beat, now)
            silent = now - (self._seen[rank][1] if status is not None else self._began)
            if silent >= limit:
                if status is None:
                    return self._hung(rank, f"it did not come to meet the others within {silent:.0f} s")
                return self._died(rank, f"it gave no sign of life for {silent:.0f} s")
            if status is not None:
                statuses[rank] = status
        return self._judge_statuses(statuses, limit) if session.rank < _JUDGES else None

    def _judge_statuses(self, statuses: dict[int, Status], limit: float) -> RankFailure | None:
        waiting = {rank: status for rank, status in statuses.items() if status.waits and status.waited_seconds >= limit}
        working = {rank: status for rank, status in statuses.items() if not status.waits}
        if not waiting:
            return None
        longest = max(status.waited_seconds for status in waiting.values())
        still = {rank: status for rank, status in working.items() if status.still_seconds >= limit}
        if still:
            rank = max(still, key=lambda rank: still[rank].still_seconds)
            return self._hung(rank, f"it did nothing for {still[rank].still_seconds:.0f} s", still[rank])
        if not working and len(waiting) == len(statuses):
            lines = "".join(f"\n  rank {rank}: {status.where}, {status.place}" for rank, status in statuses.items())
            return RankFailure(
                min(statuses),
                1,
                f"all ranks wait for each other, and did so for {longest:.0f} s:{lines}\n{self._remedy()}",
            )
        stuck = {rank: status for rank, status in working.items() if status.quiet_seconds >= BUSY_FACTOR * limit}
        if stuck and longest >= BUSY_FACTOR * limit:
            rank = max(stuck, key=lambda rank: stuck[rank].quiet_seconds)
            return self._hung(rank, f"it was busy for {stuck[rank].quiet_seconds:.0f} s and got nowhere", stuck[rank])
        return None

    def _hung(self, rank: int, how: str, status: Status | None = None) -> RankFailure:
        where = f" ({status.where})" if status is not None and status.where else ""
        lines = f"\n  {status.place}" if status is not None else ""
        problem = f"rank {rank} hangs{where}: {how} while others waited for it.{lines}"
        return RankFailure(rank, 1, f"{problem}\n{self._remedy()}")

    def _remedy(self) -> str:
        return f"  try: {TIMEOUT_VARIABLE}={5 * self._limit:.0f} (seconds; now {self._limit:.0f}) if it only takes long"

    def _without_store(self) -> RankFailure | None:
        """The store does not answer: whoever holds it is gone, if it stays so."""
        now = time.monotonic()
        self._broken_since = self._broken_since or now
        return self._session.store_is_gone() if now - self._broken_since > 1 else None

    def _after_signal(self) -> RankFailure | None:
        if self._signalled is None:
            return None
        number, at = self._signalled
        # torchrun ends the others when one has died: the cause is found first, if there is one.
        if time.monotonic() - at < (1.0 if number == signal.SIGTERM else _GRACE_SECONDS):
            return None
        if number == signal.SIGINT:
            return RankFailure(self._session.rank, INTERRUPTED, f"rank {self._session.rank} was interrupted.")
        if self._signals is not None and self._signals.is_ours:
            os._exit(128 + number)
        return None

    def _end(self, failure: RankFailure) -> bool:
        """Make a failure known, and give the main thread time to leave; where it does not, end the process."""
        session = self._session
        if session.failure is None:
            session.post(failure, self._store)
        first = session.failure or failure
        if self._on_failure is not None:
            self._on_failure(first)
        end = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < end + (_LEAVING_SECONDS if session.is_raising else 0):
            if session.has_left.wait(0.05) or self._stopping.is_set():
                return True
        if session.posted is not None:
            note = f"\n{session.remedy}" if session.remedy else ""
            with suppress(OSError, ValueError):
                print(f"{first.printed}{note}", file=sys.stderr, flush=True)
        # What this rank would remove on its way out.
        for folder in session.folders:
            shutil.rmtree(folder, ignore_errors=True)
        # The launcher ends the others as soon as it sees one gone: they go together, each with its own exit code.
        with suppress(Exception):
            self._store.set(f"left/{session.rank}", "1")
            end = time.monotonic() + _GRACE_SECONDS
            while time.monotonic() < end and not all(map(self._has_left, range(session.world_size))):
                time.sleep(0.05)
            time.sleep(_TOGETHER_SECONDS)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(first.exit_code)


class _Signals:
    """Hears SIGTERM and SIGINT even where the main thread is stuck in C++; handlers that are there still run."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._fd_before: int | None = None
        self.is_ours = False
        # Only the main thread may set handlers; elsewhere signals are left alone.
        with suppress(ValueError):
            self._fd_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
                signal.signal(signal.SIGTERM, lambda number, frame: None)
                self.is_ours = True

    def wait(self, seconds: float) -> int:
        """Wait for a signal; return its number, 0 if none came."""
        with suppress(OSError, ValueError):
            if select.select([self._reader], [], [], seconds)[0]:
                for number in self._reader.recv(64):
                    if number in (signal.SIGTERM, signal.SIGINT):
                        return number
        return 0

    def wake(self) -> None:
        """End a `wait`."""
        with suppress(OSError):
            self._writer.send(b"\0")

    def put_back(self) -> None:
        """Leave signals as they were."""
        if self._fd_before is not None:
            signal.set_wakeup_fd(self._fd_before)
            if self.is_ours:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._reader.close()
        self._writer.close()


def is_running(pid: int) -> bool:
    """Whether a process of this machine runs; one that has ended and waits to be read does not.

    >>> is_running(os.getpid())
    True
    """
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    if Path("/proc/self").exists():
        return False
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)  # it runs, and is somebody else's
    return True
