"""The largest micro-batch of the user's own program, found by running it again with other numbers.

Promises:
- the search, its budget and its result are those of a workload; only the prober is another;
- the option that was turned is named, and that the model's inputs follow it was seen;
- on a simulated card the answer is predicted, not certified.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchwright.catalogue.cards import names_a_card
from batchwright.device.device import default_device
from batchwright.device.outcome import Outcome
from batchwright.errors import InvalidInputError, NothingFitsError
from batchwright.fitting.budget import Budget, open_budget
from batchwright.fitting.driver import Cap, Cause, run_series
from batchwright.fitting.fit_result import Fit, Restored
from batchwright.fitting.probers import budget_on
from batchwright.fitting.search import by_peaks
from batchwright.memory.on_card import card_named
from batchwright.scripts.probe import DEFAULT_SECONDS, ScriptProbe, check_that_it_ran
from batchwright.scripts.script import Script, check_that_it_follows, recognise_option
from batchwright.units import whole_number

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from batchwright.scripts.script_run import ScriptRun

_LARGEST = 2**20
_MOST_TRIALS = 24
# How much the peak of one and the same program differs from run to run on a host.
_NOISE_BYTES = 2**20


@dataclass
class ScriptProber:
    """Probes of a program, each in a process of its own."""

    script: Script
    on: str
    seconds: float
    limit_bytes: int | None
    show_output: bool = False
    runs: dict[int, ScriptRun] = field(default_factory=dict)

    def probe(self, micro_batch: int, shape: Mapping[str, Any] | None = None) -> Outcome:
        """Run the program at a size until its second optimizer step."""
        command = self.script.at(micro_batch, shape=shape)
        probe = ScriptProbe(command, self.on, Path(self.script.cwd), seconds=self.seconds, show_output=self.show_output)
        run = probe.run(limit_bytes=self.limit_bytes)
        check_that_it_ran(run, command, seconds=self.seconds)
        self.runs[micro_batch] = run
        if self.script.batch_option is not None:
            check_that_it_follows(self.script, self.script.batch_option, self.runs)
        return Outcome(
            micro_batch,
            dict(shape or {}),
            "fits" if run.was_cut else "out_of_memory",
            run.peak_bytes if run.was_cut else None,
            seconds=run.seconds,
            step_seconds=run.window_seconds[-1] if run.window_seconds and self.on == "cpu" else None,
            accumulation=run.accumulation or 1,
            rule=None if run.was_cut else "the program's own error",
            error=run.error or None,
        )


def fit_script(
    script: Script,
    *,
    on: str | None = None,
    memory: str | int | None = None,
    limit: int | None = None,
    shape: Mapping[str, Any] | None = None,
    margin: float = 0.0,
    max_trials: int = _MOST_TRIALS,
    seconds: float = DEFAULT_SECONDS,
    show_output: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Fit:
    """Find the largest micro-batch at which a program runs.

    Args:
        script: the program as it is typed; {micro_batch}, or its batch option, is turned.
        on: cpu, or a card of the catalogue, which is simulated. Default: the accelerator here, else cpu.
        memory: a budget: of the process on the host, of the card on a card.
        limit: the largest micro-batch of interest.
        shape: values of further placeholders.
        margin: the share of the budget that stays free.
        max_trials: the most probes.
        seconds: the longest that one probe may take.
        show_output: show what the program prints, on stderr.
        progress: called with what is being done.
    """
    say = progress or (lambda _: None)
    place = on or default_device()
    budget, probe_memory = _budget(place, memory, margin)
    cap = Cap(_LARGEST, Cause.LARGEST) if limit is None else Cap(whole_number(limit, "limit"), Cause.LIMIT)
    notes: list[str] = []
    if not script.sets_micro_batch:
        script = _with_recognised_option(script, place, seconds, say)
        notes.append(f"{script.batch_option} of the program sets its micro-batch: the model's inputs follow it")
    prober = ScriptProber(script, place, seconds, probe_memory, show_output)
    assert budget.probe_bytes is not None
    series = run_series(
        by_peaks(cap.size, budget.probe_bytes, noise=_NOISE_BYTES if place == "cpu" else 0),
        lambda size: prober.probe(size, shape),
        cap=cap,
        max_trials=whole_number(max_trials, "max trials"),
        say=say,
    )
    if series.micro_batch is None:
        raise NothingFitsError(
            f"{script.name} does not run on {place} even at micro-batch {min(prober.runs)}.",
            details=[run.error for run in prober.runs.values() if run.error][:1],
            remedy="a larger card or budget; batchwright advise oom lists what saves memory",
        )
    at_answer = prober.runs[series.micro_batch]
    return Fit(
        name=script.name,
        on=place,
        micro_batch=series.micro_batch,
        limit=cap.size,
        limit_bytes=budget.limit_bytes,
        trials=series.trials,
        next_size=series.next_size,
        reason=series.reason,
        shape=dict(shape or {}),
        restored=Restored(("everything: the program ran in processes of its own, its files in a scratch folder",)),
        where="the program itself, in a process of its own for each probe",
        notes=(*notes, f"type: {script.at(series.micro_batch, shape=shape)}", *budget.notes, *at_answer.notes),
        source="measured" if place == "cpu" else "predicted",
    )


def _budget(place: str, memory: str | int | None, margin: float) -> tuple[Budget, int | None]:
    """Return the bytes that the search fills, and what a probe is told of them."""
    if not names_a_card(place):
        budget = open_budget(place, memory, margin=margin)
        return budget, budget.probe_bytes
    card = card_named(place, memory=memory)
    assert card is not None
    return budget_on(card, margin), None if memory is None else card.total_bytes


def _with_recognised_option(script: Script, place: str, seconds: float, say: Callable[[str], None]) -> Script:
    say("running the program as it is typed, to see which option sets its batch")
    command = script.command
    run = ScriptProbe(command, place, Path(script.cwd), seconds=seconds).run()
    check_that_it_ran(run, command, seconds=seconds)
    option = recognise_option(run)
    if option is None:
        seen = ", ".join(f"{name} {value}" for name, value in run.options.items()) or "none"
        raise InvalidInputError(
            f"no option of {script.name} stands out as its micro-batch; the model receives {run.batch_size} samples.",
            details=[f"options that have to do with a batch: {seen}"],
            remedy="{micro_batch} in its place, as in --batch-size {micro_batch}",
        )
    return replace(script, batch_option=option)
