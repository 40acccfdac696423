"""A probe in a fresh process: loads the target itself, runs under the limit, and cannot hurt the one that started it.

Promises:
- never a fork: a process that has run torch cannot be forked safely;
- a child that is killed or crashes is an outcome, not an error of ours; one that somebody ends is neither an outcome
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
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from batchwright.device.out_of_memory import find_rule
from batchwright.device.outcome import Outcome
from batchwright.device.process_memory import PINNED_ENVIRONMENT
from batchwright.errors import BatchwrightError
from batchwright.fitting.messages import ProbeReport
from batchwright.state.interrupts import temporary_folder, uninterrupted

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from batchwright.fitting.messages import Job

# How often a parent looks whether its child has ended.
_POLL_SECONDS = 0.02
# The rule of a probe whose process crashed under a limit.
CRASHED = "crashed"
# The rule of a probe that was ended because it had no point any more.
STOPPED = "stopped"
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
            name = signal.Signals(-code).name
            message = f"the process ended by {name} under its limit"
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
