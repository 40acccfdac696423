"""The largest micro-batch of the user's own program, found by running it again with other numbers.

Promises:
- the search, its budget, its tables and its result are those of a workload; only the prober is another;
- a size at which the program fails, where it runs with more samples, is too small and passed over;
- the option that was turned is named, and that the model's inputs follow it was seen;
- on a simulated card the answer is predicted, not certified.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from batchwright.catalogue.cards import context_of, names_a_card
from batchwright.device.outcome import Outcome
from batchwright.errors import InvalidInputError
from batchwright.fitting.driver import find_cap, fit_shapes
from batchwright.fitting.fit_result import Fit, Restored
from batchwright.fitting.probers import Budget, budget_on, open_budget
from batchwright.memory.on_card import card_named
from batchwright.scripts.command import MICRO_BATCH
from batchwright.scripts.probe import Probes
from batchwright.scripts.recognise import check_that_it_follows, with_recognised_options
from batchwright.scripts.script_run import FAILED, OUT_OF_MEMORY, TOO_SMALL, ScriptRun

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from batchwright.fitting.request import FitRequest
    from batchwright.scripts.script import Script

# Settings of `fit` that say something about a workload alone, with what they are by default.
_OF_WORKLOADS = {"evaluate": False, "clip_norm": None, "allocator": None, "isolate": None}


@dataclass
class ScriptProber:
    """Probes of a program at one size after the other."""

    script: Script
    probes: Probes
    limit_bytes: int | None
    accumulation: int | None
    runs: dict[tuple[int, str], ScriptRun] = field(default_factory=dict)

    where = "the program itself, in a process of its own for each probe"

    @property
    def on(self) -> str:
        """The device."""
        return self.probes.on

    def probe(self, micro_batch: int, shape: Mapping[str, Any]) -> Outcome:
        """Run the program at a size until its second optimizer step."""
        command = self.script.at(micro_batch, accumulation=self.accumulation, shape=shape)
        runs = {size: run for (size, at), run in self.runs.items() if at == str(shape)}
        # A top-5 accuracy among two samples, say: what fails below all sizes that ran wants more samples.
        may_fail = micro_batch == 1 or (
            not any(size < micro_batch and run.was_cut for size, run in runs.items())
            and any(size > micro_batch and run.end != FAILED for size, run in runs.items())
        )
        tolerated = (TOO_SMALL, FAILED) if may_fail else (TOO_SMALL,)
        run = self.probes.run(command, limit_bytes=self.limit_bytes, tolerated=tolerated)
        self.runs[micro_batch, str(shape)] = run
        check_that_it_follows(
            self.script, {size: seen for (size, shape_of), seen in self.runs.items() if shape_of == str(shape)}
        )
        return Outcome(
            micro_batch,
            dict(shape),
            "fits" if run.was_cut else "failed" if run.end in tolerated else "out_of_memory",
            run.peak_bytes if run.was_cut or names_a_card(self.on) else None,
            seconds=run.seconds,
            step_seconds=run.window_seconds[-1] if run.window_seconds and self.on == "cpu" else None,
            accumulation=run.accumulation or 1,
            rule="the program's own error" if run.end == OUT_OF_MEMORY else None,
            is_too_small=run.end in tolerated,
            error=run.error or None,
        )

    def restored(self) -> Restored:
        """Nothing of the user's was changed."""
        return Restored(
            ("everything",), untouched="the program ran in processes of its own, its files in a scratch folder"
        )


def fit_script(script: Script, request: FitRequest, say: Callable[[str], None]) -> Fit:
    """Find the largest micro-batch at which a program runs, at each shape."""
    given = [name for name, default in _OF_WORKLOADS.items() if getattr(request, name) != default]
    if given:
        raise InvalidInputError(f"{', '.join(given)}: for a workload, and a program of your own was given.")
    budget, probe_bytes = _budget(request)
    with Probes(script, request.on, devices=request.devices) as probes:
        script, notes = with_recognised_options(probes, (MICRO_BATCH,), shape=request.shapes[0], say=say)
        accumulation = request.accumulation if script.sets_accumulation else None
        prober = ScriptProber(script, probes, probe_bytes, accumulation)
        answer = fit_shapes(request, prober, budget, cap=find_cap(request), name=script.name, say=say)

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

    return replace(with_command(answer), shapes=tuple(map(with_command, answer.shapes)))


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
