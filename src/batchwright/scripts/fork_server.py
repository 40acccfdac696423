"""The other side of a script's probes: `python -m batchwright.scripts.fork_server`, in the folder the program runs in.

A line of stdin names the file of a job. What the program imports is imported once; each job then runs in a fork, as
`python train.py` would run it, under hooks, until it has made so many windows. Then the answer is written and the fork
ends at once: frameworks do much at their end, and none of it is waited for.

Promises:
- imports come first, and are outside of any budget;
- a process that imports have given threads that a fork would miss is not forked: it runs its job itself, and ends;
- however the program ends, an answer is written: cut, finished, out of memory, failed, exited, or silent for too long.
"""

from __future__ import annotations

import ast
import ctypes
import importlib
import importlib.util
import json
import os
import re
import runpy
import signal
import socket
import struct
import sys
import threading
import traceback
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from batchwright.catalogue.cards import names_a_card
from batchwright.scripts.redirected_writes import writes_led_to
from batchwright.scripts.script_run import CUT, EXITED, FAILED, FINISHED, OUT_OF_MEMORY, SILENT, TOO_SMALL, ScriptRun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batchwright.scripts.program_hooks import Measure, Watch
    from batchwright.units import PeakBytes

ANSWER, MEASURED, WORK = "answer.json", "measured.pt", "work.json"
# What is read of samples once for all probes.
LENGTHS = "lengths.json"
# What is answered on stdout, each with a number: the process of a job, and how it ended.
STARTED, ENDED = "started", "ended"
# What can be measured beside memory and time, and the class that does it.
MEASURES = {
    "noise": "batchwright.scripts.noise_script:NoiseMeasure",
    "gradient": "batchwright.scripts.audit_script:GradientMeasure",
}
# What ends a line of input, and how many questions are answered so.
_END_OF_INPUT, _MOST_QUESTIONS = b"\x04", 64
# What they write is led away only if they are imported before the program begins.
_WRITERS_ELSEWHERE = ("safetensors.torch", "huggingface_hub")
# Before what the program imports: the small blocks that our imports leave free in the heap go to its imports, not to
# its step, whose memory would not be seen.
_OURS = (
    "batchwright.device.host",
    "batchwright.device.outcome",
    "batchwright.scripts.program_hooks",
    "batchwright.targets",
)
# The name of its thread.
_JEMALLOC = "jemalloc_bg_thd"
# A call in the program's own file by which it trains, sooner or later.
_TRAINS = re.compile(rb"\.backward\(|Trainer\(|\.fit\(|[Tt]rainer\.train\(")
# So deep are files of the user's own followed for what they import.
_DEEPEST = 20


@dataclass(frozen=True)
class ScriptJob:
    """One probe of a program, as plain data."""

    program: str
    arguments: tuple[str, ...]
    is_module: bool
    on: str
    num_windows: int
    seconds: float
    folder: str
    """Where the answer and all that the program writes go."""
    log: str
    """Where its output goes; "" shows it on stderr."""
    limit_bytes: int | None = None
    is_roomy: bool = False
    """A simulated card gives more than it has, so that the peak of what does not fit is known too."""
    devices: int = 1
    loader_sizes: tuple[int, int] | None = None
    is_launched: bool = False
    """By a launcher, or as one of several: it finds the environment that a launcher sets."""
    measure: str = ""
    is_watched: bool = True
    """False runs the program without a hook in it: does it fail by itself?"""

    def write(self, file: Path) -> None:
        """Write the job for another process."""
        file.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def read(file: Path) -> ScriptJob:
        """Read what `write` wrote."""
        data = json.loads(file.read_text(encoding="utf-8"))
        sizes = data["loader_sizes"]
        lists = {"arguments": tuple(data["arguments"]), "loader_sizes": None if sizes is None else tuple(sizes)}
        return ScriptJob(**{**data, **lists})


def main() -> None:
    """Run the jobs whose files are named, a line each."""
    # Answers have a way of their own: packages print while they are imported, and that goes to the log.
    answers = os.dup(1)
    os.dup2(2, 1)
    end_with_parent(os.getppid())
    can_fork: bool | None = None
    for line in sys.stdin:
        job = ScriptJob.read(Path(line.rstrip("\n")))
        _stand_in_for(job)
        if can_fork is None:
            can_fork = _import_before(job)
        if not can_fork:
            _answer(answers, STARTED, os.getpid())
            os.close(answers)
            _run(job)
        server = os.getpid()
        process = os.fork()
        if process == 0:
            end_with_parent(server)
            os.setpgid(0, 0)
            os.close(answers)
            _run(job)
        with suppress(OSError):
            os.setpgid(process, process)
        _answer(answers, STARTED, process)
        _, status = os.waitpid(process, 0)
        _answer(answers, ENDED, os.waitstatus_to_exitcode(status))


