"""A probe in a process of its own: what crosses to it and back, who starts it, and the process itself.

It is started as `python -m batchwright.fitting.probe_process JOB ANSWER`.

Promises:
- `from_dict(json.loads(json.dumps(record.to_dict())))` is the record again;
- a report is an outcome, an error or an interrupt, an instruction a job, an answer or an error: exactly one of them;
- a fresh process is never a fork: one that has run torch cannot be forked safely. It loads the target itself and runs
  under the limit; one that is killed or crashes is an outcome, not an error of ours, one that somebody ends is neither
  an outcome nor the user's mistake; an interrupt ends it too;
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
import subprocess
import sys
import threading
import time
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from batchwright.device.device import open_limited
from batchwright.device.host import PINNED_ENVIRONMENT, live_bytes
from batchwright.device.outcome import Outcome, find_rule
from batchwright.device.pipeline import apply_wrap
from batchwright.device.step import StepSettings
from batchwright.errors import BatchwrightError, StepFailedError, error_from_dict
from batchwright.fitting.fit_result import Fit
from batchwright.ranks.meeting import Address, Place, RankFailure
from batchwright.ranks.session import Session, join_as_child, join_group
from batchwright.state.process_state import temporary_folder, uninterrupted
from batchwright.state.untouched import thrown_away
from batchwright.targets import Target, load_workload, users_traceback_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from batchwright.workload import Workload

# The rule of a probe whose process crashed under a limit.
CRASHED = "crashed"
# The rule of a probe that was ended because it had no point any more.
STOPPED = "stopped"


@dataclass(frozen=True)
class Message:
    """A record that crosses processes as plain data."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: value.to_dict() if hasattr(value, "to_dict") else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read back what `to_dict` wrote."""
        readers: dict[str, Callable[[Any], Any]] = {
            "rendezvous": Rendezvous.from_dict,
            "order": tuple,
            "outcome": Outcome.from_dict,
            "error": error_from_dict,
            "job": Job.from_dict,
            "answer": Fit.from_dict,
        }
        return cls(
            **{n: readers[n](value) if value is not None and n in readers else value for n, value in data.items()}
        )


@dataclass(frozen=True)
class Rendezvous(Message):
    """Where the child ranks of one probe meet."""

    host: str
    port: int
    prefix: str
    rank: int
    world_size: int
    local_rank: int


@dataclass(frozen=True)
class Job(Message):
    """One probe: which workload, how large, where, and within how many bytes.

    The workload is a target (`path.py:function`) that the child loads itself, or a file that holds it pickled.
    """

    micro_batch: int
    target: str | None = None
    pickled: str | None = None
    on: str = "cpu"
    limit_bytes: int | None = None
    shape: dict[str, Any] = field(default_factory=dict)
    accumulation: int = 1
    clip_norm: float | None = None
    only_evaluate: bool = False
    order: tuple[int, ...] | None = None
    rendezvous: Rendezvous | None = None

    def select_part(self, workload: Workload) -> Workload:
        """Return the workload as this job probes it: its longest samples first, or only what evaluation does."""
        if self.order is not None:
            from torch.utils.data import Subset

            workload = replace(workload, data=Subset(workload.data, list(self.order)))
        if not self.only_evaluate:
            return workload
        # What is left runs under no_grad; a workload without an `evaluate` evaluates its loss, and generates if it can.
        if workload.evaluate is not None:
            return replace(workload, optimizer=None, scaler=None, loss=None, generate=None)
        return replace(workload, optimizer=None, scaler=None)


@dataclass(frozen=True)
class ProbeReport(Message):
    """How a probe ended in the process that ran it: an outcome, a deliberate error, or an interrupt."""

    outcome: Outcome | None = None
    error: BatchwrightError | None = None
    is_interrupted: bool = False

    def unwrap(self) -> Outcome:
        """Return the outcome, or raise what came in its place."""
        if self.is_interrupted:
            raise KeyboardInterrupt
        if self.error is not None:
            raise self.error
        assert self.outcome is not None
        return self.outcome


@dataclass(frozen=True)
class Instruction(Message):
    """What the leading rank has all ranks do next: run a job, or end with the answer or with the error."""

    job: Job | None = None
    answer: Fit | None = None
    error: BatchwrightError | None = None


