"""The ways to run a probe: in this process on live objects, in a fresh process, or traced on a simulated card.

Promises:
- in this process, everything that is the user's comes back after each probe, however it ended;
- a plain step is called once per probe;
- a fresh process is never a fork: one that has run torch cannot be forked safely. It loads the target itself and runs
  under the limit; one that is killed or crashes is an outcome, not an error of ours, one that somebody ends is neither
  an outcome nor the user's mistake; an interrupt ends it too;
- on a simulated card the search is the same as on a real device, and so is what ends it: `torch.OutOfMemoryError`;
  nothing runs there, so nothing is certified and nothing of the user's is touched.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from batchwright.catalogue.cards import context_of
from batchwright.device.device import open_device, open_limited
from batchwright.device.host import clear_kernel_buffers, live_bytes
from batchwright.device.out_of_memory import find_rule
from batchwright.device.outcome import Outcome, judge
from batchwright.device.process_memory import PINNED_ENVIRONMENT, give_back
from batchwright.device.step import StepSettings, build_model, build_optimizers, build_scaler
from batchwright.errors import BatchwrightError, NothingFitsError
from batchwright.fitting.budget import Budget, FirstCosts
from batchwright.fitting.fit_result import Restored
from batchwright.fitting.messages import CRASHED, STOPPED, ProbeReport
from batchwright.fitting.work import refuse_spread
from batchwright.memory.estimate import without_torchs_own_log
from batchwright.memory.on_card import upper_on_card
from batchwright.simulated.card import SimulatedCard
from batchwright.state.held_objects import held_objects
from batchwright.state.interrupts import temporary_folder, uninterrupted
from batchwright.state.untouched import BEYOND_REACH
from batchwright.trace.run import trace_workload
from batchwright.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from batchwright.catalogue.cards import Card
    from batchwright.fitting.fit_result import Fit
    from batchwright.fitting.messages import Job
    from batchwright.fitting.request import FitRequest
    from batchwright.fitting.work import Step
    from batchwright.simulated.allocator.settings import AllocatorSettings
    from batchwright.state.untouched import Keep
    from batchwright.workload import Workload


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
    """Each probe in a fresh process that loads the workload by itself."""

    job: Job
    where: str = "each probe in a process of its own"

    @property
    def on(self) -> str:
        """The device."""
        return self.job.on

    def probe(self, micro_batch: int, shape: Mapping[str, Any]) -> Outcome:
        """Run one probe."""
        return probe_in_child(replace(self.job, micro_batch=micro_batch, shape=dict(shape)))

    def restored(self) -> Restored:
        """Nothing of this process was touched."""
        return Restored(("everything, as the probes ran in processes of their own",), ())


# How often a parent looks whether its child has ended.
_POLL_SECONDS = 0.02
# Signals that end a process if memory cannot be had and nobody checked: no null check, an exception in a thread.
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
# Signals that somebody else sends to have a process end.
_FROM_OUTSIDE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass
class Child:
    """One running probe."""

    job: Job
    folder: Path
    process: subprocess.Popen[bytes]
    started: float

    @staticmethod
    def start(job: Job, folder: Path) -> Child:
        """Start a process that runs the job; its files are put into the folder, which must be empty."""
        (folder / "job.json").write_text(json.dumps(job.to_dict()))
        # Its own session: Ctrl-C at the terminal reaches us alone, and we end the child and all that it started.
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "batchwright.fitting.child", str(folder / "job.json"), str(folder / "answer")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **PINNED_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
                start_new_session=True,
            )
        return Child(job, folder, process, time.perf_counter())

    def has_ended(self) -> bool:
        """Whether the process is gone."""
        return self.process.poll() is not None

    def kill(self) -> None:
        """End it and everything it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def outcome(self) -> Outcome:
        """Read how it ended."""
        answer = self.folder / "answer"
        if answer.exists():
            return ProbeReport.from_dict(json.loads(answer.read_text())).unwrap()
        return self._died()

    def _died(self) -> Outcome:
        code = self.process.returncode
        output = (self.folder / "log").read_text(errors="replace")[-4000:].strip()
        job = self.job
        ended = Outcome(
            job.micro_batch,
            job.shape,
            "failed",
            None,
            time.perf_counter() - self.started,
            accumulation=job.accumulation,
        )
        rule = find_rule(RuntimeError(output))
        if code == -signal.SIGKILL:
            message = "the process was killed, as the system does when memory runs out"
            return replace(ended, verdict="out_of_memory", rule="killed", error=message)
        if rule is not None and code != 0:
            return replace(ended, verdict="out_of_memory", rule=rule.name, error=output.splitlines()[-1])
        if -code in _CRASHES and job.limit_bytes is not None:
            name = signal.Signals(-code).name
            message = f"the process ended by {name} under its limit"
            doubt = "a crash that has nothing to do with memory ends the same way"
            return replace(
                ended, verdict="out_of_memory", rule=CRASHED, error=message, doubt=doubt, traceback=output or None
            )
        if -code in _FROM_OUTSIDE:
            raise BatchwrightError(
                f"the process that ran micro-batch {job.micro_batch:,} was ended by {signal.Signals(-code).name}: that "
                "says nothing of your step or of the memory.",
                remedy="the same again, once whatever ends processes here (a scheduler, a time limit) lets it run",
            )
        message = f"the process ended with code {code} and no answer"
        return replace(ended, error=message, traceback=f"{output}\n{message}".strip())