_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Have Linux end this process with the one that started it, even if that is killed and can clear nothing away."""
    if sys.platform != "linux":
        return
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _answer(where: int, word: str, number: int) -> None:
    os.write(where, f"{word} {number}\n".encode())


def _import_before(job: ScriptJob) -> bool:
    """Import what the program will; return whether the process can be forked afterwards."""
    for name in (*_OURS, *_WRITERS_ELSEWHERE):
        with suppress(Exception):
            importlib.import_module(name)
    with suppress(Exception):
        program = _file_of(job)
        import_what_is_imported(program, Path.cwd() if job.is_module else program.resolve().parent)
    import torch._dynamo  # noqa: F401  # the first optimizer of a process imports it

    return _can_be_forked()


def _file_of(job: ScriptJob) -> Path:
    spec = importlib.util.find_spec(job.program) if job.is_module else None
    return Path(job.program) if spec is None else Path(spec.origin or "")


def _reads_as_training(job: ScriptJob) -> bool:
    """Whether a program's own file trains a model, after whatever it may evaluate first."""
    with suppress(ImportError, OSError, ValueError):
        return _TRAINS.search(_file_of(job).read_bytes()) is not None
    return False


def _can_be_forked() -> bool:
    """Whether this process has no thread that a fork would miss, those of C libraries too; False if it is not known.

    OpenBLAS, as numpy and scipy bring it, ends its threads when a process is about to fork, and starts them again when
    it needs them: a fork for nothing shows which threads stay. jemalloc, as pyarrow brings it, keeps its own, and goes
    on without it in the fork.
    """
    if not hasattr(os, "fork"):
        return False
    process = os.fork()
    if process == 0:
        os._exit(0)
    os.waitpid(process, 0)
    try:
        names = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
    except OSError:
        return False
    return len([name for name in names if name != _JEMALLOC]) == 1


def _run(job: ScriptJob) -> NoReturn:
    """Become the program: a terminal at which nobody types, its output where it belongs."""
    nothing = _open_terminal()
    output = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if job.log else 2
    for target, source in ((0, nothing), (1, output), (2, output)):
        os.dup2(source, target)
    _Run(job).run()


def _open_terminal() -> int:
    """Return a terminal of 80 x 24 whose input has ended: programs ask it for its size."""
    try:
        import fcntl
        import termios

        ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        os.write(ours, _END_OF_INPUT * _MOST_QUESTIONS)
    except (ImportError, OSError):
        return os.open(os.devnull, os.O_RDONLY)
    return theirs


# Trackers write through processes of their own, or to a server: in a probe they are off.
_TRACKERS = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "disabled",
    "DVCLIVE_TEST": "true",
}


def _stand_in_for(job: ScriptJob) -> None:
    """Have the process look as the program expects it: its arguments, and its folder first on the path."""
    sys.argv = [job.program, *job.arguments]
    os.environ |= {**_TRACKERS, "MLFLOW_TRACKING_URI": Path(job.folder, "mlruns").resolve().as_uri()}
    if job.is_launched:
        alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": job.devices, "LOCAL_WORLD_SIZE": job.devices}
        os.environ |= {name: str(value) for name, value in alone.items()}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    sys.path[0] = os.getcwd() if job.is_module else str(Path(job.program).resolve().parent)


