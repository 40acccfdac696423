"""The ways to run a probe, and how many bytes it may take.

A probe runs in this process, in a fresh one, in one of each rank, or is traced on a simulated card.

A process group with one rank stuck in a collective cannot be recovered from within. So the ranks that torchrun
started never run a step: each starts a child, the children form a group with a rendezvous of their own, and when one
of them ends badly the others are ended from outside.

Promises:
- a budget is never more than was asked for, and never so much that the kernel would kill a process for it; what an
  earlier step in this process has paid once is charged to every probe;
- in this process, everything that is the user's comes back after each probe, however it ended;
- a plain step is called once per probe;
- of several ranks rank 0 leads: it searches, the others run what it asks for, and all return the same answer or raise
  the same error;
- out of memory, an exception or a dead child on one rank ends the probe on all of them within a second;
- a child that hangs while others wait for it is found by the session of the children, a leader by that of the ranks;
- on a simulated card the search is the same as on a real device, and so is what ends it: `torch.OutOfMemoryError`;
  nothing runs there, so nothing is certified and nothing of the user's is touched;
- a live model that is already spread over ranks is refused, with the reason.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from batchwright.catalogue.cards import Card, context_of
from batchwright.device.device import open_device, open_limited
from batchwright.device.host import (
    HostDevice,
    can_limit,
    clear_kernel_buffers,
    give_back,
    holes_filled,
    live_bytes,
    read_memory,
    room_under_the_limit,
)
from batchwright.device.outcome import Outcome, judge
from batchwright.device.step import Device, StepSettings, build_model, build_optimizers, build_scaler
from batchwright.errors import (
    BatchwrightError,
    InvalidInputError,
    NothingFitsError,
    RankFailedError,
    StepFailedError,
)
from batchwright.fitting.fit_result import Fit, Restored
from batchwright.fitting.probe_process import STOPPED, Instruction, Job, ProbeReport, Rendezvous, probe_in_child
from batchwright.memory.estimate import without_torchs_own_log
from batchwright.ranks.meeting import failure_of, is_consequence
from batchwright.simulated.card import SimulatedCard
from batchwright.state.held_objects import held_objects
from batchwright.state.untouched import BEYOND_REACH, Keep
from batchwright.timing.on_card import time_on
from batchwright.timing.step_time import NoTime, StepTime
from batchwright.trace.run import trace_workload
from batchwright.units import PeakBytes, format_bytes, parse_bytes

if TYPE_CHECKING:
    from batchwright.fitting.request import FitRequest
    from batchwright.ranks.session import Session
    from batchwright.simulated.allocator.settings import AllocatorSettings
    from batchwright.workload import Workload

Step = Callable[[int], Any]

_DEFAULT_STACK_BYTES = 8 * 2**20


class FirstCosts:
    """Bytes that a process takes once, with its first step: stacks of threads, tables that kernels keep.

    A fresh process pays them inside its budget. One that has run before has paid already, and would find a larger size
    than a fresh one can run. So they are charged to every probe: stacks that exist when the search begins, and what
    the first probe leaves behind.
    """

    def __init__(self) -> None:
        self.charged_bytes = _stacks_of_torchs_threads()
        self._is_known = False

    @contextmanager
    def learnt(self) -> Iterator[None]:
        """Run the first probe in here: what it leaves behind is charged to the next ones."""
        if self._is_known:
            yield
            return
        before = _held_bytes()
        yield
        self.charged_bytes += max(0, _held_bytes() - before)
        self._is_known = True


def _held_bytes() -> int:
    gc.collect()
    clear_kernel_buffers()
    with holes_filled() as free_bytes:
        reading = read_memory()
    return 0 if reading is None else reading.data - free_bytes


def _stacks_of_torchs_threads() -> int:
    """Stacks of threads that torch has started already; one of somebody else's has nothing to do with a step."""
    tasks = Path("/proc/self/task")
    if sys.platform != "linux" or not tasks.is_dir():
        return 0
    import resource

    size = resource.getrlimit(resource.RLIMIT_STACK)[0]
    size = _DEFAULT_STACK_BYTES if size == resource.RLIM_INFINITY else size
    return min(len(os.listdir(tasks)) - 1, torch.get_num_threads() - 1) * size


# Left to everything else on the machine, of what is free.
_KEPT_SHARE, _KEPT_BYTES = 0.05, 256 * 2**20


