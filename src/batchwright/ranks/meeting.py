"""Which rank this is, where ranks meet, one TCP store, and what they write there; torch is loaded only to meet.

Promises:
- a variable of the launcher's that makes no sense is refused with its value and what to do, never with a traceback;
- who prints is decided without raising: in doubt, this process does;
- what goes wrong on one rank is plain data that the others can read; the exit code is that of one process: 3 if the
  user's code raised, 1 if it ran out of memory, hung or died;
- an error that only says "the other side of a collective is gone" is known as a consequence, not a cause;
- under torchrun it is the store of its agent, which outlives any rank, and nothing of ours listens anywhere;
- elsewhere rank 0 opens one, on the loopback interface where all ranks are on one machine;
- what is written there is JSON, and is read as JSON: whoever reaches the port can end a run, but runs no code in it.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Self

from batchwright.errors import (
    BatchwrightError,
    InvalidInputError,
    RankFailedError,
    StepFailedError,
    error_from_dict,
)
from batchwright.targets import is_from_users_code, users_traceback_text
from batchwright.units import shortened

TIMEOUT_VARIABLE = "BATCHWRIGHT_RANK_TIMEOUT"
_DEFAULT_SECONDS = 60.0
_REMEDY = "torchrun --nproc-per-node N -m batchwright ..., which sets it; or unset WORLD_SIZE and RANK for one process"


@dataclass(frozen=True)
class Place:
    """One process among those of a launcher; alone without one."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def is_alone(self) -> bool:
        """Whether there are no other ranks."""
        return self.world_size == 1


def read_place() -> Place:
    """Read WORLD_SIZE, RANK and their like.

    >>> read_place().is_alone
    True
    """
    world_size, rank = _number("WORLD_SIZE", least=1), _number("RANK", least=0)
    if world_size is None or world_size == 1:
        return Place()
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if rank is None or missing:
        raise InvalidInputError(f"WORLD_SIZE is {world_size}, but {' and '.join(missing)} is not set.", remedy=_REMEDY)
    _number("MASTER_PORT", least=1)
    if rank >= world_size:
        raise InvalidInputError(
            f"RANK is {rank} and WORLD_SIZE {world_size}: ranks are counted from 0.", remedy=_REMEDY
        )
    local_rank, local_world_size = _number("LOCAL_RANK", least=0), _number("LOCAL_WORLD_SIZE", least=1)
    return Place(
        rank,
        world_size,
        rank if local_rank is None else local_rank,
        world_size if local_world_size is None else local_world_size,
    )


def is_first_rank() -> bool:
    """Whether this process speaks for all ranks; alone it does."""
    try:
        return read_place().rank == 0
    except InvalidInputError:
        return True


def rank_timeout() -> float:
    """Seconds that ranks wait for one that does nothing: `BATCHWRIGHT_RANK_TIMEOUT`, by default 60.

    >>> rank_timeout()
    60.0
    """
    text = os.environ.get(TIMEOUT_VARIABLE, "").strip()
    if not text:
        return _DEFAULT_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 1 <= seconds <= 1e6:
        raise InvalidInputError(
            f"{TIMEOUT_VARIABLE} is a number of seconds from 1 to 1,000,000; received {shortened(text)}.",
            remedy=f"{TIMEOUT_VARIABLE}=300",
        )
    return seconds


def _number(name: str, *, least: int) -> int | None:
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    # What int() takes and a launcher never writes (1_0, +4, other digits) is refused too.
    if not (text.isascii() and text.isdigit()) or len(text) > 9 or int(text) < least:
        raise InvalidInputError(
            f"the environment variable {name} must be a whole number from {least} on; received {shortened(text)}.",
            remedy=_REMEDY,
        )
    return int(text)


INTERRUPTED, TERMINATED = 130, 143
_MOST_CHARACTERS = 20_000

# What gloo and NCCL raise in a rank that is well, when the other side of a collective is gone or late. Gloo: seen, with
# torch 2.13 (the paths of its own sources are in the text); NCCL: from the texts of torch's ProcessGroupNCCL.
_PEER_IS_GONE = re.compile(
    r"third_party/gloo|gloo/transport|Connection (closed|reset) by (remote )?peer|Broken pipe"
    r"|Timed out waiting \d+ms for|Socket Timeout|NCCL (communicator|error)|remote process exited"
    r"|wait timeout after \d+|failed to (send|recv), got|is not connected to|Application timeout"
)


@dataclass(frozen=True)
class Record:
    """A dataclass that ranks hand each other as JSON."""

    def pack(self) -> str:
        """Write it as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def unpack(cls, text: str | bytes) -> Self:
        """Read back what `pack` wrote."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class RankFailure(Record):
    """The first thing that went wrong among ranks.

    >>> failure = RankFailure(1, 3, "rank 1 raised")
    >>> RankFailure.unpack(failure.pack()) == failure
    True
    """

    rank: int
    exit_code: int
    message: str
    """What a person reads."""
    error: dict[str, Any] | None = None
    """An error of ours that every rank raises alike."""
    is_users: bool = False
    """The user's code raised: the message is its traceback."""
    printed_by: int | None = None
    """The rank that was first to write it down: several see the same rank die."""

    @property
    def is_interrupt(self) -> bool:
        """Whether somebody ended it by a signal."""
        return self.exit_code in (INTERRUPTED, TERMINATED)

    @property
    def printed(self) -> str:
        """The message as the command prints it."""
        return self.message if self.is_users else f"Error: {self.message}"

    def to_error(self) -> BatchwrightError:
        """Return the error that the other ranks raise."""
        if self.error is not None:
            return error_from_dict(self.error)
        error = (StepFailedError if self.is_users else RankFailedError)(self.message)
        error.exit_code = self.exit_code
        return error


