"""One probe of the user's own command: run in a process group of its own, cut, and its answer read.

Promises:
- the program runs with its own working folder, arguments and environment, and asks nothing of the terminal;
- its output goes to a log, whose last lines are in any error, or to stderr if asked for;
- when the probe is over, or interrupted, nothing that it started is left.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from batchwright.errors import BatchwrightError, InvalidInputError, StepFailedError
from batchwright.scripts.child import ANSWER, ScriptJob
from batchwright.scripts.command import UserCommand, check_program
from batchwright.scripts.script_run import EXITED, FAILED, FINISHED, SILENT, ScriptRun

if TYPE_CHECKING:
    from collections.abc import Iterator

DEFAULT_WINDOWS = 2
DEFAULT_SECONDS = 600.0
# Longer than the program's own limit: the child writes what it saw and leaves by itself.
_GRACE_SECONDS = 30.0
_LOG_LINES = 15


@dataclass(frozen=True)
class ScriptProbe:
    """How a program is probed."""

    command: UserCommand
    on: str = "cpu"
    cwd: Path = Path()
    num_windows: int = DEFAULT_WINDOWS
    seconds: float = DEFAULT_SECONDS
    show_output: bool = False

    def run(self, *, limit_bytes: int | None = None) -> ScriptRun:
        """Run the program until it is cut, and return what was seen."""
        check_program(self.command, self.cwd)
        with tempfile.TemporaryDirectory(prefix="batchwright-script-") as folder:
            return self._run_in(Path(folder), limit_bytes)

    def _run_in(self, folder: Path, limit_bytes: int | None) -> ScriptRun:
        scratch = folder / "files"
        scratch.mkdir()
        job = ScriptJob(
            self.command.program,
            self.command.arguments,
            self.command.is_module,
            self.on,
            self.num_windows,
            self.seconds,
            str(scratch),
            limit_bytes,
        )
        job.write(folder / "job.json")
        log = folder / "output.log"
        code = self._wait(folder / "job.json", log)
        output = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        answer = scratch / ANSWER
        if not answer.exists():
            return ScriptRun(end=FAILED, error=_describe_exit(code), traceback=_last_lines(output))
        run = ScriptRun.from_dict(json.loads(answer.read_text(encoding="utf-8")))
        return run if run.was_cut else _with_output(run, output)

    def _wait(self, job: Path, log: Path) -> int:
        command = [
            *(self.command.interpreter, *self.command.interpreter_options),
            *("-m", "batchwright.scripts.child", str(job)),
        ]
        environment = {**os.environ, **dict(self.command.environment), **_paths()}
        with log.open("wb") as file:
            process = subprocess.Popen(
                command,
                cwd=self.cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if self.show_output else file,
                stderr=None if self.show_output else subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                return process.wait(self.seconds + _GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                return -signal.SIGKILL
            finally:
                _end_group(process)


def _paths() -> dict[str, str]:
    """Have another interpreter find batchwright where this one did."""
    import batchwright

    own = str(Path(batchwright.__file__).parents[1])
    given = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{own}{os.pathsep}{given}" if given else own}


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End the program and whatever it started: loader workers, trackers."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _describe_exit(code: int) -> str:
    if code < 0:
        return f"the program's process was ended by {signal.Signals(-code).name} and left no answer"
    return f"the program's process ended with code {code} and left no answer"


def _last_lines(output: str) -> str:
    return "\n".join(output.rstrip().splitlines()[-_LOG_LINES:])


def _with_output(run: ScriptRun, output: str) -> ScriptRun:
    from dataclasses import replace

    return replace(run, notes=(*run.notes, *_output_note(output)))


def _output_note(output: str) -> Iterator[str]:
    if output.strip():
        yield f"the last lines it printed:\n{_last_lines(output)}"


def check_that_it_ran(run: ScriptRun, command: UserCommand, *, seconds: float) -> None:
    """Raise what has to be said of a run that was not cut: it failed, left, or did nothing that can be measured."""
    if run.was_cut or run.end == "out_of_memory":
        return
    seen = (
        f"{run.num_windows} {run.windows}, {sum(run.backwards_per_window)} backwards, {len(run.input_shapes)} forwards "
        f"in {run.seconds:.0f} s"
    )
    details = [f"seen: {seen}", *run.notes]
    if run.end == FAILED:
        raise StepFailedError("\n".join([run.traceback or run.error, *run.notes]).strip())
    if run.end == EXITED:
        raise StepFailedError("\n".join([f"the program left by sys.exit: {run.error}", *details]))
    if run.end == FINISHED:
        raise InvalidInputError(
            f"{command} ended by itself before an optimizer step or a forward of a model.",
            details=details,
            remedy="arguments with which it trains",
        )
    if run.end == SILENT:
        raise BatchwrightError(
            f"{command} made no {run.windows} within {seconds:.0f} s.",
            details=details,
            remedy="more time, or arguments with which it begins to train sooner",
        )
    raise BatchwrightError(f"{command} could not be probed: {run.end}.", details=details)
