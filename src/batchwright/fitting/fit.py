"""`fit`: the largest micro-batch that fits, found in a few probes and certified by running.

Promises:
- the answer ran full steps on the device, within the budget; it says what the next size did, or why it was not tried;
- what is the user's comes back as it was, whatever happens;
- if the peak can be predicted, two to four probes; if only yes or no is known, doubling and halving.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from batchwright.device.device import default_device
from batchwright.errors import InvalidInputError
from batchwright.fitting.across_ranks import AcrossRanks, Ranks
from batchwright.fitting.budget import Budget, open_budget
from batchwright.fitting.cache import AnswerBook
from batchwright.fitting.driver import find_cap, fit_shapes
from batchwright.fitting.messages import Job
from batchwright.fitting.probers import InChild, InProcess, OnSimulatedCard, PlainStep, add_margin, budget_on
from batchwright.fitting.request import FitRequest
from batchwright.fitting.work import Work, longest_first, read_work
from batchwright.memory.estimate import check_shape
from batchwright.memory.on_card import card_named, read_settings
from batchwright.ranks.meeting import find_place
from batchwright.ranks.session import on_all_ranks, together
from batchwright.state.interrupts import temporary_folder
from batchwright.state.untouched import untouched
from batchwright.trace.run import check_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from batchwright.catalogue.cards import Card
    from batchwright.fitting.fit_result import Fit
    from batchwright.fitting.probers import Prober
    from batchwright.fitting.work import Step
    from batchwright.state.untouched import Keep
    from batchwright.workload import Workload


@on_all_ranks("fit")
def fit(
    work: Workload | Step | str,
    *,
    on: str | None = None,
    memory: str | int | None = None,
    limit: int | None = None,
    shapes: Mapping[str, int | Sequence[int]] | None = None,
    start: int | None = None,
    scale: str | None = None,
    powers_of_two: bool = False,
    max_trials: int | None = None,
    margin: float = 0.0,
    evaluate: bool = False,
    accumulation: int = 1,
    clip_norm: float | None = None,
    devices: int = 1,
    allocator: str | None = None,
    isolate: bool | None = None,
    state: Iterable[Any] = (),
    cache: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Fit:
    """Find the largest micro-batch that fits.

    >>> import torch
    >>> def step(n):
    ...     if n > 37:
    ...         raise torch.OutOfMemoryError("CUDA out of memory.")
    >>> result = fit(step, limit=100)
    >>> result.micro_batch, result.next_size.micro_batch, result.next_size.outcome
    (37, 38, 'out_of_memory')

    - `work`: a workload, a plain `step(n)`, or a target such as "train.py:workload", whose probes run in subprocesses.
    - `on`: a device of this machine (default: its accelerator, or cpu), or a card of the catalogue such as
      "a100-40gb": the steps are then traced on a simulated one.
    - `memory`: a budget such as "16GiB" (default: what is free); `margin`: the share of it to keep free.
    - `limit`: the largest size of interest.
    - `shapes`: arguments of the workload's batch; a list of values gives a table.
    - `start`, `scale`: grow by half from this size, or from a share of `limit` that depends on the shape.
    - `powers_of_two`: try no other sizes. `max_trials`: probes per shape.
    - `evaluate`: find the size for evaluation too.
    - `accumulation`, `clip_norm`: micro-batches per optimizer step, and the gradient norm that it clips to.
    - `devices`, `allocator`: on a simulated card, one of so many ranks with the workload's own `wrap`, and settings
      as in PYTORCH_ALLOC_CONF.
    - `isolate`: True runs the probes of a picklable workload in subprocesses.
    - `state`: what a plain step changes.
    - `cache`: remember the answer of a target for later runs, in which one probe certifies it.
    - `progress`: called with a line of text per event.
    """
    request = FitRequest.read(
        on=default_device() if on is None else on,
        memory=memory,
        limit=limit,
        shapes=shapes,
        start=start,
        scale=scale,
        powers_of_two=powers_of_two,
        max_trials=max_trials,
        margin=margin,
        evaluate=evaluate,
        accumulation=accumulation,
        clip_norm=clip_norm,
        devices=devices,
        allocator=allocator,
        isolate=isolate,
        cache=cache,
    )
    say = progress or (lambda _: None)
    item, state = read_work(work), tuple(state)
    if item.step is not None:
        return _fit_step(item.step, item.name, request, state, say)
    assert item.workload is not None
    if state:
        raise InvalidInputError("state= is for a plain step(n); a Workload says itself what it changes.")
    return _fit_workload(item, item.workload, request, say)


def _fit_step(step: Step, name: str, request: FitRequest, state: tuple[Any, ...], say: Callable[[str], None]) -> Fit:
    if request.is_on_card:
        raise InvalidInputError("a plain step cannot be traced on a simulated card; hand in a Workload.")
    if request.evaluate or request.isolate:
        raise InvalidInputError("a plain step runs in this process and has no evaluation; hand in a Workload.")
    with untouched(step, objects=state, accelerator=_accelerator(request.on)) as keep:
        prober = PlainStep(step, keep, on=request.on, state=state)
        fit = fit_shapes(request, prober, _settle_budget(prober, request), cap=find_cap(request), name=name, say=say)
        return replace(fit, notes=(*fit.notes, *prober.notes))


def _fit_workload(work: Work, workload: Workload, request: FitRequest, say: Callable[[str], None]) -> Fit:
    in_children = not find_place().is_alone or (work.target is not None if request.isolate is None else request.isolate)
    # If steps run elsewhere, or nowhere, only traces and batches are made here.
    card = card_named(request.on, memory=request.memory) if request.is_on_card else None
    is_traced = card is not None or in_children
    accelerator = None if is_traced else _accelerator(request.on)
    for shape in request.shapes:
        check_shape(workload, shape)
    with untouched(workload, accelerator=accelerator, is_traced=is_traced) as keep:
        for shape in request.shapes:
            check_batches(workload, shape)
        notes: tuple[str, ...] = ()
        job = Job(1, target=work.target, on=request.on, accumulation=request.accumulation, clip_norm=request.clip_norm)
        if workload.data is not None:
            # Samples may be drawn at random (augmentation): reading them must not move the user's generators.
            with untouched(workload, is_traced=is_traced):
                longest = longest_first(workload.data, most=find_cap(request).size, say=say)
            job, notes = replace(job, order=longest.order), (longest.note,) if longest.note else ()
        task = FitTask(request, work, workload, job, notes, say, keep)
        if card is not None:
            return _on_card(task, card)
        return _in_children(task) if in_children else _here(task)


@dataclass(frozen=True)
class FitTask:
    """One request about one workload, wherever its probes run."""

    request: FitRequest
    work: Work
    workload: Workload
    job: Job
    notes: tuple[str, ...]
    say: Callable[[str], None]
    keep: Keep

    def search(self, job: Job, prober: Prober, budget: Budget, *, is_predicted: bool = True) -> Fit:
        """Fit every shape with this prober; `is_predicted` if traces lead the search."""
        part = job.select_part(self.workload)
        book = None
        if self.request.cache and is_predicted and self.work.target is not None:
            book = AnswerBook(part, self.work.target, self.request, prober.where, job.only_evaluate)
        return fit_shapes(
            self.request,
            prober,
            budget,
            cap=find_cap(self.request, part.data),
            name=self.work.name,
            say=self.say,
            traceable=part if is_predicted else None,
            book=book,
        )

    def answer(self, run: Callable[[Job], Fit], job: Job) -> Fit:
        """Run the search, and once more for evaluation if the request says so."""
        fit = run(job)
        fit = replace(fit, notes=(*self.notes, *fit.notes))
        if not self.request.evaluate:
            return fit
        self.say("now the size for evaluation")
        return replace(fit, evaluation=run(replace(job, only_evaluate=True)))


def _on_card(task: FitTask, card: Card) -> Fit:
    """Trace the probes on a simulated card."""
    request = task.request
    settings = read_settings(request.allocator)
    budget = budget_on(card, request.margin)
    # Without a wrap that spreads it, a rank holds what one device does.
    devices = request.devices if task.workload.wrap is not None else 1

    def run(job: Job) -> Fit:
        prober = OnSimulatedCard(job.select_part(task.workload), card, settings, request, devices=devices)
        # Nothing leads this search: a probe is itself a prediction.
        fit = task.search(job, prober, budget, is_predicted=False)
        rows = tuple(add_margin(replace(row, source="predicted", ranks=devices), card) for row in fit.shapes)
        return add_margin(replace(fit, source="predicted", shapes=rows, ranks=devices), card)

    return task.answer(run, task.job)


def _here(task: FitTask) -> Fit:
    """Run the probes in this process, on live objects."""

    def run(job: Job) -> Fit:
        prober = InProcess(job.select_part(task.workload), task.keep, task.request)
        try:
            return task.search(job, prober, _settle_budget(prober, task.request))
        finally:
            prober.give_back()

    return task.answer(run, task.job)


def _in_children(task: FitTask) -> Fit:
    """Run the probes in subprocesses; if there are ranks, in child ranks."""
    with together("fit") as session:
        return _in_child_ranks(task, None if session.is_alone else Ranks(session))


def _in_child_ranks(task: FitTask, ranks: Ranks | None) -> Fit:
    job = task.job if ranks is None else replace(task.job, on=ranks.own_device(task.job.on))
    memory, margin = task.request.memory, task.request.margin
    own = open_budget(job.on, memory, margin=margin, sharers=ranks.local_world_size if ranks else 1)
    budget = own if ranks is None else replace(own, limit_bytes=ranks.least(own.limit_bytes))
    if ranks is not None:
        task = replace(task, say=ranks.session.ticking(task.say))

    def run(job: Job) -> Fit:
        return task.search(job, InChild(job) if ranks is None else AcrossRanks(job, ranks), budget)

    with _loadable(task.work, replace(job, limit_bytes=own.probe_bytes), ranks) as ready:
        if ranks is None:
            return task.answer(run, ready)
        if not ranks.leads:
            return ranks.follow(ready)
        return ranks.lead(lambda: task.answer(run, ready))


def _accelerator(on: str) -> torch.device | None:
    return None if on == "cpu" else torch.device(on)


def _settle_budget(prober: InProcess | PlainStep, request: FitRequest) -> Budget:
    budget = open_budget(prober.on, request.memory, margin=request.margin, held_bytes=prober.held_bytes)
    prober.limit_bytes = budget.probe_bytes
    return budget


@contextlib.contextmanager
def _loadable(work: Work, job: Job, ranks: Ranks | None) -> Iterator[Job]:
    """Give the job a file to load the workload from, if it has no target."""
    if work.target is not None:
        yield job
        return
    with temporary_folder() as folder:
        if ranks is not None:
            ranks.session.folders.append(str(folder))
        pickled = folder / "workload"
        pickled.write_bytes(work.pickled())
        yield replace(job, pickled=str(pickled))
