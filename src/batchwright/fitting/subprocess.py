"""A probe in a fresh process: loads the target itself, runs under the limit, and cannot hurt the one that asked.

Promises:
- never a fork: a process that has run torch cannot be forked safely;
- a child that is killed or crashes is an outcome, not an error of ours; one that is told to end is neither an outcome
  nor the user's mistake;
- an interrupt ends the child too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from batchwright import errors
from batchwright.device.out_of_memory import find_rule
from batchwright.device.outcome import Outcome
from batchwright.device.process_memory import PINNED_ENVIRONMENT
from batchwright.state.interrupts import temporary_folder, uninterrupted
from batchwright.targets import load_workload

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from batchwright.workload import Workload


# What one probe is asked to do, as plain data that another process can read.


@dataclass(frozen=True)
class Rendezvous:
    """Where the child ranks of one probe meet."""

    host: str
    port: int
    prefix: str
    rank: int
    world_size: int
    local_rank: int


@dataclass(frozen=True)
class Job:
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

    def to_dict(self) -> dict[str, Any]:
        """Return the job as plain data."""
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Job:
        """Read back what `to_dict` wrote.

        >>> job = Job(8, target="train.py:workload", shape={"seq_len": 512})
        >>> Job.from_dict(job.to_dict()) == job
        True
        """
        meeting = data["rendezvous"]
        order = data["order"]
        return Job(
            **{
                **data,
                "rendezvous": Rendezvous(**meeting) if meeting else None,
                "order": None if order is None else tuple(order),
            }
        )

    def load(self) -> Workload:
        """Load the workload in the process that is to run it."""
        if self.target is not None:
            return load_workload(self.target)
        import pickle
        from pathlib import Path

        assert self.pickled is not None
        loaded: Workload = pickle.loads(Path(self.pickled).read_bytes())
        return loaded


def part_to_probe(workload: Workload, *, only_evaluate: bool, order: tuple[int, ...] | None) -> Workload:
    """Return the workload as a probe runs it: its longest samples first, or only what evaluation does."""
    if order is not None:
        from torch.utils.data import Subset

        workload = replace(workload, data=Subset(workload.data, list(order)))
    if not only_evaluate:
        return workload
    # What is left runs under no_grad; a workload without an `evaluate` evaluates its loss, and generates if it can.
    if workload.evaluate is not None:
        return replace(workload, optimizer=None, scaler=None, loss=None, generate=None)
    return replace(workload, optimizer=None, scaler=None)


# How often a parent looks whether its child has ended.
_POLL_SECONDS = 0.02
CRASHED = "crashed"
# The rule of a probe that was ended because it had no point any more.
STOPPED = "stopped"
# Signals that a process ends by where memory cannot be had and nobody looked: no null check, an exception in a thread.
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
                [sys.executable, "-m", "batchwright.fitting.child", str(folder / "job.json"), str(folder / "answer")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **PINNED_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
                start_new_session=True,
            )
        return Child(job, folder, process, time.perf_counter())

    def has_ended(self) -> bool:
        """Whether the process is gone."""
        return self.process.poll() is not None

    def kill(self) -> None:
        """End it and everything it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def outcome(self) -> Outcome:
        """Read how it ended."""
        answer = self.folder / "answer"
        if answer.exists():
            return _read(json.loads(answer.read_text()))
        return self._died()

    def _died(self) -> Outcome:
        code = self.process.returncode
        said = (self.folder / "log").read_text(errors="replace")[-4000:].strip()
        job = self.job
        ended = Outcome(
            job.micro_batch,
            job.shape,
            "failed",
            None,
            time.perf_counter() - self.started,
            accumulation=job.accumulation,
        )
        rule = find_rule(RuntimeError(said))
        if code == -signal.SIGKILL:
            told = "the process was killed, as the system does when memory runs out"
            return replace(ended, verdict="out_of_memory", rule="killed", error=told)
        if rule is not None and code != 0:
            return replace(ended, verdict="out_of_memory", rule=rule.name, error=said.splitlines()[-1])
        if -code in _CRASHES and job.limit_bytes is not None:
            name = signal.Signals(-code).name
            told = f"the process ended by {name} under its limit"
            doubt = "a crash that has nothing to do with memory ends the same way"
            return replace(
                ended, verdict="out_of_memory", rule=CRASHED, error=told, doubt=doubt, traceback=said or None
            )
        if -code in _FROM_OUTSIDE:
            raise errors.BatchwrightError(
                f"the process that ran micro-batch {job.micro_batch:,} was ended by {signal.Signals(-code).name}: that "
                "says nothing of your step or of the memory.",
                remedy="the same again, once whatever ends processes here (a scheduler, a time limit) lets it run",
            )
        told = f"the process ended with code {code} and no answer"
        return replace(ended, error=told, traceback=f"{said}\n{told}".strip())


def probe_in_child(job: Job, *, until: Callable[[], bool] | None = None) -> Outcome:
    """Run one probe in a fresh process and wait for its end; `until` may say that waiting has no point any more."""
    with temporary_folder() as folder:
        child: Child | None = None
        try:
            with uninterrupted():
                child = Child.start(job, folder)
            while not child.has_ended():
                if until is not None and until():
                    child.kill()
                    return replace(child.outcome(), verdict="failed", rule=STOPPED, error="stopped from outside")
                time.sleep(_POLL_SECONDS)
        finally:
            if child is not None and not child.has_ended():
                with uninterrupted():
                    child.kill()
        return child.outcome()


def _read(answer: dict[str, Any]) -> Outcome:
    if "outcome" in answer:
        return Outcome.from_dict(answer["outcome"])
    if "interrupted" in answer:
        raise KeyboardInterrupt
    if "raised" in answer:
        raise errors.StepFailedError(answer["raised"])
    raise errors.error_from_dict(answer["error"])
