"""`tune`: fit, memory, throughput, audit, critical batch, plan: one answer, with everything it rests on.

Promises:
- a stage that fails says so in its section and does not take the rest with it;
- after every stage the run's file is written: what was measured is kept whatever comes, Ctrl-C included;
- `resume` continues a run of the same question;
- under torchrun all ranks go on with what the first one found; one whose code raises, or that runs out of memory, hangs
  or dies, ends the run on all of them.
"""

from __future__ import annotations

import datetime
import shlex
import time
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchwright.catalogue.cards import names_a_card
from batchwright.device.device import default_device, open_device
from batchwright.device.outcome import is_out_of_memory
from batchwright.errors import BatchwrightError, InvalidInputError, RankFailedError, StepFailedError
from batchwright.memory.on_card import card_named
from batchwright.printed_result import PrintedResult
from batchwright.ranks.session import Session, process_group, together
from batchwright.scripts.script import Script
from batchwright.targets import Target, is_from_users_code, load_workload, users_traceback_text
from batchwright.timing.collectives import read_network
from batchwright.tuning import script_stages, stages
from batchwright.tuning.noise_here import measure_here, take_from
from batchwright.tuning.predicted_speed import predict_throughput
from batchwright.tuning.race import race_batches
from batchwright.tuning.rate_sweep import sweep_rates
from batchwright.tuning.recommendation import advise_run
from batchwright.tuning.run_file import Measured, Run, Section, is_done, new_run, read_run_to_resume, write_run
from batchwright.units import counted, parse_bytes, positive_number, shortened, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from batchwright.workload import Workload

    Say = Callable[[str], None]


STAGES = ("fit", "estimate", "throughput", "audit", "noise", "branches", "race", "rate")
"""What can be skipped, in the order in which it is done."""
TRAINING_STAGES = ("throughput", "audit", "noise", "branches", "race", "rate")
"""Those that run real steps: never on a simulated card, and together on all ranks."""
_PYTHON_ALONE = ("seed", "critical_batch")
HORIZONS = ("until_loss", "samples", "hours")
"""Until where a run is meant to go: one of them."""


