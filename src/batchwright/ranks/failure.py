"""`RankFailure`: what went wrong on one rank, as plain data that the others can read.

Promises:
- the exit code is that of one process: 3 where the user's code raised, 1 out of memory, hung or dead;
- an error that only says "the other side of a collective is gone" is known as a consequence, not a cause.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Any

from batchwright.errors import BatchwrightError, RankFailedError, StepFailedError, error_from_dict
from batchwright.users_code import is_from_users_code, users_traceback_text

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
class RankFailure:
    """The first thing that went wrong among ranks."""

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

    def pack(self) -> str:
        """Write it as JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def unpack(text: str | bytes) -> RankFailure:
        """Read back what `pack` wrote.

        >>> failure = RankFailure(1, 3, "rank 1 raised")
        >>> RankFailure.unpack(failure.pack()) == failure
        True
        """
        return RankFailure(**json.loads(text))

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
        if error.exit_code != self.exit_code:
            error.exit_code = self.exit_code
        return error


def failure_of(error: BaseException, rank: int, where: str) -> RankFailure:
    """Describe an error that ended this rank's part.

    >>> failure_of(ValueError("a bug"), 1, "noise").message.splitlines()[0]
    'rank 1 raised (noise):'
    """
    if isinstance(error, BatchwrightError):
        told = error.to_dict()
        return RankFailure(rank, error.exit_code, str(error), told, is_users=isinstance(error, StepFailedError))
    if isinstance(error, KeyboardInterrupt):
        code: int = getattr(error, "exit_code", INTERRUPTED)  # the command's own interrupt, by SIGTERM, has another
        return RankFailure(rank, code, f"rank {rank} was interrupted ({where}).")
    if isinstance(error, SystemExit) and is_from_users_code(error):
        problem = f"rank {rank}: the code that was run called sys.exit({error.code!r}) ({where})."
        return RankFailure(rank, 3, problem, {**StepFailedError(problem).to_dict()}, is_users=True)
    text = users_traceback_text(error)[-_MOST_CHARACTERS:]
    if is_out_of_memory(error):
        problem = f"rank {rank} ran out of memory ({where}), and the others cannot go on without it:"
        return RankFailure(rank, 1, f"{problem}\n{text}")
    return RankFailure(rank, 3, f"rank {rank} raised ({where}):\n{text}", is_users=True)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    from batchwright.device.out_of_memory import find_rule

    return isinstance(error, Exception) and find_rule(error) is not None


def is_consequence(error: BaseException | str) -> bool:
    """Whether an error only says that another rank is gone, or late.

    >>> is_consequence(RuntimeError("[/pytorch/third_party/gloo/tcp/pair.cc:547] Connection closed by peer"))
    True
    >>> is_consequence(ValueError("a bug"))
    False
    """
    if isinstance(error, str):
        return _PEER_IS_GONE.search(error) is not None
    is_of_torch = isinstance(error, RuntimeError | ConnectionError) or type(error).__name__.startswith("Dist")
    return is_of_torch and _PEER_IS_GONE.search(str(error)) is not None
