"""`fit`: the largest micro-batch that fits, found in a few probes and certified by running.

Promises:
- the answer ran full steps on the device, within the budget; it says what the next size did, or why it was not tried;
- what is the user's comes back as it was, whatever happens;
- if the peak can be predicted, two to four probes; if only yes or no is known, doubling and halving;
- what can be loaded by another process is known as such;
- the longest samples of a dataset are found by reading it through its own `__getitem__`: they decide whether a run
  survives its worst batch; a set too large to read in the time is read as far as that goes, and the result says so.
"""

from __future__ import annotations

import contextlib
import inspect
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from batchwright.device.device import default_device
from batchwright.errors import InvalidInputError
from batchwright.fitting.cache import AnswerBook
from batchwright.fitting.probe_process import Job
from batchwright.fitting.probers import (
    Budget,
    InChild,
    InProcess,
    OnSimulatedCard,
    PlainStep,
    Prober,
    Ranks,
    Step,
    add_peaks,
    add_time_note,
    budget_on,
    open_budget,
    refuse_spread,
)
from batchwright.fitting.request import FitRequest
from batchwright.fitting.run_search import find_cap, fit_shapes
from batchwright.memory.on_card import card_named, read_settings
from batchwright.ranks.meeting import find_place
from batchwright.ranks.session import Session, on_all_ranks, together
from batchwright.state.process_state import temporary_folder
from batchwright.state.untouched import Keep, untouched
from batchwright.targets import load_workload
from batchwright.trace.run import check_batches
from batchwright.units import shortened
from batchwright.workload import Program, Workload

if TYPE_CHECKING:
    from batchwright.catalogue.cards import Card
    from batchwright.fitting.fit_result import Fit


@on_all_ranks("fit")
def fit(
    work: Workload | Step | Program | str,
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
    context: str | int | None = None,
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

    - `work`: a workload, a `bw.Script`, a plain `step(n)`, or a target such as "train.py:workload", whose probes run in
      subprocesses.
    - `on`: a device of this machine (default: its accelerator, or cpu), or a card of the catalogue such as
      "a100-40gb": the steps are then traced on a simulated one.
    - `memory`: a budget such as "16GiB" (default: what is free); `margin`: the share of it to keep free.
    - `limit`: the largest size of interest.
    - `shapes`: arguments of the workload's batch; a list of values gives a table.
    - `start`, `scale`: grow by half from this size, or from a share of `limit` that depends on the shape.
    - `powers_of_two`: try no other sizes. `max_trials`: probes per shape.
    - `evaluate`: find the size for evaluation too.
    - `accumulation`, `clip_norm`: micro-batches per optimizer step, and the gradient norm that it clips to.
    - `devices`, `allocator`, `context`: on a simulated card, one of N ranks with the workload's own `wrap`,
      settings as in PYTORCH_ALLOC_CONF, and what CUDA takes of it on your machine, such as "1.2GiB".
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
        context=context,
        isolate=isolate,
        cache=cache,
    )
    say = progress or (lambda _: None)
    if isinstance(work, Program):
        return work.answer_fit(request, say)  # type: ignore[no-any-return]
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
    card = card_named(request.on, memory=request.memory, context=request.context) if request.is_on_card else None
    is_traced = card is not None or in_children
    accelerator = None if is_traced else _accelerator(request.on)
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
        rows = tuple(add_peaks(replace(row, source="predicted", ranks=devices)) for row in fit.shapes)
        predicted = add_peaks(replace(fit, source="predicted", shapes=rows, ranks=devices))
        return add_time_note(predicted, prober.times)

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
        job, request = replace(task.job, on=session.own_device(task.job.on)), task.request
        budget = open_budget(job.on, request.memory, margin=request.margin, sharers=session.place.local_world_size)
        job = replace(job, limit_bytes=budget.probe_bytes)
        if session.is_alone:
            with _loadable(task.work, job, session) as ready:
                return task.answer(lambda job: task.search(job, InChild(job), budget), ready)
        ranks = Ranks(session)
        least = replace(budget, limit_bytes=ranks.least(budget.limit_bytes))
        task = replace(task, say=session.ticking(task.say))
        with _loadable(task.work, job, session) as ready:
            if session.rank != 0:
                return ranks.follow(ready)
            return ranks.lead(lambda: task.answer(lambda job: task.search(job, InChild(job, ranks), least), ready))


def _accelerator(on: str) -> torch.device | None:
    return None if on == "cpu" else torch.device(on)


def _settle_budget(prober: InProcess | PlainStep, request: FitRequest) -> Budget:
    budget = open_budget(prober.on, request.memory, margin=request.margin, held_bytes=prober.held_bytes)
    prober.limit_bytes = budget.probe_bytes
    return budget