@dataclass(frozen=True)
class Budget:
    """Bytes there are, and the fewer that a probe may take so that the margin stays free."""

    limit_bytes: int | None
    margin: float = 0.0
    notes: tuple[str, ...] = ()
    was_asked: bool = False
    is_tight: bool = True
    """Somebody set it, or a card has it: it is meant to be filled. Not so the free memory of a whole machine."""
    is_host: bool = False
    """It is main memory, of which two runs of one step never take quite the same."""

    @property
    def probe_bytes(self) -> int | None:
        """What a probe is held to."""
        return None if self.limit_bytes is None else int(self.limit_bytes * (1 - self.margin))


def open_budget(
    on: str, memory: str | int | None, *, margin: float = 0.0, held_bytes: int = 0, sharers: int = 1
) -> Budget:
    """Settle the bytes for a device: the amount asked for, or what is free.

    `held_bytes` are those of a live model: they belong to a budget, and so add to what is free. `sharers` ranks on
    one machine share what is free in its memory.

    >>> open_budget("cpu", "64MiB", margin=0.05).probe_bytes // 2**10
    62259
    """
    if not 0 <= margin < 1:
        raise InvalidInputError(f"margin must be at least 0 and below 1, such as 0.05; received {margin!r}.")
    wanted = None if memory is None else parse_bytes(memory)
    was_asked = wanted is not None
    device = open_device(on)
    free = device.free_bytes
    notes: list[str] = []
    if isinstance(device, HostDevice):
        # The machine's memory is shared by its ranks; a limit that somebody set (ulimit -d, a batch system) is on each.
        room = room_under_the_limit()
        if free is not None:
            free = max(1, free - max(int(free * _KEPT_SHARE), _KEPT_BYTES)) // sharers
        is_limited = room is not None and (free is None or room < free)
        free = room if is_limited else free
        free = None if free is None else free + held_bytes
        if is_limited and free is not None and (wanted is None or wanted > free):
            notes.append(f"the memory of this process is limited (ulimit -d), which leaves {format_bytes(free)}")
        if not can_limit():
            notes.append("this system keeps no limit on memory: the bytes of tensors were counted instead")
    if wanted is not None and free is not None and wanted > free:
        notes.append(f"{format_bytes(wanted)} were requested, but only {format_bytes(free)} are available here")
        wanted = free
        was_asked = False
    is_tight = wanted is not None or on != "cpu" or room_under_the_limit() is not None
    limit = free if wanted is None else wanted
    return Budget(limit, margin, tuple(notes), was_asked, is_tight, is_host=isinstance(device, HostDevice))


class Prober(Protocol):
    """Runs probes of one piece of work."""

    @property
    def on(self) -> str:
        """The device."""

    @property
    def where(self) -> str:
        """Where probes run, in words."""

    def probe(self, micro_batch: int, shape: Mapping[str, Any]) -> Outcome:
        """Run one probe."""

    def restored(self) -> Restored:
        """What was restored."""


@dataclass(frozen=True)
class InChild:
    """Each probe in a fresh process that loads the workload by itself; if there are ranks, in one of each rank."""

    job: Job
    ranks: Ranks | None = None

    @property
    def on(self) -> str:
        """The device, as each rank sees it."""
        return self.job.on

    @property
    def where(self) -> str:
        """Where probes run, in words."""
        processes = "a process" if self.ranks is None else f"{self.ranks.session.world_size} child ranks"
        return f"each probe in {processes} of its own"

    def probe(self, micro_batch: int, shape: Mapping[str, Any]) -> Outcome:
        """Run one probe, on all ranks if there are any."""
        job = replace(self.job, micro_batch=micro_batch, shape=dict(shape))
        return probe_in_child(job) if self.ranks is None else self.ranks.ask(job)

    def restored(self) -> Restored:
        """Nothing of these processes was touched."""
        return Restored(("everything",), untouched="probes ran in subprocesses")


