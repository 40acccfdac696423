from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import pytest
from hypothesis import settings

from batchwright import cli
from batchwright.state.process_state import freeze_old_objects, thaw_objects

if TYPE_CHECKING:
    from collections.abc import Iterator


# How long an example takes on a shared machine says nothing of the code. The same code gets the same examples, so that
# a failure repeats; `make test-all` draws new ones.
settings.register_profile("new-examples", deadline=None)
settings.register_profile("same-examples", deadline=None, derandomize=True)
settings.load_profile("same-examples")

# A shell that starts the tests in the background has them ignore Ctrl-C, and tests of it send it to themselves.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Every question collects garbage, and to look through all that the tests import takes most of a test's time."""
    import torch._dynamo  # noqa: F401 - the first probe would

    freeze_old_objects()


@pytest.fixture
def unfrozen() -> Iterator[None]:
    """Run a test as a process would that has frozen nothing."""
    thaw_objects()
    yield
    freeze_old_objects()


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


class Run(Protocol):
    def __call__(self, *args: str) -> Ran: ...


@pytest.fixture(autouse=True, scope="session")
def _answers_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep remembered answers apart from the user's, and from those of earlier runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATCHWRIGHT_CACHE", str(tmp_path_factory.mktemp("answers")))
        yield


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