@contextlib.contextmanager
def _loadable(work: Work, job: Job, session: Session) -> Iterator[Job]:
    """Give the job a file to load the workload from, if it has no target."""
    if work.target is not None:
        yield job
        return
    with temporary_folder() as folder:
        session.folders.append(str(folder))
        pickled = folder / "workload"
        try:
            pickled.write_bytes(pickle.dumps(work.workload))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise InvalidInputError(
                f"the workload cannot be handed to another process: {error}.",
                remedy='bw.fit("train.py:workload"), which a child loads by itself; or functions in place of lambdas',
            ) from None
        yield replace(job, pickled=str(pickled))


@dataclass(frozen=True)
class Work:
    """A workload, with the target another process loads it from if there is one; or a plain step."""

    name: str
    workload: Workload | None = None
    target: str | None = None
    step: Step | None = None


def read_work(given: Workload | Step | str) -> Work:
    """Recognise what was handed in, and check it."""
    if isinstance(given, str):
        workload = load_workload(given)
        return Work(workload.name, _check(workload), target=given)
    if isinstance(given, Workload):
        return Work(given.name, _check(given))
    if not callable(given):
        raise InvalidInputError(
            "fit takes a Workload, a function step(n), or a target such as train.py:workload; "
            f"received {shortened(given)}."
        )
    if _takes(given, 1):
        return Work(getattr(given, "__name__", "step"), step=given)
    if not _takes(given, 0):
        raise InvalidInputError(f"a step is called with the number of samples alone; received {shortened(given)}.")
    workload = given()  # type: ignore[call-arg]
    if not isinstance(workload, Workload):
        raise InvalidInputError(
            f"{getattr(given, '__name__', 'the function')}() takes no size, so it should make a Workload; "
            f"it returned {shortened(workload)}.",
            remedy="def step(n): ..., which takes the number of samples",
        )
    return Work(workload.name, _check(workload), target=_target_of(given))


def _target_of(function: Any) -> str | None:
    """Return `path.py:function` for a function that stands at the top of a file; None for any other."""
    module = sys.modules.get(getattr(function, "__module__", ""))
    name = getattr(function, "__qualname__", "")
    file = getattr(module, "__file__", None)
    if file is None or getattr(module, name, None) is not function or not Path(file).is_file():
        return None
    return f"{file}:{name}"


def _takes(function: Any, num_arguments: int) -> bool:
    try:
        inspect.signature(function).bind(*range(num_arguments))
    except TypeError:
        return False
    except ValueError:
        return num_arguments == 1  # some builtins have no signature
    return True


def _check(workload: Workload) -> Workload:
    if workload.data is not None and len(workload.data) == 0:
        raise InvalidInputError("the workload's data is empty: there is no sample to probe with.")
    refuse_spread(workload.model)
    return workload


# Long enough for most sets; a larger one is read as far as this goes.
_SECONDS = 20.0


@dataclass(frozen=True)
class LongestFirst:
    """Numbers of samples, longest first; None if all that were read are equally long, so that any will do."""

    order: tuple[int, ...] | None
    note: str


def longest_first(data: Any, *, most: int, say: Callable[[str], None], seconds: float = _SECONDS) -> LongestFirst:
    """Read the samples and order them by length; at most `most` numbers are returned.

    >>> longest_first([torch.zeros(3), torch.zeros(9), torch.zeros(5)], most=2, say=print).order
    (1, 2)
    """
    say(f"reading {len(data):,} samples for the longest") if len(data) > 1000 else None
    sizes: list[int] = []
    end = time.monotonic() + seconds
    for index in range(len(data)):
        sizes.append(measure_length(data[index]))
        if time.monotonic() > end:
            break
    read = "" if len(sizes) == len(data) else f" of the first {len(sizes):,} of {len(data):,} samples"
    if len(set(sizes)) <= 1:
        return LongestFirst(None, f"all samples read are equally long{read and ','}{read}" if read else "")
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    # Those that were not read come last, so that sizes beyond what was read can still be tried.
    order += range(len(sizes), len(data))
    return LongestFirst(tuple(order[:most]), f"the longest samples{read} were probed")


def measure_length(sample: Any) -> int:
    """Count the numbers in a sample: elements of tensors and arrays, entries of lists, characters of texts.

    >>> measure_length({"ids": torch.zeros(4, 2), "text": "abc", "label": 1})
    12
    """
    return sum(_count(leaf) for leaf in tree_leaves(dict(sample) if isinstance(sample, Mapping) else sample))


def _count(leaf: Any) -> int:
    if isinstance(leaf, torch.Tensor):
        return leaf.numel()
    size = getattr(leaf, "size", None)
    if isinstance(size, int):
        return size  # a numpy array
    if isinstance(size, tuple):
        return int(torch.Size(size).numel())  # an image
    return len(leaf) if isinstance(leaf, str | bytes) else 1