def join_verdicts(reports: Sequence[ProbeReport]) -> Outcome:
    """Join the reports of all ranks: one that does not fit speaks for all; if all fit, the largest peak.

    >>> from batchwright.device.outcome import Outcome
    >>> fits = Outcome(8, {}, "fits", PeakBytes(device=10), seconds=1.0, step_seconds=0.5)
    >>> cut_off = Outcome(8, {}, "failed", None, seconds=2.0, rule="stopped")
    >>> full = Outcome(8, {}, "out_of_memory", None, seconds=2.0, error="no room")
    >>> join_verdicts([ProbeReport(fits), ProbeReport(cut_off), ProbeReport(full)]).error
    'rank 2: no room'

    An error that a rank raised deliberately is raised here. The rank that ran out of memory pulls the others down with
    it: their failures are consequences, and so are those that only tell of a lost peer. If nobody ran out, the first
    to fail is the cause.
    """
    outcomes = {rank: report.outcome for rank, report in enumerate(reports) if report.outcome is not None}
    errors = {rank: report.error for rank, report in enumerate(reports) if report.error is not None}
    full = {rank: outcome for rank, outcome in outcomes.items() if outcome.verdict == "out_of_memory"}
    failed = {rank: end for rank, end in outcomes.items() if end.verdict == "failed" and end.rule != STOPPED}
    causes = {rank: outcome for rank, outcome in failed.items() if not is_consequence(outcome.error or "")}
    if full:
        return _first(full)
    for rank, error in sorted(errors.items(), key=lambda item: isinstance(item[1], RankFailedError)):
        if not isinstance(error, RankFailedError) or not causes:
            raise _of_rank(error, rank)
    if failed:
        return _first(causes or failed)
    slowest = max(outcomes.values(), key=lambda outcome: outcome.step_seconds or 0.0)
    return replace(slowest, peak_bytes=_largest([outcome.peak_bytes for outcome in outcomes.values()]))


def _first(bad: Mapping[int, Outcome]) -> Outcome:
    rank = min(bad, key=lambda rank: bad[rank].seconds)
    outcome = bad[rank]
    return replace(
        outcome,
        error=f"rank {rank}: {outcome.error}" if outcome.error else None,
        traceback=f"rank {rank} raised:\n{outcome.traceback}" if outcome.traceback else None,
    )


def _of_rank(error: BatchwrightError, rank: int) -> BatchwrightError:
    """Return the error with the rank it came from."""
    if isinstance(error, StepFailedError):
        return StepFailedError(f"rank {rank} raised:\n{error.problem}")
    if not isinstance(error, RankFailedError):
        error.add_note(f"(rank {rank})")
    return error


def _largest(peaks: Sequence[PeakBytes | None]) -> PeakBytes | None:
    known = [asdict(peak) for peak in peaks if peak is not None]
    if not known:
        return None
    kinds = {kind: [peak[kind] for peak in known if peak[kind] is not None] for kind in known[0]}
    return PeakBytes(**{kind: max(amounts, default=None) for kind, amounts in kinds.items()})


class Ranks:
    """The ranks that search together."""

    def __init__(self, session: Session) -> None:
        self.session, self.number = session, 0
        self._prefix = session.new_group_prefix()

    def least(self, amount: int | None) -> int | None:
        """Return the smallest amount that any rank has; None if some rank does not know."""
        amounts = self.session.gather(f"{self._prefix}/limit", amount)
        return None if None in amounts else min(amounts)

    def run(self, job: Job) -> Outcome:
        """Run this rank's part of probe `number` and return the verdict of all."""
        session, name = self.session, f"{self._prefix}/probe/{self.number}"
        assert session.address is not None
        meeting = Rendezvous(
            host=session.address.host,
            port=session.address.port,
            prefix=f"{session.prefix}/{name}",
            rank=session.rank,
            world_size=session.world_size,
            local_rank=session.place.local_rank,
        )
        stop = f"{name}/stop"
        with session.delegated():
            try:
                outcome = probe_in_child(replace(job, rendezvous=meeting), until=lambda: session.check(stop))
                report = ProbeReport(outcome)
            except BatchwrightError as error:
                if error.is_printed_elsewhere is not None:
                    raise
                report = ProbeReport(error=error)
            if report.outcome is None or not report.outcome.fits:
                session.store.set(stop, "1")
        rows = session.gather(f"{name}/verdict", report.to_dict())
        return join_verdicts([ProbeReport.from_dict(row) for row in rows])

    def ask(self, job: Job) -> Outcome:
        """Lead: have every rank run this probe."""
        self._publish(Instruction(job=job))
        return self.run(job)

    def lead(self, search: Callable[[], Fit]) -> Fit:
        """Lead: search, and end the search on every rank, with the answer or with the error."""
        try:
            answer = replace(search(), ranks=self.session.world_size)
        except BatchwrightError as error:
            self._publish(Instruction(error=error))
            raise
        except Exception as error:
            self._publish(Instruction(error=StepFailedError(failure_of(error, 0, self.session.where).message)))
            raise
        self._publish(Instruction(answer=answer))
        return answer

    def follow(self, own: Job) -> Fit:
        """Run what rank 0 asks for until it ends the search."""
        while True:
            self.number += 1
            row = json.loads(self.session.wait_for(f"{self._prefix}/ask/{self.number}"))
            instruction = Instruction.from_dict(row)
            if instruction.error is not None:
                raise instruction.error
            if instruction.answer is not None:
                return instruction.answer
            job = instruction.job
            assert job is not None
            self.run(replace(job, target=own.target, pickled=own.pickled, on=own.on, limit_bytes=own.limit_bytes))

    def _publish(self, instruction: Instruction) -> None:
        self.number += 1
        self.session.store.set(f"{self._prefix}/ask/{self.number}", json.dumps(instruction.to_dict()))


