"""The other side of a probe in a process of its own: `python -m batchwright.fitting.child JOB ANSWER`.

Promises:
- the answer is written whole or not at all, so that whoever started this can tell an end from a crash;
- it does not outlive the process that started it;
- what the user's code prints stays out of the answer.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchwright.errors import BatchwrightError
from batchwright.fitting.job import Job, part_to_probe
from batchwright.targets import Target
from batchwright.users_code import users_traceback_text

if TYPE_CHECKING:
    from batchwright.device.outcome import Outcome

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
        answer: dict[str, Any] = {"outcome": run_job(job).to_dict()}
    except BatchwrightError as error:
        told = {"problem": error.problem, "details": error.details, "remedy": error.remedy}
        answer = {"error": {"type": type(error).__name__, **told}}
    except BaseException as error:
        answer = {"raised": users_traceback_text(error)}
    scratch = Path(f"{place}.part")
    scratch.write_text(json.dumps(answer))
    scratch.rename(place)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not a plain exit: torch's own clean-up can crash where memory is scarce, and can wait for other ranks for ever.
    os._exit(0)


def run_job(job: Job) -> Outcome:
    """Load the workload and run its probe in this process."""
    workload = part_to_probe(job.load(), only_evaluate=job.only_evaluate, order=job.order)
    from batchwright.device.device import open_limited
    from batchwright.device.limited_host import live_bytes
    from batchwright.fitting.child_rank import in_group, wrapped

    device = open_limited(job.on, job.limit_bytes, held_bytes=live_bytes([workload.model]))
    told: dict[str, Any] = {"shape": job.shape, "accumulation": job.accumulation, "clip_norm": job.clip_norm}
    with in_group(job.rendezvous) if job.rendezvous else nullcontext():
        if job.rendezvous:
            workload = wrapped(workload)
        return device.probe(workload, job.micro_batch, **told)


def _die_with_parent() -> None:
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
