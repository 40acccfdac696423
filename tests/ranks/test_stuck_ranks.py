"""Who is to blame where ranks wait: told from how each of them is."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from batchwright.ranks.meeting import RankFailure
from batchwright.ranks.stuck_ranks import Activity, Status, Watch

LIMIT = 48.0


def status(*, waits: float | None = None, still: float = 0.0, quiet: float = 0.0) -> Status:
    return Status(1, waits is not None, waits or 0.0, still, quiet, "stage noise", 'File "train.py", line 3')


@pytest.fixture
def judged() -> Any:
    """The judgement alone: no thread, no store."""
    watch = Watch.__new__(Watch)
    watch._limit = 60.0
    return lambda *statuses: watch._judge_statuses(dict(enumerate(statuses)), LIMIT)


def test_a_rank_that_stands_still_while_another_waits_is_named(judged: Any) -> None:
    failure = judged(status(waits=60, still=60), status(still=58), status(waits=58, still=58))
    assert failure.rank == 1
    assert failure.exit_code == 1
    assert "rank 1 hangs (stage noise)" in failure.message
    assert "train.py" in failure.message
    assert "BATCHWRIGHT_RANK_TIMEOUT=300" in failure.message


@pytest.mark.parametrize(
    "found",
    [
        pytest.param([status(still=600), status(still=600)], id="nobody waits"),
        pytest.param([status(waits=40, still=40), status(still=600)], id="not waited for long"),
        pytest.param([status(waits=200), status(still=0.5, quiet=200)], id="the other is busy"),
        pytest.param([status(waits=600), status(quiet=40)], id="the other gets somewhere"),
        pytest.param([status(waits=60), status(waits=10)], id="the other has just come"),
    ],
)
def test_ranks_at_work_are_left_alone(found: list[Status], judged: Any) -> None:
    assert judged(*found) is None


def test_a_rank_that_is_busy_without_end_is_named_after_five_times_the_limit(judged: Any) -> None:
    failure = judged(status(waits=5 * LIMIT + 1), status(quiet=5 * LIMIT + 1))
    assert failure.rank == 1
    assert "busy" in failure.message


def test_ranks_that_wait_for_each_other_are_all_named(judged: Any) -> None:
    failure = judged(status(waits=60), status(waits=58))
    assert "all ranks wait for each other" in failure.message
    assert "rank 0: stage noise" in failure.message
    assert "rank 1: stage noise" in failure.message


def test_a_sleeping_thread_stands_still_and_a_working_one_does_not() -> None:
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            sum(number * number for number in range(1000))

    for target, is_still in ((ended.wait, True), (work, False)):
        ended.clear()
        thread = threading.Thread(target=target)
        thread.start()
        assert thread.ident is not None
        seen = Activity(thread.ident, counts_children=False)
        seen.look()
        looks = []
        # On a busy machine the working one may get no turn for a while.
        for _ in range(40 if is_still else 400):
            time.sleep(0.01)
            seen.look()
            looks.append(seen.still_seconds)
            if not is_still and looks[-1] == 0 and len(looks) > 1:
                break
        ended.set()
        thread.join()
        assert (looks[-1] > 0) == is_still
        assert not seen.is_in_collective


def test_a_failure_is_raised_alike_on_other_ranks() -> None:
    assert RankFailure(1, 3, "a traceback", is_users=True).to_error().exit_code == 3
    assert RankFailure(1, 1, "rank 1 hangs").to_error().exit_code == 1
    assert RankFailure(1, 130, "rank 1 was interrupted").to_error().exit_code == 130