@dataclass(frozen=True)
class TuneRequest:
    """One question to `tune`.

    >>> TuneRequest(skip=["noise"], devices=2).skip
    ('noise',)
    """

    on: str = field(default_factory=default_device)
    memory: str | int | None = None
    devices: int = 1
    network: str | None = None
    effective_batch: int | None = None
    limit: int | None = None
    shape: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 200
    noise_batch: int | None = None
    branch_batches: tuple[int, ...] = ()
    branch_steps: tuple[int, ...] = (0,)
    race: bool = False
    until_loss: float | None = None
    samples: int | None = None
    hours: float | None = None
    critical_batch: float | None = None
    price_per_hour: float | None = None
    seed: int = 0
    skip: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "skip", (self.skip,) if isinstance(self.skip, str) else tuple(self.skip))
        object.__setattr__(self, "shape", dict(self.shape))
        object.__setattr__(self, "branch_batches", tuple(self.branch_batches))
        places = {whole_number(place, "branch steps", least=0) for place in self.branch_steps}
        object.__setattr__(self, "branch_steps", tuple(sorted(places)) or (0,))
        if len(set(self.branch_batches)) == 1 or (not self.branch_batches and self.branch_steps != (0,)):
            raise InvalidInputError(
                f"branches compare two batches or more; received {counted(len(self.branch_batches), 'batch')}.",
                remedy="branch_batches=[16, 64]",
            )
        for batch in self.branch_batches:
            whole_number(batch, "branch batches")
        for name in self.skip:
            if name not in STAGES:
                raise InvalidInputError(
                    f"there is no stage {shortened(name)} to skip; there are {', '.join(STAGES)}.",
                    remedy='skip=["noise"]',
                )
        whole_number(self.devices, "devices")
        whole_number(self.steps, "steps")
        for name in ("effective_batch", "limit", "noise_batch", "samples"):
            if getattr(self, name) is not None:
                whole_number(getattr(self, name), name.replace("_", " "))
        if self.memory is not None:
            parse_bytes(self.memory)
        if read_network(self.network) is not None and not self.is_on_card:
            raise InvalidInputError(
                f"network is for steps that are predicted, and on {self.on} they are timed.", remedy='on="a100-40gb"'
            )
        given = [name for name in HORIZONS if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidInputError(
                f"a run has one horizon; received {' and '.join(given)}.", remedy=f"only {given[0]}"
            )
        if self.hours is not None:
            positive_number(self.hours, "hours must be a number above 0", least=1e-9, most=1e9)
        if self.critical_batch is not None:
            positive_number(self.critical_batch, "critical_batch must be a number above 0", least=1e-9, most=1e15)
        if self.price_per_hour is not None:
            positive_number(self.price_per_hour, "price_per_hour must be a number above 0", least=1e-9, most=1e9)
        if self.until_loss is not None:
            positive_number(self.until_loss, "until_loss must be a number above 0", least=1e-300, most=1e300)
        if self.race and self.effective_batch is not None:
            raise InvalidInputError(
                f"a race finds the effective batch, and {self.effective_batch:,} is to be kept.",
                remedy="one of race=True and effective_batch=N",
            )

    @property
    def is_on_card(self) -> bool:
        """Whether it is about a simulated card: nothing runs there."""
        return names_a_card(self.on)

    @property
    def horizon(self) -> Mapping[str, float | None]:
        """Until where the run is meant to go, if that was said."""
        return {name: getattr(self, name) for name in HORIZONS}

    def reason_to_skip(self, stage: str) -> str | None:
        """Return why a stage is not run; None if it is."""
        if stage in self.skip:
            return "skipped, as asked"
        if (stage == "branches" and not self.branch_batches) or (stage == "race" and not self.race):
            return "not asked for"
        if self.is_on_card and stage == "noise" and self.critical_batch is not None:
            return "a critical batch was given"
        if self.is_on_card and stage in TRAINING_STAGES and stage not in ("throughput", "noise"):
            return f"{self.on} is simulated: nothing runs there"
        return None

    def command(self, target: str | Script) -> str:
        """Return the command that asks this.

        >>> TuneRequest(memory="16GiB", branch_batches=(16, 64), shape={"seq_len": 512}).command("train.py:workload")
        'batchwright tune train.py:workload --memory 16GiB --shape seq_len=512 --branches 16,64'
        """
        if isinstance(target, str):
            named = Target.read(target)
            words, behind = ["batchwright", "tune", named.name], named.arguments
        else:
            words, behind = ["batchwright", "tune", *target.options], tuple(target.words)
        for argument in fields(self):
            if argument.name in (*_PYTHON_ALONE, "branch_steps"):
                continue
            value, option = getattr(self, argument.name), f"--{argument.name.replace('_', '-')}"
            if argument.name == "shape":
                words += [word for name, size in value.items() for word in (option, f"{name}={size}")]
            elif argument.name == "race":
                words += [option] * value
            elif argument.name == "branch_batches":
                places = "" if self.branch_steps == (0,) else f"@{','.join(map(str, self.branch_steps))}"
                words += ["--branches", ",".join(map(str, value)) + places] if value else []
            elif isinstance(value, tuple):
                words += [option, ",".join(map(str, value))] if value else []
            elif value != (default_device() if argument.name == "on" else argument.default):
                words += [option, _as_typed(value) if argument.name == "memory" else str(value)]
        text = shlex.join([*words, "--", *behind] if behind else words)
        defaults = {argument.name: argument.default for argument in fields(self)}
        rest = [f"{n}={getattr(self, n)}" for n in _PYTHON_ALONE if getattr(self, n) != defaults[n]]
        return f"{text}  # and in Python: {', '.join(rest)}" if rest else text

    def to_dict(self) -> dict[str, Any]:
        """Return the question as plain data."""
        given = {name: value for name, value in asdict(self).items() if name not in HORIZONS}
        lists = {name: list(given[name]) for name in ("branch_batches", "branch_steps", "skip")}
        return {**given, **lists, "horizon": dict(self.horizon)}


def _as_typed(amount: str | int) -> str:
    """An amount as a person types it, if bytes are whole MiB or GiB.

    >>> _as_typed(64 * 2**20), _as_typed("16GiB"), _as_typed(1000)
    ('64MiB', '16GiB', '1000')
    """
    if isinstance(amount, int):
        for power, unit in ((30, "GiB"), (20, "MiB")):
            if amount and amount % 2**power == 0:
                return f"{amount >> power}{unit}"
    return str(amount)


@dataclass(frozen=True, repr=False)
class Tuned(PrintedResult):
    """Everything that was measured, by section, and what follows from it."""

    in_repr = ("finished", "micro_batch", "accumulation", "effective_batch", "file")
    drawn_by = "training_text.draw_tuned"

    run: Run
    file: Path | None = field(default=None, compare=False)
    """Where the run is written; None if it is not, or could not be."""

    @property
    def finished(self) -> bool:
        """Whether every stage was reached."""
        return bool(self.run["finished"])

    def __getattr__(self, name: str) -> Any:
        # What the recommendation says: micro_batch, accumulation, effective_batch, devices, learning_rate, ...
        advised = self.__dict__["run"]["recommendation"] if "run" in self.__dict__ else {}
        if name.startswith("_") or name not in advised:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return advised[name]

    def to_dict(self) -> dict[str, Any]:
        """Return the run as plain data, the same as `batchwright tune --json` prints and as its file holds."""
        return self.run


_RUNS: dict[str, Callable[..., Section]] = {
    "fit": stages.find_fit,
    "estimate": stages.predict,
    "throughput": lambda work, measured, request, say: (
        predict_throughput if request.is_on_card else stages.time_steps
    )(work, measured, request, say),
    "audit": stages.audit_accumulation,
    "noise": lambda work, measured, request, say: (measure_here if request.is_on_card else stages.watch_noise)(
        work, measured, request, say
    ),
    "branches": stages.train_branches,
    "race": race_batches,
    "rate": sweep_rates,
}


def _runs(work: object, request: TuneRequest) -> Mapping[str, Callable[..., Section]]:
    if not isinstance(work, Script):
        return _RUNS
    if not request.is_on_card:
        return script_stages.RUNS
    return {**script_stages.RUNS, "throughput": predict_throughput, "noise": measure_here}


# Between two parts of one run.
_MAY_DIFFER = (
    *("skip", "command", "batchwright", "torch", "python", "horizon", "race"),
    *("critical_batch", "price_per_hour", "network"),
)


def tune(
    work: Workload | Script | str,
    *,
    on: str | None = None,
    memory: str | int | None = None,
    devices: int = 1,
    network: str | None = None,
    effective_batch: int | None = None,
    limit: int | None = None,
    shape: dict[str, Any] | None = None,
    steps: int = 200,
    noise_batch: int | None = None,
    branch_batches: tuple[int, ...] = (),
    branch_steps: tuple[int, ...] = (0,),
    race: bool = False,
    until_loss: float | None = None,
    samples: int | None = None,
    hours: float | None = None,
    critical_batch: float | None = None,
    price_per_hour: float | None = None,
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
    >>> tuned = tune(workload, limit=64, steps=40, skip=("estimate",))
    >>> tuned.run["fit"]["micro_batch"], tuned.run["estimate"], tuned.finished
    (64, {'skipped': 'skipped, as asked'}, True)

    - `work`: a workload, a `bw.Script`, or a target such as "train.py:workload".
    - `on`: a device of this machine (default: its accelerator, else cpu), or a card of the catalogue; nothing runs on
      a card: memory and the time of steps are predicted.
    - `memory`: the budget of a device. `limit`: the largest micro-batch of interest.
    - `devices`: data-parallel ranks. `network`: what joins nodes of 8 devices of a card, such as "400Gb/s" for each
      node. `effective_batch`: keep this one, and say how much sooner the best would be.
    - `shape`: what else `batch` takes.
    - `steps`, `seed`: of the training that measures the critical batch; `noise_batch` is its effective batch.
    - `branch_batches`: effective batches to train short branches at; they measure the critical batch itself.
      `branch_steps`: after how many steps of the smallest of them branches begin, at one or several places of the run.
    - `race`: train the recommended batch against half and double of it, for the same counted time; the winner is
      recommended.
    - `until_loss`, `samples`, `hours`: one of them, until where the run is meant to go. Without it: until the data was
      seen once, or ten times what was trained to measure.
    - `critical_batch`: in samples, where it is known. Else, for a card, it is measured on the CPU of this machine if
      that takes a few minutes at most, or taken from the run in `file` if that is of the same workload.
    - `price_per_hour`: of one device; with `samples` or `hours` the answer says what the run costs.
    - `skip`: stages to leave out.
    - `file`: where the run is written after every stage; with `resume` the run in it is continued. Under torchrun
      every rank calls `tune`; the first one reads and writes the file.
    """
    say = progress or (lambda _: None)
    if isinstance(work, Script) and on is not None and names_a_card(on):
        devices = max(devices, work.command.num_processes)
    request = TuneRequest(
        on=default_device() if on is None else on,
        memory=memory,
        devices=devices,
        network=network,
        effective_batch=effective_batch,
        limit=limit,
        shape=shape or {},
        steps=steps,
        noise_batch=noise_batch,
        branch_batches=branch_batches,
        branch_steps=branch_steps,
        race=race,
        until_loss=until_loss,
        samples=samples,
        hours=hours,
        critical_batch=critical_batch,
        price_per_hour=price_per_hour,
        seed=seed,
        skip=skip,
    )
    card_named(request.on) if request.is_on_card else open_device(request.on)  # refuse an unknown one at once
    with together("tune") as ranks:
        path = None if file is None or ranks.rank > 0 else Path(file)
        return _tune(work, request, path, ranks, ranks.ticking(say), file=file, resume=resume)


def _tune(
    work: Workload | Script | str,
    request: TuneRequest,
    path: Path | None,
    ranks: Session,
    say: Say,
    *,
    file: str | Path | None,
    resume: bool,
) -> Tuned:
    target = work if isinstance(work, str) else None
    with ranks.at(f"loading {target or 'the workload'}"):
        workload = load_workload(work) if isinstance(work, str) else work
        if isinstance(workload, Script):
            workload, about = script_stages.describe_script(workload, request, say)
        else:
            about = stages.describe_workload(workload, target, request)
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    run = _resume(path, about, ranks, say) if resume else {**new_run(created), "workload": about}
    if request.is_on_card and request.critical_batch is None and "noise" not in request.skip and path is not None:
        run |= take_from(path, about, request, say) if not resume and path.exists() else {}
    seconds: dict[str, float] = run["workload"].setdefault("seconds", {})
    for number, stage in enumerate(STAGES, 1):
        if is_done(run[stage]):
            continue
        measured = Measured.read(run)
        reason = request.reason_to_skip(stage)
        if reason is None and stage in TRAINING_STAGES:
            reason = _reason_not_to_train(about, measured)
        if reason is not None:
            run[stage] = {"skipped": reason}
            continue
        say(f"stage {number} of {len(STAGES)}: {stage}")
        start = time.monotonic()
        try:
            with ranks.at(f"stage {stage}"):
                fitted = target if stage == "fit" and target else workload
                run[stage] = _run_everywhere(stage, fitted, measured, request, ranks, say)
        except KeyboardInterrupt as stop:
            run[stage] = {"skipped": "interrupted"}
            if _keep(run, path, say):
                stop.add_note(f"What was measured is in {path}; run it again with resume=True to continue.")
            raise
        finally:
            seconds[stage] = time.monotonic() - start
            _keep(run, path, say)
        if file is not None:
            ranks.remedy = f"What was measured before that is in {file}; run it again with resume=True to continue."
    advise_run(run, request)
    if isinstance(workload, Script):
        script_stages.fill_in(run["recommendation"], workload, request)
    run["finished"] = True
    return Tuned(run, file=path if _keep(run, path, say) else None)


def _reason_not_to_train(about: Section, measured: Measured) -> str | None:
    if measured.nothing_fits:
        return "nothing fits"
    return "the workload has no optimizer: it only infers" if about["optimizer"] is None else None


def _resume(path: Path | None, about: Section, ranks: Session, say: Say) -> Run:
    """Return the run to go on with, the same on every rank: one that left out a stage alone would wait for ever."""
    run = ranks.share("run", _read(path, about, say) if ranks.rank == 0 else None)
    return {**run, "finished": False}


def _read(path: Path | None, about: Section, say: Say) -> Run:
    if path is None or not path.exists():
        raise InvalidInputError(f"there is no run to resume at '{path}'.", remedy="file=FILE of a run that was begun")
    run, damaged = read_run_to_resume(path)
    if damaged:
        say(f"damaged in '{path}', and measured again: {', '.join(damaged)}")
    defaults = TuneRequest(on=about["on"]).to_dict()  # what a run of an older version did not ask
    before = {**defaults, **run["workload"]}
    different = [name for name in about if name not in _MAY_DIFFER and about[name] != before.get(name)]
    if different:
        raise InvalidInputError(
            f"the run at '{path}' was asked something else: {', '.join(different)} differ.",
            remedy="the same options, or another file=FILE",
        )
    if run["workload"].get("horizon", about["horizon"]) != about["horizon"]:
        for stage in ("race", "rate"):
            run[stage] = {"skipped": "the horizon was another one"}
    if before["network"] != about["network"]:
        run["throughput"] = {"skipped": "the network was another one"}
    asked_now = {name: about[name] for name in ("horizon", "race", "command", "network", "price_per_hour")}
    return {**run, "workload": {**run["workload"], **asked_now}}


def _run_everywhere(
    stage: str, work: Any, measured: Measured, request: TuneRequest, ranks: Session, say: Say
) -> Section:
    if ranks.is_alone:
        return _run_stage(stage, work, measured, request, say)
    sections: list[Section] = ranks.gather("section", _run_on_ranks(stage, work, measured, request, say))
    # If one rank has no answer, none has; else that of the first, so that no two go on differently.
    return next((section for section in sections if not is_done(section)), sections[0])


def _run_on_ranks(stage: str, work: Any, measured: Measured, request: TuneRequest, say: Say) -> Section:
    """Run a stage on this rank; what the user's code raises passes: the others wait for this rank, and cannot go on."""
    try:
        # A group of its own, so that a stage that failed leaves nothing to the next.
        if stage not in TRAINING_STAGES:
            return _runs(work, request)[stage](work, measured, request, say)
        with process_group(request.on) as device:
            return _runs(work, request)[stage](work, measured, replace(request, on=device), say)
    except BatchwrightError as error:
        if isinstance(error, StepFailedError | RankFailedError):
            raise
        say(f"{stage} failed: {error}")
        return _failed(error, str(error))


def _run_stage(stage: str, work: Any, measured: Measured, request: TuneRequest, say: Say) -> Section:
    try:
        return _runs(work, request)[stage](work, measured, request, say)
    except BatchwrightError as error:
        say(f"{stage} failed: {error}")
        return _failed(error, str(error), is_users=isinstance(error, StepFailedError))
    except SystemExit as error:
        if not is_from_users_code(error):
            raise
        return _failed(error, f"the code that was run called sys.exit({error.code!r})", is_users=True)
    except Exception as error:  # the user's code; the rest of the run still has an answer
        say(f"{stage} failed: {users_traceback_text(error)}")
        return _failed(error, f"{type(error).__name__}: {error}", is_users=not is_out_of_memory(error))


def _failed(error: BaseException, text: str, *, is_users: bool = False) -> Section:
    """Return the section of a stage that failed, marked if the user's code raised."""
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    return {"skipped": f"failed: {text}{notes}", **({"raised": True} if is_users else {})}


def _keep(run: Run, path: Path | None, say: Say) -> bool:
    """Write the run, and return whether it is written."""
    if path is None:
        return False
    try:
        write_run(run, path)
    except BatchwrightError as error:
        say(str(error))  # the answer is still given, and a later stage may find room
        return False
    return True
