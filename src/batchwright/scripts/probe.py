"""Probes of the user's program: run in processes of their own until they are cut, and what was seen of each.

Promises:
- the program has its own interpreter, folder, arguments and environment, and asks nothing of the terminal;
- its packages are imported once for all probes, where forking is safe;
- its output goes to a log, whose last lines are in any error, or to stderr if asked for;
- when the probes are over, or interrupted, nothing that they started is left.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Self

from batchwright.catalogue.cards import context_of, names_a_card
from batchwright.errors import BatchwrightError, InvalidInputError, StepFailedError
from batchwright.memory.on_card import card_named
from batchwright.scripts.command import UserCommand, check_program
from batchwright.scripts.fork_server import ANSWER, ENDED, MEASURED, STARTED, WORK, ScriptJob, descendants_of
from batchwright.scripts.script_run import EXITED, FAILED, FINISHED, OUT_OF_MEMORY, SILENT, TOO_SMALL, ScriptRun
from batchwright.timing.work_file import unpack_work
from batchwright.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Collection

    from batchwright.scripts.script import Script

# Longer than the program's own limit: the child writes what it saw and leaves by itself.
_GRACE_SECONDS = 30.0
# What a program that fails is given to fail without a hook in it.
_PLAIN_SECONDS = 30.0
_LOG_LINES, _LOG_WIDTH = 15, 200


class Probes:
    """Probes of one program in one place; a context, at whose end nothing of them is left."""

    def __init__(self, script: Script, on: str, *, devices: int = 1) -> None:
        self.script, self.on, self.devices = script, on, devices
        self._folder = tempfile.TemporaryDirectory(prefix="batchwright-script-")
        self._server: subprocess.Popen[str] | None = None
        self._environment: tuple[tuple[str, str], ...] = ()
        self._groups: set[int] = set()
        self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._folder.cleanup()

    def run(
        self,
        command: UserCommand,
        *,
        num_windows: int | None = None,
        limit_bytes: int | None = None,
        measure: str = "",
        tolerated: Collection[str] = (),
    ) -> ScriptRun:
        """Run the program until it is cut, and return what was seen; raise what has to be said if it was not.

        Ends that are `tolerated` are returned like a cut.
        """
        check_program(command, Path(self.script.cwd))
        job = self._job(command, num_windows or self.script.steps, limit_bytes, measure)
        run = self._run_on_card(job, command) if names_a_card(self.on) else self._run(job, command)
        if command.num_processes > 1 and not names_a_card(self.on):
            text = f"of {command.num_processes} processes that {command.launcher} starts one was run, alone"
            run = replace(run, notes=(*run.notes, text))
        is_answer = run.was_cut or run.end in (OUT_OF_MEMORY, *tolerated)
        if not is_answer and not (measure and run.num_windows):
            self.refuse(run, command)
        return run

    def devices_of(self, command: UserCommand) -> int:
        """Return how many ranks the program is one of."""
        # On the host the other ranks would have to be there.
        return max(self.devices, command.num_processes) if names_a_card(self.on) else 1

    def _job(
        self, command: UserCommand, num_windows: int, limit_bytes: int | None = None, measure: str = ""
    ) -> ScriptJob:
        self._count += 1
        devices = self.devices_of(command)
        folder = Path(self._folder.name) / str(self._count)
        (folder / "files").mkdir(parents=True)
        return ScriptJob(
            command.program,
            command.arguments,
            command.is_module,
            self.on,
            num_windows,
            self.script.seconds,
            str(folder / "files"),
            "" if self.script.show_output else str(folder / "output.log"),
            limit_bytes,
            devices=devices,
            loader_sizes=command.loader_sizes,
            is_launched=devices > 1 or command.launcher != "python",
            measure=measure,
        )

    def _run_on_card(self, job: ScriptJob, command: UserCommand) -> ScriptRun:
        """Run a program where memory has no end; if its peak leaves open whether it fits, on the card itself."""
        card = card_named(job.on, memory=job.limit_bytes)
        assert card is not None
        run = self._run(replace(job, is_roomy=True), command)
        peak = run.peak_bytes
        if run.was_cut and peak is not None and not peak.allocated:
            raise InvalidInputError(
                f"{command} put nothing on {card.product} (simulated): what it computes stays on the CPU.",
                details=list(run.notes),
                remedy='an argument with which it uses cuda, as in --device cuda; or on="cpu"',
            )
        if not run.was_cut or peak is None or peak.device is None or peak.device <= card.total_bytes:
            return run
        needed = (peak.allocated or 0) + context_of(card).typical_bytes
        if needed > card.total_bytes:
            has = f"{card.product} (simulated) has {format_bytes(card.total_bytes)}"
            error = f"OutOfMemoryError: {has}; the program's tensors and CUDA itself take {format_bytes(needed)}"
            return replace(run, end=OUT_OF_MEMORY, error=error)
        if run.is_replayed:
            error = f"OutOfMemoryError: {card.product} (simulated) runs out of memory though its cache is given back"
            return replace(run, end=OUT_OF_MEMORY, error=error)
        # Near the limit the allocator gives back what it has cached, and more may fit.
        near = self._run(self._job(command, job.num_windows, job.limit_bytes, job.measure), command)
        return near if near.was_cut else replace(near, peak_bytes=peak)

    def _run(self, job: ScriptJob, command: UserCommand) -> ScriptRun:
        folder = Path(job.folder)
        job.write(folder.parent / "job.json")
        code = self._wait(folder.parent / "job.json", command, job.seconds + _GRACE_SECONDS)
        log = Path(job.log)
        output = log.read_text(encoding="utf-8", errors="replace") if job.log and log.exists() else ""
        answer, measured, work = folder / ANSWER, folder / MEASURED, folder / WORK
        if not answer.exists():
            return ScriptRun(end=FAILED, error=_describe_exit(code), traceback=_last_lines(output + self._server_log()))
        run = ScriptRun.from_dict(json.loads(answer.read_text(encoding="utf-8")))
        if work.exists():
            run = replace(run, work=unpack_work(json.loads(work.read_text(encoding="utf-8"))))
        if not run.was_cut and output.strip():
            run = replace(run, notes=(*run.notes, f"the last lines it printed:\n{_last_lines(output)}"))
        if not measured.exists():
            return run
        import torch

        return replace(run, measured=torch.load(measured, weights_only=True))

    def _wait(self, job: Path, command: UserCommand, seconds: float) -> int:
        """Have a job run, and return the exit code of its process."""
        server = self._serve(command)
        assert server.stdin is not None
        assert server.stdout is not None
        deadline = time.monotonic() + seconds
        with suppress(BrokenPipeError):
            server.stdin.write(f"{job}\n")
            server.stdin.flush()
        while True:
            ready, _, _ = select.select([server.stdout], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                self._end()
                return -signal.SIGKILL
            word, _, number = server.stdout.readline().partition(" ")
            if word == STARTED:
                self._groups.add(int(number))
            elif word == ENDED:
                self._end_groups()  # loader workers and trackers of that probe
                return int(number)
            else:
                code = server.wait()
                self._end()
                return code

    def _serve(self, command: UserCommand) -> subprocess.Popen[str]:
        """Return the process that forks, begun anew if there is none or the environment is another."""
        if self._server is not None and self._environment == command.environment:
            return self._server
        self._end()
        self._environment = command.environment
        with Path(self._folder.name, "server.log").open("ab") as log:
            self._server = subprocess.Popen(
                [command.interpreter, *command.interpreter_options, "-m", "batchwright.scripts.fork_server"],
                cwd=self.script.cwd,
                env=self._environment_of(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sys.stderr.fileno() if self.script.show_output else log,
                text=True,
                start_new_session=True,
            )
        self._groups.add(self._server.pid)
        return self._server

    def _environment_of(self, command: UserCommand) -> dict[str, str]:
        """Set what the command sets; have its interpreter find batchwright, and temporary files go with the probes."""
        import batchwright

        temporary = Path(self._folder.name, "tmp")
        temporary.mkdir(exist_ok=True)
        environment = {**os.environ, "TMPDIR": str(temporary), **dict(command.environment)}
        if names_a_card(self.on):
            # TorchScript runs its operators on real tensors only; torch itself has this word for leaving it out.
            environment["PYTORCH_JIT"] = "0"
        paths = (str(Path(batchwright.__file__).parents[1]), environment.get("PYTHONPATH"))
        return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def _server_log(self) -> str:
        log = Path(self._folder.name, "server.log")
        return log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""

    def _end(self) -> None:
        """End the program and whatever it started."""
        server, self._server = self._server, None
        self._end_groups(server)
        if server is not None:
            server.wait()
            for stream in (server.stdin, server.stdout):
                with suppress(OSError):
                    stream.close()  # type: ignore[union-attr]

    def _end_groups(self, server: subprocess.Popen[str] | None = None) -> None:
        kept = {self._server.pid} if self._server is not None and server is None else set()
        for process in descendants_of(server.pid if server is not None else 0):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        for group in self._groups - kept:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        self._groups &= kept

    def _fails_by_itself(self, run: ScriptRun, command: UserCommand) -> str:
        """Run it without a hook, and say whether it fails alike."""
        if self.script.show_output or names_a_card(self.on):
            return ""
        job = replace(self._job(command, 1), is_watched=False, seconds=_PLAIN_SECONDS)
        plain = self._run(job, command)
        if plain.end == run.end and plain.error == run.error:
            return "it fails without batchwright too"
        if plain.end in (FINISHED, SILENT):
            return f"without batchwright it ran on for {plain.seconds:.0f} s: this may be a defect of batchwright"
        return ""

    def refuse(self, run: ScriptRun, command: UserCommand) -> NoReturn:
        """Raise what has to be said of a run that was not cut: it failed, left, or did nothing that can be measured."""
        counts = {"backwards": sum(run.backwards_per_window), "forwards": len(run.input_shapes)}
        counts[run.windows] = run.num_windows
        seen = ", ".join(f"{number} {name}" for name, number in counts.items() if number)
        details = [f"seen: {seen or 'no forward, backward or optimizer step'} in {run.seconds:.0f} s", *run.notes]
        if run.end in (FAILED, TOO_SMALL):
            by_itself = _hint_at_loader(command) or self._fails_by_itself(run, command)
            remarks = [remark for remark in (by_itself, _hint(run.error)) if remark]
            raise StepFailedError("\n".join([*run.notes, run.traceback or run.error, *remarks]).strip())
        if run.end == EXITED:
            text = f"the program left by sys.exit: {run.error.removeprefix('SystemExit: ')}"
            raise StepFailedError("\n".join([text, *details, "give it arguments with which it trains"]))
        if run.end == FINISHED:
            raise InvalidInputError(
                f"{command} ended by itself before an optimizer step or a forward of a model.",
                details=details,
                remedy="arguments with which it trains",
            )
        raise BatchwrightError(
            f"{command} made no {run.windows} within {self.script.seconds:.0f} s.",
            details=details,
            remedy="more time, as in bw.Script(..., seconds=1800), or arguments with which it begins to train sooner",
        )


def _hint_at_loader(command: UserCommand) -> str:
    """Say what to do if a program fails whose loader was given another size than it has in the program."""
    if command.loader_sizes is None:
        return ""
    typed, turned = command.loader_sizes
    return (
        f"no option sets the micro-batch, and DataLoader(batch_size={typed}) was given {turned}: if {typed} stands "
        "elsewhere in the program too, make an option of it and write {micro_batch} behind that"
    )


# What an error of the program's own says about how it was run.
_HINTS = {
    "process ended with code": "it left without an end that can be seen, as by os._exit; if it forked before, what "
    "goes on in the fork is not followed: run it without the fork",
    "EOFError": "the program asks for input, and there is nobody to answer: give what it asks for as arguments",
    "ConnectionError": "it needs a network: download what it needs before, or set HF_HUB_OFFLINE=1",
    "gaierror": "it needs a network: download what it needs before, or set HF_HUB_OFFLINE=1",
    "URLError": "it needs a network: download what it needs before, or set HF_HUB_OFFLINE=1",
    "MaxRetryError": "it needs a network: download what it needs before, or set HF_HUB_OFFLINE=1",
    "LocalEntryNotFoundError": "it needs a network: download what it needs before",
    "Torch not compiled with CUDA": "it asks for a GPU, and this machine has none: simulate one, such as a100-40gb",
    "no NVIDIA driver": "it asks for a GPU, and this machine has none: simulate one, such as a100-40gb",
    "No CUDA GPUs": "it asks for a GPU, and this machine has none: simulate one, such as a100-40gb",
}


def _hint(error: str) -> str:
    """Say what an error means here.

    >>> _hint("EOFError: EOF when reading a line")[:26]
    'the program asks for input'
    """
    return next(
        (hint for name, hint in _HINTS.items() if name in error.split(":")[0] or (" " in name and name in error)), ""
    )


def _describe_exit(code: int) -> str:
    if code < 0:
        return f"the program's process was ended by {signal.Signals(-code).name} and left no answer"
    return f"the program's process ended with code {code} and left no answer"


def _last_lines(output: str) -> str:
    """Return the end of a log, without what progress bars wrote over, each line at a readable length."""
    lines = [line.rpartition("\r")[2] for line in output.replace("\r\n", "\n").rstrip().split("\n")]
    return "\n".join(line if len(line) <= _LOG_WIDTH else f"{line[:_LOG_WIDTH]} ..." for line in lines[-_LOG_LINES:])