class _Run:
    def __init__(self, job: ScriptJob) -> None:
        from batchwright.scripts.longest_batches import LongestBatches
        from batchwright.scripts.program_hooks import Watch

        self._job = job
        self._measure = _open_measure(job)
        self._watch = Watch(job.num_windows, self._measure, job.loader_sizes, expects_training=_reads_as_training(job))
        if not job.measure:
            # What measures gradients trains as the program does.
            known = Path(job.folder).parents[1] / LENGTHS
            self._watch.longest = LongestBatches(known, self._watch.notes, fills_up=names_a_card(job.on))
        self._peak: Callable[[], PeakBytes | None] = lambda: None
        self._written: list[str] = []
        self._programs: list[str] = []
        self._leaving = threading.Lock()

    def run(self) -> NoReturn:
        """Run the program to its cut, or to whatever end it takes."""
        from batchwright.device.outcome import is_out_of_memory, is_too_small

        job, end = self._job, FINISHED
        error: BaseException | None = None
        timer = threading.Timer(job.seconds, self._leave, (SILENT,))
        timer.daemon = True
        # Before anything is measured: a new thread takes addresses that look like memory for a moment.
        timer.start()
        self._watch.finish = lambda: self._leave(CUT)
        try:
            with ExitStack() as stack:
                scratch = stack.enter_context(writes_led_to(Path(job.folder), free=Path(job.folder).parents[1]))
                self._written, self._programs = scratch.written, scratch.programs
                if job.is_watched:
                    self._peak = stack.enter_context(_measured(job, self._watch))
                    stack.enter_context(self._watch.on())
                if self._measure is not None:
                    self._measure.seed()
                if job.is_module:
                    runpy.run_module(job.program, run_name="__main__", alter_sys=True)
                else:
                    runpy.run_path(job.program, run_name="__main__")
        except SystemExit as leaving:
            end, error = (FINISHED if leaving.code in (None, 0) else EXITED), leaving
        except BaseException as raised:
            end, error = FAILED, raised
        if error is not None and end != FINISHED:
            # Hydra prints what a program raised, and leaves by sys.exit.
            raised_before = error.__context__ if end == EXITED else error
            if raised_before is not None and is_out_of_memory(raised_before):
                end, error = OUT_OF_MEMORY, raised_before
            elif raised_before is not None and is_too_small(raised_before):
                end, error = TOO_SMALL, raised_before
        self._leave(end, error)

    def _leave(self, end: str, error: BaseException | None = None) -> NoReturn:
        self._leaving.acquire()  # never released: the first to leave takes the process with it
        code = 1
        try:
            self._report(end, error)
            code = 0
        finally:
            if code:
                traceback.print_exc()
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):
                    stream.flush()
            for process in descendants_of(os.getpid()):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal.SIGKILL)
            os._exit(code)

    def _report(self, end: str, error: BaseException | None) -> None:
        peak = None
        with suppress(Exception):
            peak = self._peak()
        written = tuple(dict.fromkeys(self._written))
        run = replace(self._watch.report(), end=end, peak_bytes=peak, files_written=written)
        if self._programs:
            names = ", ".join(dict.fromkeys(self._programs))
            run = replace(
                run, notes=(*run.notes, f"it started other programs ({names}): what they write is not led away")
            )
        if error is not None:
            run = replace(run, error=f"{type(error).__name__}: {error}", traceback=_traceback_of(error))
        if self._measure is not None:
            import torch

            torch.save(self._measure.result(), Path(self._job.folder) / MEASURED)
        write_answer(run, Path(self._job.folder))


def descendants_of(process: int) -> list[int]:
    """Return the processes that a process has started, and those that they have, as far as the system tells."""
    children: dict[int, list[int]] = {}
    with suppress(OSError):
        for entry in os.listdir("/proc"):
            if entry.isdecimal():
                with suppress(OSError, ValueError, IndexError):
                    parent = int(Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[1])
                    children.setdefault(parent, []).append(int(entry))
    descendants: list[int] = []
    waiting = [process] if process else []
    while waiting:
        below = children.get(waiting.pop(), [])
        descendants += below
        waiting += below
    return descendants


def _open_measure(job: ScriptJob) -> Measure | None:
    if not job.measure:
        return None
    module, _, name = MEASURES[job.measure].partition(":")
    return getattr(importlib.import_module(module), name)(job.num_windows)  # type: ignore[no-any-return]


def write_answer(run: ScriptRun, folder: Path) -> None:
    """Write the answer whole or not at all."""
    beside = folder / f"{ANSWER}.part"
    beside.write_text(json.dumps(run.to_dict()), encoding="utf-8")
    beside.replace(folder / ANSWER)


def _traceback_of(error: BaseException) -> str:
    from batchwright.targets import users_traceback_text

    return "" if isinstance(error, SystemExit) else users_traceback_text(error)


