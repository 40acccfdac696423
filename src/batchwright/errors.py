"""Every error batchwright raises deliberately.

BatchwrightError
├── InvalidInputError     (also ValueError)   a value that cannot be used, or is out of range
├── NotExpressibleError   (also ValueError)   a plan that this framework has no words for
├── NothingFitsError                          not even the smallest size fits
├── CannotTraceError                          a step whose memory cannot be predicted without running it
├── StepFailedError                           the user's step raised, in another process
├── RankFailedError                           a rank ran out of memory, hung or died, and ended all of them
└── MissingExtraError     (also ImportError)  torch, numpy or a package of an extra is not installed

Each carries the exit code that the command ends with. The message says what was asked, what happened and
what to do; a caller in Python reads the same text as a person at the terminal.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any


class BatchwrightError(Exception):
    """The root of every error batchwright raises deliberately.

    >>> print(BatchwrightError("micro-batch 64 does not fit.", details=["needed 25.7 GiB"], remedy="halve it"))
    micro-batch 64 does not fit.
      needed 25.7 GiB
      try: halve it
    """

    exit_code = 1
    is_printed_elsewhere: bool | None = None
    """Of an error that ranks share: whether another rank prints it; None where ranks have not talked about it."""

    def __init__(self, problem: str, *, details: list[str] | None = None, remedy: str = "") -> None:
        self.problem = problem
        self.details = list(details or [])
        self.remedy = remedy
        lines = [problem, *(f"  {line}" for line in self.details)]
        super().__init__("\n".join([*lines, f"  try: {remedy}"] if remedy else lines))

    def to_dict(self) -> dict[str, Any]:
        """Return the error as plain data, for another process to raise."""
        return {
            "type": type(self).__name__,
            "exit_code": self.exit_code,
            "problem": self.problem,
            "details": self.details,
            "remedy": self.remedy,
            "notes": list(getattr(self, "__notes__", ())),
        }


class InvalidInputError(BatchwrightError, ValueError):
    """A value that cannot be used: it names the value received and what is accepted."""

    exit_code = 2


class NotExpressibleError(BatchwrightError, ValueError):
    """A plan that is right, but that the named framework has no setting for."""

    exit_code = 2


class NothingFitsError(BatchwrightError):
    """Not even a micro-batch of 1 fits: it names what was needed, by parts."""


class CannotTraceError(BatchwrightError):
    """A step that needs real values, or an operator with no shape rule: it can be run, not predicted."""


class MixedDevicesError(BatchwrightError, RuntimeError):
    """A step that mixes tensors of the CPU with those of a simulated card: it names the line, as a real card does."""

    exit_code = 3


class StepFailedError(BatchwrightError):
    """The user's own code raised in a child process: the message is its traceback."""

    exit_code = 3


class RankFailedError(BatchwrightError):
    """One rank ran out of memory, hung or died; the message names it."""


class MissingExtraError(BatchwrightError, ImportError):
    """Torch, numpy or a package that one of batchwright's extras brings is not installed."""

    exit_code = 2


class UnsupportedTorchError(BatchwrightError, ImportError):
    """A torch that lacks something batchwright needs of it: it names the version and what is missing."""

    exit_code = 2


def error_from_dict(data: Mapping[str, Any]) -> BatchwrightError:
    """Read back what `BatchwrightError.to_dict` wrote.

    >>> error_from_dict(InvalidInputError("no.", remedy="yes").to_dict())
    InvalidInputError('no.\\n  try: yes')
    """
    kind = globals().get(data["type"])
    is_ours = isinstance(kind, type) and issubclass(kind, BatchwrightError)
    make: Any = kind if is_ours else BatchwrightError
    error: BatchwrightError = make(data["problem"], details=data["details"], remedy=data["remedy"])
    error.exit_code = data["exit_code"]
    for note in data["notes"]:
        error.add_note(note)
    return error


def import_extra(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import a module that only an extra brings, or say which extra to install.

    >>> import_extra("json", extra="transformers", purpose="an audit").__name__
    'json'
    >>> import_extra("no_such_module", extra="transformers", purpose="an audit")
    Traceback (most recent call last):
    ...
    batchwright.errors.MissingExtraError: an audit needs the package 'no_such_module', which is not installed.
      try: pip install 'batchwright[transformers]'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A package that is there but lacks one of its own dependencies is another problem: show that one.
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        package = module.split(".")[0]
        raise MissingExtraError(
            f"{purpose} needs the package '{package}', which is not installed.",
            remedy=f"pip install 'batchwright[{extra}]'",
        ) from None
