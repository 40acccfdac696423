"""`fit`: the largest micro-batch that fits, found in a few probes and certified by running.

Promises:
- the answer ran full steps on the device, within the budget; what the next size did is said, or why it was not tried;
- what is the user's comes back as it was, whatever happens;
- where the peak can be predicted, two to four probes; where only yes or no is known, doubling and halving.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from batchwright.catalogue.cards import names_a_card
from batchwright.device.device import default_device
from batchwright.errors import InvalidInputError
from batchwright.fitting.across_ranks import AcrossRanks, Ranks
from batchwright.fitting.budget import Budget, open_budget
from batchwright.fitting.cache import AnswerBook
from batchwright.fitting.driver import LARGEST_MICRO_BATCH, fit_shapes
from batchwright.fitting.probers import InChild, InProcess, OnSimulatedCard, PlainStep, budget_on, with_margin
from batchwright.fitting.request import Question
from batchwright.fitting.subprocess import Job, part_to_probe
from batchwright.fitting.work import Work, every_shape, longest_first, read_work
from batchwright.memory.on_card import card_named, read_settings
from batchwright.ranks.meeting import find_place
from batchwright.ranks.session import on_all_ranks, together
from batchwright.state.interrupts import temporary_folder
from batchwright.state.untouched import untouched
from batchwright.trace.run import check_batches
from batchwright.units import whole_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from batchwright.catalogue.cards import Card
    from batchwright.fitting.fit_result import Fit
    from batchwright.fitting.work import Step
    from batchwright.simulated.allocator.settings import AllocatorSettings
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
    >>> found = fit(step, limit=100)
    >>> found.micro_batch, found.next_size.micro_batch, found.next_size.outcome
    (37, 38, 'out_of_memory')

    `work` is a workload, a plain `step(n)`, or a target such as "train.py:workload", whose probes run in processes of
    their own. `on` is a device of this machine (default: its accelerator, cpu where there is none), or a card of the
    catalogue, such as "a100-40gb": the steps are then traced on a simulated one.
    There `devices` makes it one of so many ranks, with the workload's own `wrap`, and `allocator` has settings as
    PYTORCH_ALLOC_CONF does. `memory` is a budget such as "16GiB" (default: what is free), `limit` the largest size of
    interest.
    `shapes` are arguments of the workload's batch; a list of values gives a table. With `start` or `scale` the search
    grows an estimate by half, up to `limit`. `evaluate` finds the size for evaluation too. `isolate=True` runs the
    probes of a picklable workload in processes of their own. `state` lists what a plain step changes. An
    answer is remembered for later runs, where one probe certifies it, unless `cache=False`.
    """
    say = progress or (lambda _: None)
    on = default_device() if on is None else on
    asked, state = read_work(work), tuple(state)
    question = Question.read(
        limit=limit,
        start=start,
        scale=scale,
        powers_of_two=powers_of_two,
        max_trials=max_trials,
        shapes=every_shape(asked, shapes or {}),
    )
    whole_number(accumulation, "accumulation")
    card = card_named(on, memory=memory) if names_a_card(on) else None
    if card is None and (devices != 1 or allocator is not None):
        raise InvalidInputError(
            "devices= and allocator= are for a simulated card; ranks of this machine are torchrun's.",
            remedy='on="a100-40gb", or torchrun --nproc-per-node 2 -m batchwright fit',
        )
    if asked.step is not None and card is not None:
        raise InvalidInputError("a plain step cannot be traced on a simulated card; hand in a Workload.")
    if asked.step is not None:
        if evaluate or isolate:
            raise InvalidInputError("a plain step runs in this process and has no evaluation; hand in a Workload.")
        with untouched(asked.step, objects=state, accelerator=_accelerator(on)) as keep:
            step = PlainStep(asked.step, keep, on=on, state=state)
            budget = _budget_of(step, memory, margin)
            found = fit_shapes(question, step, budget, name=asked.name, traceable=None, say=say)
            return replace(found, notes=(*found.notes, *step.notes))
    assert asked.workload is not None
    if state:
        raise InvalidInputError("state= is for a plain step(n); a Workload says itself what it changes.")
    in_children = not find_place().is_alone or (asked.target is not None if isolate is None else isolate)
    # Where steps run elsewhere, or nowhere, only traces and batches are made here.
    is_traced = card is not None or in_children
    with untouched(asked.workload, accelerator=None if is_traced else _accelerator(on), is_traced=is_traced) as keep:
        for shape in question.shapes:
            check_batches(asked.workload, shape)
        notes: tuple[str, ...] = ()
        job = Job(1, target=asked.target, on=on, accumulation=accumulation, clip_norm=clip_norm)
        if asked.workload.data is not None:
            # Samples may be drawn at random (augmentation): reading them must not move the user's generators.
            with untouched(asked.workload, is_traced=is_traced):
                longest = longest_first(asked.workload.data, most=question.limit or LARGEST_MICRO_BATCH, say=say)
            job, notes = replace(job, order=longest.order), (longest.note,) if longest.note else ()
        remembers = cache and card is None
        ask = Ask(asked, asked.workload, question, job, evaluate, memory, margin, remembers, notes, say, keep)
        if card is not None:
            # Without a wrap that spreads it, a rank holds what one device does.
            ranks = whole_number(devices, "devices") if asked.workload.wrap is not None else 1
            return _on_card(ask, card, devices=ranks, settings=read_settings(allocator))
        return _in_children(ask) if in_children else _here(ask)


