from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import pytest

from batchwright import cli


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


class Run(Protocol):
    def __call__(self, *args: str) -> Ran: ...


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process, as its console script does, and return what it printed."""

    def call(*args: str) -> Ran:
        capsys.readouterr()
        with pytest.raises(SystemExit) as leaving:
            cli.main(list(args))
        captured = capsys.readouterr()
        assert isinstance(leaving.value.code, int)
        return Ran(leaving.value.code, captured.out, captured.err)

    return call
