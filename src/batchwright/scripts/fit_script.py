"""The largest micro-batch of the user's own program, found by running it again with other numbers.

Promises:
- the search, its budget, its tables and its result are those of a workload; only the prober is another;
- a size at which the program fails, where it runs with more samples, is too small and passed over;
- no size is an answer for which the program has not enough samples: the search ends at those that its loader draws
  from, or at those that the model received at most;
- the option that was turned is named, and that the model's inputs follow it was seen;
- on a simulated card the answer is predicted, not certified.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from batchwright.catalogue.cards import context_of, names_a_card
from batchwright.device.outcome import Outcome
from batchwright.errors import InvalidInputError
from batchwright.fitting.fit_result import Fit, Restored
from batchwright.fitting.probers import Budget, add_time_note, budget_on, open_budget
from batchwright.fitting.run_search import Cap, Cause, find_cap, fit_shapes
from batchwright.memory.on_card import card_named
from batchwright.scripts.command import MICRO_BATCH
from batchwright.scripts.probe import Probes
from batchwright.scripts.recognise import check_that_it_follows, with_recognised_options
from batchwright.scripts.script_run import EXITED, FAILED, FINISHED, OUT_OF_MEMORY, TOO_SMALL, ScriptRun
from batchwright.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from batchwright.fitting.request import FitRequest
    from batchwright.scripts.script import Script
    from batchwright.timing.step_time import NoTime, StepTime

# Settings of `fit` that say something about a workload alone, with what they are by default.
_OF_WORKLOADS = {"evaluate": False, "clip_norm": None, "allocator": None, "isolate": None}
# Ends that are looked at here before they are an error.
_WITHOUT_A_STEP = (TOO_SMALL, FAILED, FINISHED, EXITED)
# At so many sizes the model's inputs must have followed before it means something that they stay behind.
_ENOUGH_TO_FOLLOW = 2


class _BeyondDataError(Exception):
    """A batch was asked for that is larger than all the samples that the program has."""

    def __init__(self, cap: Cap, text: str) -> None:
        super().__init__(text)
        self.cap, self.text = cap, text


class _SizeNotTakenError(Exception):
    """The program failed at a size that is no power of two, and ran at others."""


@dataclass
class ScriptProber:
    """Probes of a program at one size after the other."""

    script: Script
    probes: Probes
    limit_bytes: int | None
    accumulation: int | None
    takes_any_size: bool = True
    """Until it fails between sizes at which it runs."""
    runs: dict[tuple[int, str], ScriptRun] = field(default_factory=dict)
    outcomes: dict[tuple[int, str], Outcome] = field(default_factory=dict)
    times: list[StepTime | NoTime] = field(default_factory=list)
    """What was predicted for each run on a card."""

    where = "the program itself, in a process of its own for each probe"

    @property
    def on(self) -> str:
        """The device."""
        return self.probes.on

    def probe(self, micro_batch: int, shape: Mapping[str, Any]) -> Outcome:
        """Run the program at a size until its second optimizer step; a size that has run is not run again."""
        key = micro_batch, str(shape)
        if key not in self.outcomes:
            self.outcomes[key] = self._probe(micro_batch, shape)
        return self.outcomes[key]

    def _probe(self, micro_batch: int, shape: Mapping[str, Any]) -> Outcome:
        command = self.script.at(micro_batch, accumulation=self.accumulation, shape=shape)
        runs = {size: run for (size, at), run in self.runs.items() if at == str(shape)}
        # A top-5 accuracy among two samples, say: what fails below all sizes that ran wants more samples.
        may_fail = micro_batch == 1 or (
            not any(size < micro_batch and run.was_cut for size, run in runs.items())
            and any(size > micro_batch and run.end != FAILED for size, run in runs.items())
        )
        tolerated = (TOO_SMALL, FAILED) if may_fail else (TOO_SMALL,)
        # A run at one sample does not show that the loader follows.
        self._check_that_data_suffice(micro_batch, {size: seen for size, seen in runs.items() if size > 1})
        run = self.probes.run(command, limit_bytes=self.limit_bytes, tolerated=_WITHOUT_A_STEP)
        # A loader that drops what is no whole batch had none if its samples are too few: the program fails or ends.
        self._check_that_data_suffice(micro_batch, {micro_batch: run})
        if not run.was_cut and run.end not in (OUT_OF_MEMORY, *tolerated):
            is_power_of_two = micro_batch & (micro_batch - 1) == 0
            if run.end == FAILED and self.takes_any_size and not is_power_of_two and _has_run(runs.values()):
                raise _SizeNotTakenError(f"micro-batch {micro_batch} failed: {run.error}")
            self.probes.refuse(run, command)
        self._check_that_all_are_received(micro_batch, {**runs, micro_batch: run})
        self.runs[micro_batch, str(shape)] = run
        seconds = run.window_seconds[-1] if run.window_seconds and self.on == "cpu" else None
        if names_a_card(self.on) and (card := card_named(self.on)) is not None:
            time = run.time_on(card, devices=self.probes.devices_of(command))
            self.times.append(time)
            seconds = getattr(time, "seconds", None)
        check_that_it_follows(
            self.script, {size: seen for (size, shape_of), seen in self.runs.items() if shape_of == str(shape)}
        )
        return Outcome(
            micro_batch,
            dict(shape),
            "fits" if run.was_cut else "failed" if run.end in tolerated else "out_of_memory",
            run.peak_bytes if run.was_cut or names_a_card(self.on) else None,
            seconds=run.seconds,
            step_seconds=seconds,
            accumulation=run.accumulation or 1,
            rule="the program's own error" if run.end == OUT_OF_MEMORY else None,
            is_too_small=run.end in tolerated,
            error=run.error or None,
        )

    def _check_that_data_suffice(self, micro_batch: int, runs: Mapping[int, ScriptRun]) -> None:
        """Raise if the loader that the program trained on, in one of the runs, has not so many samples."""
        for size, run in runs.items():
            batch, num_samples = run.trained_loader or (0, 0)
            if size in (batch, batch * self.probes.devices):
                most = num_samples * size // batch
                if 0 < most < micro_batch:
                    text = f"the program's loader draws from {counted(most, 'sample')}: none larger is tried"
                    raise _BeyondDataError(Cap(most, Cause.DATASET), text)

    def _check_that_all_are_received(self, micro_batch: int, runs: Mapping[int, ScriptRun]) -> None:
        """Raise if the model's inputs followed the size, and now stay behind: a program may slice its own data."""
        received = {size: run.batch_size or 0 for size, run in runs.items() if size > 1 or run.batch_size == 1}
        smaller = [size for size in received if size < micro_batch]
        per_sample = {received[size] / size for size in smaller}
        if len(smaller) < _ENOUGH_TO_FOLLOW:
            return
        most = 0
        if len(per_sample) == 1 and (received_per_sample := min(per_sample)).is_integer():
            if received[micro_batch] < received_per_sample * micro_batch:
                most = received[micro_batch] // int(received_per_sample)
        elif received[micro_batch] == runs[micro_batch].num_samples:
            most = received[micro_batch]  # drawn one by one, as for privacy: about as many as asked for, and now all
        if 0 < most < micro_batch:
            text = f"the model receives {counted(most, 'sample')} at most: none larger is tried"
            raise _BeyondDataError(Cap(most, Cause.RECEIVED), text)

    def restored(self) -> Restored:
        """Nothing of the user's was changed."""
        return Restored(
            ("everything",), untouched="the program ran in processes of its own, its files in a scratch folder"
        )