@contextmanager
def _measured(job: ScriptJob, watch: Watch) -> Iterator[Callable[[], PeakBytes | None]]:
    """Measure memory where the program runs, under its budget if there is one."""
    if job.on != "cpu":
        with _on_card(job, watch) if names_a_card(job.on) else _on_accelerator(job) as peak:
            yield peak
        return
    from batchwright.device.host import PeakWatch, can_limit, holes_filled, limited_to
    from batchwright.units import PeakBytes as Peak

    if not can_limit():
        watch.notes["this system does not tell the memory of a process: the peak is not known"] = None
        yield lambda: None
        return
    import torch

    with holes_filled(), PeakWatch() as memory:
        outside = memory.bytes_before
        torch.ones(2**21).add_(1)  # starts torch's threads, whose stacks belong to the budget
        memory.look_from_here()
        with ExitStack() as stack:
            if job.limit_bytes is not None:
                stack.enter_context(limited_to(outside + job.limit_bytes))
            # What ran under the limit cannot have exceeded it, though the reading is only so exact.
            most = job.limit_bytes or sys.maxsize
            rises: dict[str, int] = {}
            now = ["build"]

            def peak_so_far() -> int:
                return min(memory.peak_bytes() - outside, most)

            def enter(phase: str) -> None:
                if (risen := peak_so_far()) > max(rises.values(), default=0):
                    rises[now[0]] = risen
                now[0] = phase

            watch.enter_phase, watch.parts = enter, lambda: ({}, rises)
            yield lambda: Peak(device=peak_so_far())


@contextmanager
def _on_accelerator(job: ScriptJob) -> Iterator[Callable[[], PeakBytes | None]]:
    """Measure on this machine's own card. Never run: no such machine was at hand."""
    from batchwright.device.device import AcceleratorDevice, open_device

    device = open_device(job.on)
    assert isinstance(device, AcceleratorDevice)
    with replace(device, limit_bytes=job.limit_bytes).measured() as peak:
        yield peak


@contextmanager
def _on_card(job: ScriptJob, watch: Watch) -> Iterator[Callable[[], PeakBytes | None]]:
    from batchwright.memory.breakdown import break_down
    from batchwright.memory.on_card import card_named
    from batchwright.simulated.card import SimulatedCard
    from batchwright.timing.work_file import pack_work
    from batchwright.trace.programs.real_host import program_on_card

    named = card_named(job.on, memory=job.limit_bytes)
    assert named is not None
    card = SimulatedCard(named, is_roomy=job.is_roomy)
    with program_on_card(card, devices=job.devices if job.is_launched else None) as trace:
        watch.enter_phase = trace.phase
        trace.phase("build")
        watch.saw_model, watch.saw_optimizer = trace.see_model, trace.optimizers.append
        watch.run_forward, watch.cuts_repeats = trace.forwards.run, True
        trace.when_pipelined = partial(setattr, watch, "cuts_repeats", False)

        def peak() -> PeakBytes:
            watch.num_made_up = trace.num_made_up
            if trace.forwards.num_left_out:
                watch.notes[
                    f"{trace.forwards.num_left_out:,} forwards without gradients repeated those before them, and were "
                    "not followed again"
                ] = None
            watch.notes.update(trace.notes)
            work = pack_work(trace.work.last_step(watch.updates_per_step))
            Path(job.folder, WORK).write_text(json.dumps(work), encoding="utf-8")
            broken_down = break_down(trace.log)
            watch.parts = lambda: (
                broken_down.parts,
                {phase.phase: phase.peak_bytes for phase in broken_down.phases},
            )
            at_most = named.total_bytes - card.context.typical_bytes
            if job.is_roomy and card.allocator.stats.allocated.peak <= at_most < card.allocator.stats.reserved.peak:
                within = card.replay_within()
                watch.is_replayed = within is not None
                return within or card.peak_bytes
            return card.peak_bytes

        yield peak


def import_what_is_imported(script: Path, root: Path) -> None:
    """Import the packages that a script and its neighbours below `root` import, before anything is measured.

    Libraries that find a card look for its driver when they are imported; and imports are outside of a budget.
    """
    seen: set[Path] = set()
    waiting = [(script, 0)]
    while waiting:
        file, depth = waiting.pop()
        if file in seen or depth > _DEEPEST or not file.is_file():
            continue
        seen.add(file)
        for name, members in _imports_of(file):
            neighbour = _neighbour(root, name)
            if neighbour is not None:
                waiting.append((neighbour, depth + 1))
                continue
            with suppress(Exception):
                module = importlib.import_module(name)
                for member in members:
                    getattr(module, member, None)  # packages such as transformers load what is asked for


def _imports_of(file: Path) -> list[tuple[str, list[str]]]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return []
    imports: list[tuple[str, list[str]]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += [(alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imports.append((node.module, [alias.name for alias in node.names]))
    return imports


def _neighbour(folder: Path, name: str) -> Path | None:
    """Return the user's own file behind an import, if it lies beside the script."""
    place = folder.joinpath(*name.split("."))
    for file in (place.with_suffix(".py"), place / "__init__.py"):
        if file.is_file():
            return file
    return place if place.is_dir() else None


if __name__ == "__main__":
    main()