class _Here:
    """Probes in this process, of which `held` exists before them; `limit_bytes` holds each of them."""

    where = "in this process"

    def __init__(self, on: str, keep: Keep, held: Sequence[Any]) -> None:
        refuse_spread(*held)
        self.on, self._keep = on, keep
        self.held_bytes = live_bytes(held)
        self._costs = FirstCosts()
        self.limit_bytes: int | None = None

    @contextmanager
    def _device(self) -> Iterator[Device]:
        with self._costs.learnt():
            yield open_limited(self.on, self.limit_bytes, held_bytes=self.held_bytes + self._costs.charged_bytes)

    def restored(self) -> Restored:
        """What was restored."""
        return Restored(self._keep.covered, (*self._keep.not_kept, BEYOND_REACH))


class InProcess(_Here):
    """Probes of a workload in this process; what is live in it is restored."""

    def __init__(self, workload: Workload, keep: Keep, request: FitRequest) -> None:
        open_device(request.on)
        self._workload, self._request = workload, request
        try:
            # Built once, so that what lives on outside of a probe is known before the first.
            model = build_model(workload, torch.device("cpu"))
            build_optimizers(workload, model)
            build_scaler(workload)
        finally:
            keep.restore()
        super().__init__(request.on, keep, keep.live)

    def probe(self, micro_batch: int, shape: Mapping[str, Any]) -> Outcome:
        """Run one probe."""
        settings = StepSettings(shape, self._request.accumulation, self._request.clip_norm)
        with self._device() as device:
            return device.probe(self._workload, micro_batch, settings)

    def give_back(self) -> None:
        """Put everything back once more, and give free memory to the system."""
        self._keep.restore()
        clear_kernel_buffers()
        give_back()