def fit_script(script: Script, request: FitRequest, say: Callable[[str], None]) -> Fit:
    """Find the largest micro-batch at which a program runs, at each shape."""
    given = [name for name, default in _OF_WORKLOADS.items() if getattr(request, name) != default]
    if given:
        raise InvalidInputError(f"{', '.join(given)} cannot be used with a bw.Script.")
    budget, probe_bytes = _budget(request)
    with Probes(script, request.on, devices=request.devices) as probes:
        script, notes = with_recognised_options(probes, (MICRO_BATCH,), shape=request.shapes[0], say=say)
        accumulation = request.accumulation if script.sets_accumulation else None
        takes_any_size = not (request.powers_of_two or request.scale or request.start)
        prober = ScriptProber(script, probes, probe_bytes, accumulation, takes_any_size)
        search = partial(fit_shapes, prober=prober, budget=budget, name=script.name, say=_saying_once(say))
        cap = find_cap(request)
        answer = None
        while answer is None:
            try:
                answer = search(request, cap=cap)
            except _BeyondDataError as beyond:  # what has run is not run again
                say(beyond.text)
                cap = beyond.cap
            except _SizeNotTakenError as error:
                notes = (*notes, f"{error}: only powers of two were tried from there on")
                say(notes[-1])
                prober.takes_any_size, request = False, replace(request, powers_of_two=True)

    def with_command(fit: Fit) -> Fit:
        if fit.micro_batch is None:
            return fit
        run = prober.runs[fit.micro_batch, str(fit.shape)]
        command = script.at(fit.micro_batch, accumulation=accumulation, shape=fit.shape)
        typed = f"type: {command}"
        if command.loader_sizes is not None:
            typed = f"in {script.name}: DataLoader(batch_size={fit.micro_batch}), where it is {command.loader_sizes[0]}"
        source = "predicted" if request.is_on_card else "measured"
        return replace(fit, notes=(*notes, typed, *fit.notes, *run.notes), source=source)

    return add_time_note(replace(with_command(answer), shapes=tuple(map(with_command, answer.shapes))), prober.times)


def _has_run(runs: Iterable[ScriptRun]) -> bool:
    return any(run.was_cut for run in runs)


def _saying_once(say: Callable[[str], None]) -> Callable[[str], None]:
    """Say what was not said before."""
    texts: set[str] = set()

    def say_once(text: str) -> None:
        if text not in texts:
            texts.add(text)
            say(text)

    return say_once


def _budget(request: FitRequest) -> tuple[Budget, int | None]:
    """Return the bytes that the search fills, and what a probe is told of them."""
    if not request.is_on_card:
        budget = open_budget(request.on, request.memory, margin=request.margin)
        return budget, budget.probe_bytes
    card = card_named(request.on, memory=request.memory)
    assert card is not None
    budget = budget_on(card, request.margin)
    assert budget.probe_bytes is not None
    # What a margin leaves, and CUDA's own share.
    return budget, budget.probe_bytes + context_of(card).typical_bytes if request.memory or request.margin else None
