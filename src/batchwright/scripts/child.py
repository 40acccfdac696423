"""The other side of a script's probe: `python -m batchwright.scripts.child JOB`, in the folder the program runs in.

The program runs here as `python train.py` would run it, under hooks, until it has made so many windows. Then the answer
is written and the process ends at once: frameworks do much at their end, and none of it is waited for.

Promises:
- imports come first, and are outside of any budget;
- however the program ends, an answer is written: cut, finished, out of memory, failed, exited, or silent for too long.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import runpy
import sys
import threading
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from batchwright.scripts.outputs import writes_led_to
from batchwright.scripts.script_run import CUT, EXITED, FAILED, FINISHED, OUT_OF_MEMORY, SILENT, ScriptRun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batchwright.scripts.watch import Watch
    from batchwright.units import PeakBytes

ANSWER = "answer.json"
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
    limit_bytes: int | None = None

    def write(self, file: Path) -> None:
        """Write the job for another process."""
        file.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def read(file: Path) -> ScriptJob:
        """Read what `write` wrote."""
        data = json.loads(file.read_text(encoding="utf-8"))
        return ScriptJob(**{**data, "arguments": tuple(data["arguments"])})


def main() -> NoReturn:
    """Run one probe and leave."""
    job = ScriptJob.read(Path(sys.argv[1]))
    _stand_in_for(job)
    if not job.is_module:
        import_what_is_imported(Path(job.program))
    import torch._dynamo  # noqa: F401  # the first optimizer of a process imports it

    _Run(job).run()


def _stand_in_for(job: ScriptJob) -> None:
    """Have the process look as the program expects it: its arguments, and its folder first on the path."""
    sys.argv = [job.program, *job.arguments]
    sys.path[0] = os.getcwd() if job.is_module else str(Path(job.program).resolve().parent)


class _Run:
    def __init__(self, job: ScriptJob) -> None:
        from batchwright.scripts.watch import Watch

        self._job = job
        self._watch = Watch(job.num_windows)
        self._peak: Callable[[], PeakBytes | None] = lambda: None
        self._written: list[str] = []
        self._leaving = threading.Lock()

    def run(self) -> NoReturn:
        """Run the program to its cut, or to whatever end it takes."""
        from batchwright.device.out_of_memory import is_out_of_memory

        job, end = self._job, FINISHED
        error: BaseException | None = None
        timer = threading.Timer(job.seconds, self._leave, (SILENT,))
        timer.daemon = True
        # Before anything is measured: a new thread takes addresses that look like memory for a moment.
        timer.start()
        self._watch.finish = lambda: self._leave(CUT)
        try:
            with ExitStack() as stack:
                scratch = stack.enter_context(writes_led_to(Path(job.folder)))
                self._written = scratch.written
                self._peak = stack.enter_context(_measured(job, self._watch))
                stack.enter_context(self._watch.on())
                if job.is_module:
                    runpy.run_module(job.program, run_name="__main__", alter_sys=True)
                else:
                    runpy.run_path(job.program, run_name="__main__")
        except SystemExit as leaving:
            end, error = (FINISHED if leaving.code in (None, 0) else EXITED), leaving
        except BaseException as raised:
            end, error = (OUT_OF_MEMORY if is_out_of_memory(raised) else FAILED), raised
        self._leave(end, error)

    def _leave(self, end: str, error: BaseException | None = None) -> NoReturn:
        self._leaving.acquire()  # never released: the first to leave takes the process with it
        peak = None
        with suppress(Exception):
            peak = self._peak()
        written = tuple(dict.fromkeys(self._written))
        run = replace(self._watch.report(), end=end, peak_bytes=peak, files_written=written)
        if error is not None:
            run = replace(run, error=f"{type(error).__name__}: {error}", traceback=_traceback_of(error))
        write_answer(run, Path(self._job.folder))
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(0)


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
        with _on_card(job, watch) as peak:
            yield peak
        return
    from batchwright.device.process_memory import PeakWatch, can_limit, holes_filled, limited_to
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
            yield lambda: Peak(device=min(memory.peak_bytes() - outside, most))


@contextmanager
def _on_card(job: ScriptJob, watch: Watch) -> Iterator[Callable[[], PeakBytes | None]]:
    from batchwright.memory.on_card import card_named
    from batchwright.simulated.card import SimulatedCard
    from batchwright.trace.real_host import program_on_card

    named = card_named(job.on, memory=job.limit_bytes)
    assert named is not None
    card = SimulatedCard(named)
    with program_on_card(card) as trace:
        watch.enter_phase = trace.phase

        def peak() -> PeakBytes:
            watch.num_made_up = trace.num_made_up
            watch.notes.update(trace.notes)
            return card.peak_bytes

        yield peak


def import_what_is_imported(script: Path) -> None:
    """Import the packages that a script and its neighbours import, before anything is measured or simulated.

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
            neighbour = _neighbour(script.resolve().parent, name)
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
