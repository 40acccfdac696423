"""What crosses ranks is plain data, through a store that only this machine reaches where all ranks are on it."""

from __future__ import annotations

import ast
import dataclasses
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest

import batchwright
from batchwright import errors
from batchwright.device.outcome import Outcome
from batchwright.fitting.fit_result import Fit, MemoryLine, NextSize, Restored
from batchwright.fitting.probe_process import ProbeReport
from batchwright.fitting.probers import join_verdicts
from batchwright.ranks import meeting
from batchwright.ranks.meeting import Place, RankFailure
from batchwright.ranks.session import Session
from batchwright.ranks.stuck_ranks import Watch
from batchwright.units import PeakBytes

ROOT = Path(batchwright.__file__).parent
PICKLING = {"broadcast_object_list", "gather_object", "all_gather_object", "scatter_object_list", "send_object_list"}
# A workload without a target is handed to a child process of this rank, in a file that only its user reads.
OWN_FILE = "fitting/probe_process.py"


def test_nothing_that_ranks_send_each_other_is_pickled() -> None:
    for file in ROOT.rglob("*.py"):
        used = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)]
        assert not {node.attr for node in used} & PICKLING, file
        unpickles = any(node.attr == "loads" and ast.unparse(node.value) == "pickle" for node in used)
        assert not unpickles or str(file.relative_to(ROOT)) == OWN_FILE, file


def test_a_store_of_ours_listens_on_the_loopback_interface_only() -> None:
    address = meeting._open(Place(0, 2, 0, 2))
    try:
        table = Path("/proc/net/tcp")
        if not table.exists():
            pytest.skip("this system does not list its sockets there")
        rows = [
            line.split() for line in (*table.read_text().splitlines(), *Path("/proc/net/tcp6").read_text().splitlines())
        ]
        listening = [row[1] for row in rows if row[1].endswith(f":{address.port:04X}") and row[3] == "0A"]
        assert listening == [f"0100007F:{address.port:04X}"]
    finally:
        meeting._opened.pop()


def test_a_fit_is_the_same_on_the_rank_that_reads_it() -> None:
    ran = Outcome(8, {"seq_len": 4}, "fits", PeakBytes(device=2**20), seconds=1.5, step_seconds=0.5)
    found = Fit(
        name="a",
        on="cpu",
        micro_batch=8,
        limit=16,
        limit_bytes=2**30,
        trials=(ran,),
        next_size=NextSize(9, None, "not tried"),
        reason="a reason",
        shape={"seq_len": 4},
        line=MemoryLine(1, 2, "trace"),
        restored=Restored(("all",), ()),
        notes=("a note",),
        ranks=2,
    )
    whole = dataclasses.replace(found, shapes=(found,), evaluation=found)
    assert Fit.from_dict(whole.to_dict()) == whole


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidInputError("no.", details=["a"], remedy="b"),
        errors.NothingFitsError("nothing."),
        errors.StepFailedError("Traceback"),
    ],
)
def test_an_error_of_ours_is_the_same_on_the_rank_that_reads_it(error: errors.BatchwrightError) -> None:
    error.add_note("a note")
    read = errors.error_from_dict(error.to_dict())
    assert type(read) is type(error)
    assert str(read) == str(error)
    assert read.exit_code == error.exit_code
    assert read.__notes__ == ["a note"]


LOST = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"


def test_the_verdict_names_the_rank_that_caused_it_and_not_one_that_lost_its_peer() -> None:
    lost = Outcome(8, {}, "failed", None, seconds=1.0, error=LOST, traceback="...")
    bug = Outcome(8, {}, "failed", None, seconds=2.0, error="KeyError: 1", traceback="KeyError: 1")
    assert (join_verdicts([ProbeReport(lost), ProbeReport(bug)]).traceback or "").startswith("rank 1 raised:")
    hung = ProbeReport(error=errors.RankFailedError("rank 0 hangs"))
    with pytest.raises(errors.RankFailedError, match="rank 0 hangs"):
        join_verdicts([hung, ProbeReport(lost)])
    raised = ProbeReport(error=errors.StepFailedError("Traceback of mine"))
    with pytest.raises(errors.StepFailedError, match="rank 1 raised:\nTraceback of mine"):
        join_verdicts([hung, raised])


def test_an_interrupt_that_several_ranks_hear_is_said_by_one_with_its_rank() -> None:
    address = meeting._open(Place(0, 2, 0, 2))
    try:
        ranks = [Session(Place(rank, 2), address, "interrupt", "noise") for rank in (0, 1)]
        raised = [rank.fail(rank.fail(KeyboardInterrupt())) for rank in reversed(ranks)]
    finally:
        meeting._opened.pop()
    assert [type(error) for error in raised] == [KeyboardInterrupt, KeyboardInterrupt]
    assert [error.__notes__ for error in raised] == [["rank 1 was interrupted (noise)."]] * 2
    assert [error.is_printed_elsewhere for error in raised] == [False, True]  # type: ignore[attr-defined]


def test_a_failure_is_posted_while_the_main_thread_waits_in_its_own_connection() -> None:
    address = meeting._open(Place(0, 2, 0, 2))
    try:
        rank = Session(Place(0, 2), address, "taken", "joining a group")
        # As joining a process group does: the request holds the connection until another rank comes.
        joining = threading.Thread(target=lambda: rank.store.wait(["nobody writes this"], timedelta(seconds=8)))
        joining.daemon = True
        joining.start()
        time.sleep(0.2)
        begun = time.monotonic()
        watch = Watch(rank, on_failure=lambda failure: rank.has_left.set())
        watch._end(RankFailure(1, 1, "rank 1 hangs"))
        assert time.monotonic() - begun < 5
        address.connect("taken").set("nobody writes this", "1")
        joining.join()
    finally:
        meeting._opened.pop()
    assert rank.failure is not None
    assert rank.failure.message == "rank 1 hangs"


class Terminated(KeyboardInterrupt):
    """As the command raises it."""

    exit_code = 143


def test_sigterm_waits_for_the_word_that_another_rank_died() -> None:
    address = meeting._open(Place(0, 2, 0, 2))
    try:
        rank = Session(Place(0, 2), address, "died", "noise")
        watch = threading.Timer(0.3, lambda: rank.post(RankFailure(1, 1, "rank 1 died")))
        watch.start()
        raised = rank.fail(Terminated())
        watch.join()
    finally:
        meeting._opened.pop()
    assert (str(raised), type(raised)) == ("rank 1 died", errors.RankFailedError)


def test_a_launcher_that_ends_a_rank_because_another_failed_does_not_hide_why() -> None:
    address = meeting._open(Place(0, 2, 0, 2))
    try:
        rank = Session(Place(0, 2), address, "cause", "noise")
        rank.post(RankFailure(1, 1, "rank 1 hangs"))
        raised = rank.fail(KeyboardInterrupt())
    finally:
        meeting._opened.pop()
    assert isinstance(raised, errors.RankFailedError)
    assert (str(raised), raised.exit_code, raised.is_printed_elsewhere) == ("rank 1 hangs", 1, False)