def probe_in_child(job: Job, *, until: Callable[[], bool] | None = None) -> Outcome:
    """Run one probe in a fresh process and wait for its end; `until` may say that waiting has no point any more."""
    with temporary_folder() as folder:
        child: Child | None = None
        try:
            with uninterrupted():
                child = Child.start(job, folder)
            while not child.has_ended():
                if until is not None and until():
                    child.kill()
                    return replace(child.outcome(), verdict="failed", rule=STOPPED, error="stopped from outside")
                time.sleep(_POLL_SECONDS)
        finally:
            if child is not None and not child.has_ended():
                with uninterrupted():
                    child.kill()
        return child.outcome()


class InProcess:
    """Probes of a workload in this process; what is live in it is restored."""

    where = "in this process"

    def __init__(self, workload: Workload, keep: Keep, request: FitRequest) -> None:
        open_device(request.on)
        self._keep = keep
        self._request = request
        try:
            _meet_live_parts(workload)
        finally:
            keep.restore()
        for thing in keep.live:
            if isinstance(thing, nn.Module):
                refuse_spread(thing)
        self._workload = workload
        self.on = request.on
        self.held_bytes = live_bytes(keep.live)
        self._costs = FirstCosts()
        self.limit_bytes: int | None = None

    def probe(self, micro_batch: int, shape: Mapping[str, Any]) -> Outcome:
        """Run one probe."""
        device = open_limited(self.on, self.limit_bytes, held_bytes=self.held_bytes + self._costs.charged_bytes)
        with self._costs.learnt():
            settings = StepSettings(shape, self._request.accumulation, self._request.clip_norm)
            return device.probe(self._workload, micro_batch, settings)

    def restored(self) -> Restored:
        """What was restored."""
        return Restored(self._keep.covered, (*self._keep.not_kept, BEYOND_REACH))

    def give_back(self) -> None:
        """Put everything back once more, and give free memory to the system."""
        self._keep.restore()
        clear_kernel_buffers()
        give_back()


class PlainStep:
    """Probes of a function of n that trains by itself; what of its state can be found is restored."""

    where = "in this process"

    def __init__(self, step: Step, keep: Keep, *, on: str, state: Iterable[Any] = ()) -> None:
        open_device(on)
        self._step, self._keep = step, keep
        self._has_worked: bool | None = None
        given = list(state)
        reached = [thing for thing in held_objects(step).values() if not any(thing is own for own in given)]
        for thing in (*given, *reached):
            if isinstance(thing, nn.Module):
                refuse_spread(thing)
        self._has_state = len(keep.refused) < len(given) + len(reached)
        self.on = on
        self.held_bytes = live_bytes([*given, *reached])
        self._costs = FirstCosts()
        self.limit_bytes: int | None = None

    def probe(self, micro_batch: int, shape: Mapping[str, Any]) -> Outcome:
        """Call the step once."""
        device = open_limited(self.on, self.limit_bytes, held_bytes=self.held_bytes + self._costs.charged_bytes)
        with self._costs.learnt():
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
        unknown = (
            () if self._has_state else ("a model or optimizer that the step reaches: none was found, hand in state=",)
        )
        return Restored(self._keep.covered, (*unknown, *self._keep.not_kept, BEYOND_REACH))

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


def _meet_live_parts(workload: Workload) -> None:
    """Build model, optimizer and scaler once, so that what lives on outside of a probe is known before the first."""
    model = build_model(workload, torch.device("cpu"))
    build_optimizers(workload, model)
    build_scaler(workload)


class OnSimulatedCard:
    """Probes of a workload on one card of the catalogue."""

    where = "on a simulated card: traced, not run"

    def __init__(
        self, workload: Workload, card: Card, settings: AllocatorSettings, request: FitRequest, *, devices: int
    ) -> None:
        self._workload = workload
        self._card = card
        self._settings = settings
        self._request = request
        self._devices = devices

    @property
    def on(self) -> str:
        """The card."""
        return self._card.name

    def probe(self, micro_batch: int, shape: Mapping[str, Any]) -> Outcome:
        """Trace full steps on the card."""
        card = SimulatedCard(self._card, self._settings)
        accumulation = self._request.accumulation

        def run() -> tuple[float, ...]:
            with without_torchs_own_log():
                settings = StepSettings(shape, accumulation, self._request.clip_norm, devices=self._devices)
                trace_workload(self._workload, micro_batch, settings, card=card)
            return (0.0,)

        outcome = judge(
            run, micro_batch=micro_batch, shape=shape, accumulation=accumulation, peak=lambda: card.peak_bytes
        )
        return replace(outcome, step_seconds=None)

    def restored(self) -> Restored:
        """Nothing ran, so nothing was changed."""
        return Restored(("everything, as nothing ran",), ())


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


def add_margin(fit: Fit, card: Card) -> Fit:
    """Add a note with the three peaks at the answer, and what they are with their margin."""
    peaks = fit.peak_bytes
    if peaks is None or peaks.allocated is None or peaks.reserved is None:
        return fit
    upper = upper_on_card(peaks, context_of(card))
    listed = ", ".join(
        f"{name} {format_bytes(peak or 0)} ({format_bytes(bound or 0)})"
        for name, peak, bound in (
            ("allocated", peaks.allocated, upper.allocated),
            ("reserved", peaks.reserved, upper.reserved),
            ("device", peaks.device, upper.device),
        )
    )
    return replace(fit, notes=(*fit.notes, f"predicted peaks, and with a margin: {listed}"))