@dataclass(frozen=True)
class Ask:
    """All that was asked about a workload, wherever its probes run."""

    work: Work
    workload: Workload
    question: Question
    job: Job
    evaluate: bool
    memory: str | int | None
    margin: float
    cache: bool
    notes: tuple[str, ...]
    say: Callable[[str], None]
    keep: Keep

    def part(self, job: Job) -> Workload:
        """The workload as this job probes it."""
        return part_to_probe(self.workload, only_evaluate=job.only_evaluate, order=job.order)

    def told(self, job: Job, traceable: Workload, where: str) -> dict[str, Any]:
        """What the search over shapes is told, besides the prober and its budget."""
        told: dict[str, Any] = {"accumulation": job.accumulation, "clip_norm": job.clip_norm}
        options = {**asdict(self.question), "shapes": None, "where": where, "only_evaluate": job.only_evaluate, **told}
        book = AnswerBook(self.part(job), self.work.target, options) if self.cache else None
        return {**told, "name": self.work.name, "traceable": traceable, "say": self.say, "book": book}

    def answer(self, run: Callable[[Job], Fit], job: Job) -> Fit:
        """Run the search, and once more for evaluation where that was asked for."""
        found = run(job)
        found = replace(found, notes=(*self.notes, *found.notes))
        if not self.evaluate:
            return found
        self.say("now the size for evaluation")
        return replace(found, evaluation=run(replace(job, only_evaluate=True)))


def _on_card(ask: Ask, card: Card, *, devices: int, settings: AllocatorSettings) -> Fit:
    """Trace the probes on a simulated card."""
    budget = budget_on(card, ask.margin)
    data = ask.workload.data
    # The search is told nothing to predict from: a probe is itself a prediction. So it is told the end of the data.
    most = min(ask.question.limit or LARGEST_MICRO_BATCH, LARGEST_MICRO_BATCH if data is None else len(data))
    question = replace(ask.question, limit=most)

    def run(job: Job) -> Fit:
        told = {"accumulation": job.accumulation, "clip_norm": job.clip_norm, "devices": devices}
        prober = OnSimulatedCard(ask.part(job), card, settings, **told)
        found = fit_shapes(question, prober, budget, name=ask.work.name, traceable=None, say=ask.say)
        rows = tuple(with_margin(replace(row, source="predicted", ranks=devices), card) for row in found.shapes)
        return with_margin(replace(found, source="predicted", shapes=rows, ranks=devices), card)

    return ask.answer(run, ask.job)


def _here(ask: Ask) -> Fit:
    """Run the probes in this process, on live objects."""

    def run(job: Job) -> Fit:
        told = {"accumulation": job.accumulation, "clip_norm": job.clip_norm}
        prober = InProcess(ask.part(job), ask.keep, on=job.on, **told)  # type: ignore[arg-type]
        budget = _budget_of(prober, ask.memory, ask.margin)
        try:
            return fit_shapes(ask.question, prober, budget, **ask.told(job, ask.part(job), prober.where))
        finally:
            prober.give_back()

    return ask.answer(run, ask.job)


def _in_children(ask: Ask) -> Fit:
    """Run the probes in processes of their own; where there are ranks, in child ranks."""
    with together("fit") as session:
        return _in_child_ranks(ask, None if session.is_alone else Ranks(session))


def _in_child_ranks(ask: Ask, ranks: Ranks | None) -> Fit:
    job = ask.job if ranks is None else replace(ask.job, on=ranks.own_device(ask.job.on))
    own = open_budget(job.on, ask.memory, margin=ask.margin, sharers=ranks.local_world_size if ranks else 1)
    budget = own if ranks is None else replace(own, limit_bytes=ranks.least(own.limit_bytes))
    say = ask.say if ranks is None else ranks.session.ticking(ask.say)
    ask = replace(ask, say=say)

    def run(job: Job) -> Fit:
        prober = InChild(job) if ranks is None else AcrossRanks(job, ranks)
        return fit_shapes(ask.question, prober, budget, **ask.told(job, ask.part(job), prober.where))

    with _loadable(ask.work, replace(job, limit_bytes=own.probe_bytes), ranks) as ready:
        if ranks is None:
            return ask.answer(run, ready)
        if not ranks.leads:
            return ranks.follow(ready)
        return ranks.lead(lambda: ask.answer(run, ready))


def _accelerator(on: str) -> torch.device | None:
    return None if on == "cpu" else torch.device(on)


def _budget_of(prober: InProcess | PlainStep, memory: str | int | None, margin: float) -> Budget:
    budget = open_budget(prober.on, memory, margin=margin, held_bytes=prober.held_bytes)
    prober.limit_bytes = budget.probe_bytes
    return budget


@contextlib.contextmanager
def _loadable(asked: Work, job: Job, ranks: Ranks | None) -> Iterator[Job]:
    """Give the job a file to load the workload from, where it has no target."""
    if asked.target is not None:
        yield job
        return
    with temporary_folder() as folder:
        if ranks is not None:
            ranks.session.folders.append(str(folder))
        pickled = folder / "workload"
        pickled.write_bytes(asked.pickled())
        yield replace(job, pickled=str(pickled))