class PlainStep(_Here):
    """Probes of a function of n that trains by itself; what of its state can be found is restored."""

    def __init__(self, step: Step, keep: Keep, *, on: str, state: Sequence[Any] = ()) -> None:
        open_device(on)
        self._step = step
        self._has_worked: bool | None = None
        reached = [thing for thing in held_objects(step).values() if not any(thing is own for own in state)]
        super().__init__(on, keep, [*state, *reached])
        self._has_state = len(keep.refused) < len(state) + len(reached)

    def probe(self, micro_batch: int, shape: Mapping[str, Any]) -> Outcome:
        """Call the step once."""
        with self._device() as device:
            try:
                return device.watch(lambda: self._timed(micro_batch, shape), micro_batch=micro_batch, shape=shape)
            finally:
                self._keep.restore()

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the step."""
        return () if self._has_worked else ("the step ran no operator of torch; all that is known is that it returned",)

    def restored(self) -> Restored:
        """What was restored."""
        restored = super().restored()
        if self._has_state:
            return restored
        unknown = "a model or optimizer that the step reaches: none was found, hand in state="
        return replace(restored, not_covered=(unknown, *restored.not_covered))

    def _timed(self, micro_batch: int, shape: Mapping[str, Any]) -> tuple[float, ...]:
        start = time.perf_counter()
        if self._has_worked is None:
            # Only the first call is looked at: the look costs time, and compiled code would not be compiled under it.
            with _Operators() as operators:  # type: ignore[no-untyped-call]
                self._step(micro_batch, **shape)
            self._has_worked = operators.have_run
        else:
            self._step(micro_batch, **shape)
        return (time.perf_counter() - start,)


class _Operators(TorchDispatchMode):
    """Whether any operator of torch ran."""

    have_run = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.have_run = True
        return func(*args, **(kwargs or {}))


class OnSimulatedCard:
    """Probes of a workload on one card of the catalogue."""

    where = "on a simulated card: traced, not run"

    def __init__(
        self, workload: Workload, card: Card, settings: AllocatorSettings, request: FitRequest, *, devices: int
    ) -> None:
        self._workload, self._request, self._devices = workload, request, devices
        self._card, self._settings = card, settings
        self.on = card.name
        self.times: list[StepTime | NoTime] = []
        """What was predicted for the sizes that were traced."""

    def probe(self, micro_batch: int, shape: Mapping[str, Any]) -> Outcome:
        """Trace full steps on the card."""
        card = SimulatedCard(self._card, self._settings)
        accumulation = self._request.accumulation
        times: list[StepTime | NoTime] = []

        def run() -> tuple[float, ...]:
            with without_torchs_own_log():
                settings = StepSettings(shape, accumulation, self._request.clip_norm, devices=self._devices)
                traced = trace_workload(self._workload, micro_batch, settings, card=card)
                times.append(time_on(self._card, traced.work, micro_batch, settings))
            return (0.0,)

        outcome = judge(
            run, micro_batch=micro_batch, shape=shape, accumulation=accumulation, peak=lambda: card.peak_bytes
        )
        self.times += times
        seconds = times[0].seconds if times and isinstance(times[0], StepTime) else None
        return replace(outcome, step_seconds=seconds)

    def restored(self) -> Restored:
        """Nothing ran, so nothing was changed."""
        return Restored(("everything",), untouched="nothing ran")


def budget_on(card: Card, margin: float) -> Budget:
    """Return what PyTorch can take of a card: all but its context."""
    context = context_of(card).typical_bytes
    total = format_bytes(card.total_bytes)
    if context >= card.total_bytes:
        raise NothingFitsError(
            f"nothing fits into {total} of {card.product}: its CUDA context alone takes {format_bytes(context)}."
        )
    return Budget(
        card.total_bytes - context,
        margin,
        (f"{card.product} has {total}, of which a CUDA context takes {format_bytes(context)}",),
        was_asked=True,
    )


def add_time_note(fit: Fit, times: Sequence[StepTime | NoTime]) -> Fit:
    """Add a note on the seconds: that they are predicted, how far off they may be, and why."""
    known = [time for time in times if isinstance(time, StepTime)]
    if not known:
        reasons = dict.fromkeys(time.reason for time in times if isinstance(time, NoTime))
        return replace(fit, notes=(*fit.notes, *(f"no seconds are predicted: {reason}" for reason in reasons)))
    low, high = min(t.low / t.seconds for t in known), max(t.high / t.seconds for t in known)
    why = "".join(f"; {reason}" for reason in known[-1].unsure)
    note = f"seconds are predicted, and in nine of ten cases between {low:.2f} and {high:.2f} times as many{why}"
    return replace(fit, notes=(*fit.notes, note))


def add_peaks(fit: Fit) -> Fit:
    """Add a note with the three peaks at the answer; their bound is `estimate`'s to give, which sees the parts."""
    peaks = fit.peak_bytes
    if peaks is None or peaks.allocated is None or peaks.reserved is None:
        return fit
    listed = ", ".join(
        f"{name} {format_bytes(peak)}"
        for name, peak in (("allocated", peaks.allocated), ("reserved", peaks.reserved), ("device", peaks.device))
        if peak is not None
    )
    return replace(fit, notes=(*fit.notes, f"predicted peaks: {listed}; `estimate` gives their bound"))


def refuse_spread(*things: Any) -> None:
    """Refuse a live model under DDP or FSDP: one rank out of memory would leave the others waiting for ever."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    models = [thing for thing in things if isinstance(thing, nn.Module)]
    for module in (module for model in models for module in model.modules()):
        if isinstance(module, DistributedDataParallel | FullyShardedDataParallel | FSDPModule):
            raise InvalidInputError(
                f"the model is already spread over ranks ({type(module).__name__}), and a probe that runs out of "
                "memory on one rank leaves the others waiting in a collective that nothing can end.",
                remedy="model=a function that builds it, wrap=lambda model: DDP(model): probes then run in child ranks",
            )