# How often a parent looks whether its child has ended.
_POLL_SECONDS = 0.02
# Signals that end a process if memory cannot be had and nobody checked: no null check, an exception in a thread.
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
# Signals that somebody else sends to have a process end.
_FROM_OUTSIDE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass
class Child:
    """One running probe."""

    job: Job
    folder: Path
    process: subprocess.Popen[bytes]
    started: float

    @staticmethod
    def start(job: Job, folder: Path) -> Child:
        """Start a process that runs the job; its files are put into the folder, which must be empty."""
        (folder / "job.json").write_text(json.dumps(job.to_dict()))
        # Its own session: Ctrl-C at the terminal reaches us alone, and we end the child and all that it started.
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "batchwright.fitting.probe_process",
                    str(folder / "job.json"),
                    str(folder / "answer"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **PINNED_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
                start_new_session=True,
            )
        return Child(job, folder, process, time.perf_counter())

    def kill(self) -> None:
        """End it and everything it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def outcome(self) -> Outcome:
        """Read how it ended."""
        answer = self.folder / "answer"
        if answer.exists():
            return ProbeReport.from_dict(json.loads(answer.read_text())).unwrap()
        return self._died()

    def _died(self) -> Outcome:
        code = self.process.returncode
        output = (self.folder / "log").read_text(errors="replace")[-4000:].strip()
        job = self.job
        ended = Outcome(
            job.micro_batch,
            job.shape,
            "failed",
            None,
            time.perf_counter() - self.started,
            accumulation=job.accumulation,
        )
        rule = find_rule(RuntimeError(output))
        if code == -signal.SIGKILL:
            message = "the process was killed, as the system does when memory runs out"
            return replace(ended, verdict="out_of_memory", rule="killed", error=message)
        if rule is not None and code != 0:
            return replace(ended, verdict="out_of_memory", rule=rule.name, error=output.splitlines()[-1])
        if -code in _CRASHES and job.limit_bytes is not None:
            message = f"the process ended by {signal.Signals(-code).name} under its limit"
            doubt = "a crash that has nothing to do with memory ends the same way"
            return replace(
                ended, verdict="out_of_memory", rule=CRASHED, error=message, doubt=doubt, traceback=output or None
            )
        if -code in _FROM_OUTSIDE:
            raise BatchwrightError(
                f"the process that ran micro-batch {job.micro_batch:,} was ended by {signal.Signals(-code).name}: that "
                "says nothing of your step or of the memory.",
                remedy="the same again, once whatever ends processes here (a scheduler, a time limit) lets it run",
            )
        message = f"the process ended with code {code} and no answer"
        return replace(ended, error=message, traceback=f"{output}\n{message}".strip())


def probe_in_child(job: Job, *, until: Callable[[], bool] | None = None) -> Outcome:
    """Run one probe in a fresh process and wait for its end; `until` may say that waiting has no point any more."""
    with temporary_folder() as folder:
        child: Child | None = None
        try:
            with uninterrupted():
                child = Child.start(job, folder)
            while child.process.poll() is None:
                if until is not None and until():
                    child.kill()
                    return replace(child.outcome(), verdict="failed", rule=STOPPED, error="stopped from outside")
                time.sleep(_POLL_SECONDS)
        finally:
            if child is not None and child.process.poll() is None:
                with uninterrupted():
                    child.kill()
        return child.outcome()


def meet_children(meeting: Rendezvous, on_failure: Callable[[RankFailure], None]) -> AbstractContextManager[Session]:
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
    return join_as_child(place, Address(meeting.host, meeting.port), meeting.prefix, on_failure=on_failure)


def wrap_model(workload: Workload) -> Workload:
    """Return the workload with a model that `wrap` has been applied to."""
    wrap, given = workload.wrap, workload.model
    if wrap is None:
        return workload

    def build() -> nn.Module:
        model = given if isinstance(given, nn.Module) else given()
        if torch.accelerator.is_available():
            model = model.to(torch.accelerator.current_accelerator())
        return apply_wrap(wrap, model)

    return replace(workload, model=build, wrap=None)


_is_written = threading.Lock()
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run one job and leave."""
    # It dies with its parent.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
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
            # The group of this probe is left by ending the process, which never waits.
            join_group(session, session.store, "group")
            # So that connecting is not charged to the first step, and a rank that is missing is named early.
            torch.distributed.barrier()
            workload = wrap_model(workload)
        with thrown_away():
            outcome = device.probe(workload, job.micro_batch, settings)
        if session is not None and outcome.fits:
            session.gather("end", None)  # one that hangs after its last collective is found here
        return outcome


if __name__ == "__main__":
    main()
