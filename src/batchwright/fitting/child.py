"""The other side of a probe in a process of its own: `python -m batchwright.fitting.child JOB ANSWER`.

Promises:
- the answer is written whole or not at all, so that the process that started this can tell an end from a crash;
- it does not outlive the process that started it;
- what the user's code prints stays out of the answer.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import pickle
import signal
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from batchwright.errors import BatchwrightError, StepFailedError
from batchwright.fitting.messages import Job, ProbeReport
from batchwright.ranks.meeting import Address
from batchwright.ranks.place import Place
from batchwright.ranks.session import Session, join_as_child, join_group
from batchwright.targets import Target, load_workload, users_traceback_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batchwright.device.outcome import Outcome
    from batchwright.fitting.messages import Rendezvous
    from batchwright.ranks.meeting import RankFailure
    from batchwright.workload import Workload


@contextmanager
def meet_children(meeting: Rendezvous, on_failure: Callable[[RankFailure], None]) -> Iterator[Session]:
    """Meet the child ranks of this probe, before anything of the user's is loaded."""
    # What users' code reads; the addresses are those of this probe, not of the launcher's group.
    os.environ.update(
        RANK=str(meeting.rank),
        LOCAL_RANK=str(meeting.local_rank),
        WORLD_SIZE=str(meeting.world_size),
        MASTER_ADDR=meeting.host,
        MASTER_PORT=str(meeting.port),
    )
    place = Place(meeting.rank, meeting.world_size, meeting.local_rank)
    with join_as_child(place, Address(meeting.host, meeting.port), meeting.prefix, on_failure=on_failure) as session:
        yield session


def join_children(session: Session) -> None:
    """Make the process group of this probe; it is left by ending the process, which never waits."""
    join_group(session, session.store, "group")
    # Joined here, so that connecting is not charged to the first step, and a rank that is missing is named early.
    torch.distributed.barrier()


def wrap_model(workload: Workload) -> Workload:
    """Return the workload with a model that `wrap` has been applied to."""
    wrap, given = workload.wrap, workload.model
    if wrap is None:
        return workload

    def build() -> nn.Module:
        model = given if isinstance(given, nn.Module) else given()
        if torch.accelerator.is_available():
            model = model.to(torch.accelerator.current_accelerator())
        return wrap(model)

    return replace(workload, model=build, wrap=None)


_is_written = threading.Lock()
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run one job and leave."""
    _die_with_parent()
    faulthandler.enable()  # a crash then leaves the Python lines it came from
    _, question, place = sys.argv
    job = Job.from_dict(json.loads(Path(question).read_text()))
    # The process is the target's from here on: its functions may read their arguments whenever they are called.
    sys.argv = sys.argv[:1] if job.target is None else Target.read(job.target).argv
    try:
        report = ProbeReport(run_job(job, lambda failure: write_report(ProbeReport(error=failure.to_error()), place)))
    except BatchwrightError as error:
        report = ProbeReport(error=error)
    except KeyboardInterrupt:
        report = ProbeReport(is_interrupted=True)  # the whole run ends, as if it had been raised here
    except BaseException as error:
        report = ProbeReport(error=StepFailedError(users_traceback_text(error)))
    write_report(report, place)


def write_report(report: ProbeReport, place: str) -> None:
    """Write the report, if none was written, and end the process."""
    # The thread that watches over ranks writes one if the main thread hangs.
    if _is_written.acquire(blocking=False):
        scratch = Path(f"{place}.part")
        scratch.write_text(json.dumps(report.to_dict()))
        scratch.rename(place)
        sys.stdout.flush()
        sys.stderr.flush()
        # Not a plain exit: torch's own clean-up can crash if memory is scarce, and can wait for other ranks
        # for ever.
        os._exit(0)
    time.sleep(60)  # another thread is about to end the process


def load_job(job: Job) -> Workload:
    """Load the workload by its target, or from the file that the parent wrote."""
    if job.target is not None:
        return load_workload(job.target)
    assert job.pickled is not None
    loaded: Workload = pickle.loads(Path(job.pickled).read_bytes())
    return loaded


def run_job(job: Job, on_failure: Callable[[RankFailure], None]) -> Outcome:
    """Load the workload and run its probe in this process; `on_failure` is called if child ranks hang."""
    from batchwright.device.device import open_limited
    from batchwright.device.host import live_bytes
    from batchwright.device.step import StepSettings
    from batchwright.state.untouched import thrown_away

    settings = StepSettings(job.shape, job.accumulation, job.clip_norm)
    with ExitStack() as stack:
        session = None
        if job.rendezvous is not None:
            session = stack.enter_context(meet_children(job.rendezvous, on_failure))
            session.where = f"loading {job.target or 'the workload'}"
        workload = job.select_part(load_job(job))
        device = open_limited(job.on, job.limit_bytes, held_bytes=live_bytes([workload.model]))
        if session is not None:
            session.where = f"probe of micro-batch {job.micro_batch}"
            join_children(session)
            workload = wrap_model(workload)
        with thrown_away():
            outcome = device.probe(workload, job.micro_batch, settings)
        if session is not None and outcome.fits:
            session.gather("end", None)  # one that hangs after its last collective is found here
        return outcome


def _die_with_parent() -> None:
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
