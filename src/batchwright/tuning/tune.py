"""`tune`: fit, memory, throughput, audit, critical batch, plan: one answer, with everything it rests on.

Promises:
- a stage that fails says so in its section and does not take the rest with it;
- after every stage the run's file is written: what was measured is kept whatever comes, Ctrl-C included;
- `resume` goes on where a run of the same question ended.
"""

from __future__ import annotations

import datetime
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from batchwright.device.device import default_device, open_device
from batchwright.errors import BatchwrightError, InvalidInputError
from batchwright.memory.on_card import card_named
from batchwright.noise.process_group import is_first_rank, process_group
from batchwright.targets import load_workload
from batchwright.tuning import stages
from batchwright.tuning.advise_run import advise_run
from batchwright.tuning.ask import STAGES, Ask
from batchwright.tuning.known import Known
from batchwright.tuning.result import Tuned
from batchwright.tuning.run_file import is_done, new_run, read_run_to_resume, write_run
from batchwright.users_code import is_from_users_code, users_traceback_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchwright.workload import Workload

_RUNS: dict[str, Callable[..., dict[str, Any]]] = {
    "fit": stages.find_fit,
    "estimate": stages.predict,
    "throughput": stages.time_steps,
    "audit": stages.audit_accumulation,
    "noise": stages.watch_noise,
    "branches": stages.train_branches,
}
# Ranks train together from here on; before, each probe makes a group of its own.
_TRAINS = ("throughput", "audit", "noise", "branches")
# Between two parts of one run.
_MAY_DIFFER = ("skip", "command", "batchwright", "torch", "python")


def tune(
    work: Workload | str,
    *,
    on: str | None = None,
    memory: str | int | None = None,
    devices: int = 1,
    effective_batch: int | None = None,
    limit: int | None = None,
    shape: dict[str, Any] | None = None,
    steps: int = 200,
    noise_batch: int | None = None,
    branch_batches: tuple[int, ...] = (),
    seed: int = 0,
    skip: tuple[str, ...] = (),
    file: str | Path | None = None,
    resume: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Tuned:
    """Find the batch size of a workload: what fits, how fast it is, whether accumulation is right, how large pays.

    >>> import torch
    >>> from batchwright.workload import Workload
    >>> workload = Workload(
    ...     model=lambda: torch.nn.Linear(8, 1),
    ...     batch=lambda n: torch.randn(n, 8),
    ...     loss=lambda model, batch: (model(batch) - batch.sum(1, keepdim=True)).pow(2).mean(),
    ...     optimizer=lambda params: torch.optim.SGD(params, lr=1e-3),
    ... )
    >>> found = tune(workload, limit=64, steps=40, skip=("estimate",))
    >>> found.run["fit"]["micro_batch"], found.run["estimate"], found.finished
    (64, {'skipped': 'skipped, as asked'}, True)

    `work` is a workload or a target such as "train.py:workload". `on` is a device of this machine (default: its
    accelerator, cpu where there is none), or a card of the catalogue, where nothing runs and only memory is
    answered. `noise_batch` is the effective batch to train at while the critical one is measured; `branch_batches`
    are several to train short branches at, which tell how the critical batch stands to the noise scale on this
    task. The run is written to `file` after every stage; with `resume` one that is there is continued. Under
    torchrun every rank calls it; the first one reads and writes the file.
    """
    say = progress or (lambda _: None)
    ask = Ask.read(
        on=default_device() if on is None else on,
        memory=memory,
        devices=devices,
        effective_batch=effective_batch,
        limit=limit,
        shape=shape,
        steps=steps,
        noise_batch=noise_batch,
        branch_batches=branch_batches,
        seed=seed,
        skip=skip,
    )
    card_named(ask.on) if ask.is_on_card else open_device(ask.on)  # one that is not there is refused at once
    path = None if file is None or not is_first_rank() else Path(file)
    workload = load_workload(work) if isinstance(work, str) else work
    target = work if isinstance(work, str) else None
    about = stages.describe_workload(workload, target, ask)
    run = _resumed(path, about, ask, say) if resume else _new(about)
    known = Known(run)
    seconds: dict[str, float] = run["workload"].setdefault("seconds", {})
    with ExitStack() as ranks:
        device: str | None = None
        for number, stage in enumerate(STAGES, 1):
            if is_done(run[stage]):
                continue
            why = ask.why_not(stage) or (_cannot_train(workload, known) if stage in _TRAINS else None)
            if why is not None:
                run[stage] = {"skipped": why}
                continue
            if stage in _TRAINS and device is None:
                device = ranks.enter_context(process_group(ask.on))
            say(f"stage {number} of {len(STAGES)}: {stage}")
            start = time.monotonic()
            try:
                run[stage] = _section(stage, work if stage == "fit" else workload, known, ask, say)
            except KeyboardInterrupt as stop:
                run[stage] = {"skipped": "interrupted"}
                if _keep(run, path, say):
                    stop.add_note(f"What was measured is in {path}; the same command with --resume goes on.")
                raise
            finally:
                seconds[stage] = time.monotonic() - start
                _keep(run, path, say)
    advise_run(run, ask)
    run["finished"] = True
    return Tuned(run, file=path if _keep(run, path, say) else None)


def _cannot_train(workload: Workload, known: Known) -> str | None:
    if known.nothing_fits:
        return "nothing fits"
    return "the workload has no optimizer: it only infers" if workload.optimizer is None else None


def _new(about: dict[str, Any]) -> dict[str, Any]:
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {**new_run(created), "workload": about}


def _resumed(path: Path | None, about: dict[str, Any], ask: Ask, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the run to go on with, the same on every rank: one that left out a stage alone would wait for ever."""
    found = [_read(path, about, say) if is_first_rank() else None]
    with process_group(ask.on):
        if dist.is_initialized():
            dist.broadcast_object_list(found)
    (run,) = found
    assert run is not None
    return {**run, "finished": False}


def _read(path: Path | None, about: dict[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    if path is None or not path.exists():
        raise InvalidInputError(
            f"there is no run to resume at '{path}'.", remedy="--run-file FILE of a run that was begun"
        )
    run, damaged = read_run_to_resume(path)
    if damaged:
        say(f"damaged in '{path}', and measured again: {', '.join(damaged)}")
    different = [name for name in about if name not in _MAY_DIFFER and about[name] != run["workload"].get(name)]
    if different:
        raise InvalidInputError(
            f"the run at '{path}' was asked something else: {', '.join(different)} differ.",
            remedy="the same options, or another --run-file FILE",
        )
    return run


def _section(stage: str, work: Any, known: Known, ask: Ask, say: Callable[[str], None]) -> dict[str, Any]:
    try:
        return _RUNS[stage](work, known, ask, say)
    except BatchwrightError as error:
        say(f"{stage} failed: {error}")
        return {"skipped": f"failed: {error}{_notes(error)}"}
    except SystemExit as error:
        if not is_from_users_code(error):
            raise
        return {"skipped": f"failed: the code that was run called sys.exit({error.code!r})"}
    except Exception as error:  # the user's code; the rest of the run can still be told
        say(f"{stage} failed: {users_traceback_text(error)}")
        return {"skipped": f"failed: {type(error).__name__}: {error}{_notes(error)}"}


def _notes(error: BaseException) -> str:
    return "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))


def _keep(run: dict[str, Any], path: Path | None, say: Callable[[str], None]) -> bool:
    """Write the run, and return whether it is written."""
    if path is None:
        return False
    try:
        write_run(run, path)
    except BatchwrightError as error:
        say(str(error))  # the answer is still told, and a later stage may find room
        return False
    return True