def failure_of(error: BaseException, rank: int, where: str) -> RankFailure:
    """Describe an error that ended this rank's part.

    >>> failure_of(ValueError("a bug"), 1, "noise").message.splitlines()[0]
    'rank 1 raised (noise):'
    """
    from batchwright.device.outcome import is_out_of_memory

    if isinstance(error, BatchwrightError):
        is_users = isinstance(error, StepFailedError)
        return RankFailure(rank, error.exit_code, str(error), error.to_dict(), is_users=is_users)
    if isinstance(error, KeyboardInterrupt):
        code: int = getattr(error, "exit_code", INTERRUPTED)  # the command's own interrupt, by SIGTERM, has another
        return RankFailure(rank, code, f"rank {rank} was interrupted ({where}).")
    if isinstance(error, SystemExit) and is_from_users_code(error):
        problem = f"rank {rank}: the code that was run called sys.exit({error.code!r}) ({where})."
        return RankFailure(rank, 3, problem, StepFailedError(problem).to_dict(), is_users=True)
    text = users_traceback_text(error)[-_MOST_CHARACTERS:]
    if is_out_of_memory(error):
        problem = f"rank {rank} ran out of memory ({where}), and the others cannot go on without it:"
        return RankFailure(rank, 1, f"{problem}\n{text}")
    return RankFailure(rank, 3, f"rank {rank} raised ({where}):\n{text}", is_users=True)


def is_consequence(error: BaseException | str) -> bool:
    """Whether an error only says that another rank is gone, or late.

    >>> is_consequence(RuntimeError("[/pytorch/third_party/gloo/tcp/pair.cc:547] Connection closed by peer"))
    True
    >>> is_consequence(ValueError("a bug"))
    False
    """
    can_be = isinstance(error, str | RuntimeError | ConnectionError) or type(error).__name__.startswith("Dist")
    return can_be and _PEER_IS_GONE.search(str(error)) is not None


@dataclass(frozen=True)
class Member(Record):
    """The process of a rank."""

    host: str
    pid: int

    @staticmethod
    def of_this_process() -> Member:
        """Return who this is."""
        return Member(socket.gethostname(), os.getpid())


# Of one request; waiting for other ranks is never done inside one.
_REQUEST = timedelta(seconds=20)
# Stores that this process opened stay open as long as it lives: a rank that is late still reads the verdict.
_opened: list[Any] = []


@dataclass(frozen=True)
class Address(Record):
    """Where the store listens."""

    host: str
    port: int
    is_ours: bool = False
    """Rank 0 holds it, and it ends with rank 0."""

    def connect(self, prefix: str) -> Any:
        """Connect, and return the part of the store below `prefix`."""
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        try:
            return PrefixStore(prefix, TCPStore(self.host, self.port, is_master=False, timeout=_REQUEST))
        except RuntimeError as error:
            raise RankFailedError(
                f"the store of the ranks at {self.host}:{self.port} cannot be reached.",
                details=[str(error).splitlines()[0][:200]],
                remedy="start all ranks together, by torchrun",
            ) from None


def find_place() -> Place:
    """Which rank this is: by the process group where there is one, else by the environment."""
    from torch import distributed

    place = read_place()
    if not (distributed.is_available() and distributed.is_initialized()):
        return place
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    if (rank, world_size) == (place.rank, place.world_size):
        return place
    return Place(rank, world_size, int(os.environ.get("LOCAL_RANK") or rank), world_size)


def find_address(place: Place, call: int) -> Address:
    """Return where the ranks meet; `call` counts how often, the same on every rank."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return Address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    known = _launchers_store()
    key = f"batchwright/at/{call}"
    _opened.append(known)
    if place.rank == 0:
        address = _open(place)
        known.set(key, address.pack())
        return address
    try:
        known.wait([key], timedelta(seconds=rank_timeout()))
        return Address.unpack(known.get(key))
    except RuntimeError:
        raise RankFailedError(
            f"rank 0 did not come to meet rank {place.rank} within {rank_timeout():.0f} s.",
            remedy="look at the output of rank 0; every rank has to make the same call",
        ) from None


def _open(place: Place) -> Address:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    is_local = place.local_world_size == place.world_size
    host = "127.0.0.1" if is_local else os.environ.get("MASTER_ADDR") or socket.gethostname()
    listener = socket.socket()
    listener.bind(("127.0.0.1" if is_local else "0.0.0.0", 0))
    listener.listen(1024)
    port = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=_REQUEST,
        # A listener of ours: torch's own listens on every interface.
        master_listen_fd=listener.detach(),
    )
    _opened.append(store)
    return Address(host, port, is_ours=True)


def _launchers_store() -> Any:
    from torch import distributed
    from torch.distributed.distributed_c10d import _get_default_store

    if distributed.is_initialized():
        return _get_default_store()
    wait = timedelta(seconds=rank_timeout())
    try:
        store, _, _ = next(distributed.rendezvous("env://", timeout=wait))  # type: ignore[attr-defined]
    except (RuntimeError, ValueError, OSError) as error:
        raise RankFailedError(
            f"no other rank was met at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}.",
            details=[str(error).splitlines()[0][:200]],
            remedy="start all ranks together, by torchrun; or unset WORLD_SIZE and RANK for one process",
        ) from None
    return store
