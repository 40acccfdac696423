"""The last two sections of a run: the plan and the recommendation, from what the others hold."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from batchwright.errors import BatchwrightError, NotExpressibleError
from batchwright.planning.dialects.registry import FRAMEWORKS
from batchwright.tuning.known import Known, critical_from
from batchwright.tuning.other_setups import what_would_change
from batchwright.tuning.rate_advice import learning_rate
from batchwright.tuning.recommendation import Advised, choose, curve
from batchwright.tuning.run_file import is_done

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batchwright.noise.critical_batch import CriticalBatch
    from batchwright.planning.plan import Plan
    from batchwright.tuning.ask import Ask

# Beyond it a line is a rough picture of the step times.
_POOR = 0.15


def advise_run(run: dict[str, Any], ask: Ask) -> None:
    """Write the plan and the recommendation into a run."""
    known = Known(run)
    if known.nothing_fits or (known.micro_batch is None and known.times is None):
        reason = run["fit"]["skipped"] if known.nothing_fits else "neither what fits nor how long a step takes is known"
        run["plan"] = run["recommendation"] = {"skipped": reason}
        return
    critical, origin, note = _critical(run, known)
    try:
        choice = choose(
            known,
            devices=ask.devices,
            effective_batch=ask.effective_batch,
            critical=critical,
            critical_from=origin,
        )
    except BatchwrightError as error:
        run["plan"] = run["recommendation"] = {"skipped": f"failed: {error}"}
        return
    rate = learning_rate(known, choice)
    advised = Advised(
        name=run["workload"]["name"],
        on=ask.on,
        choice=choice,
        learning_rate=rate,
        seconds_per_step=known.step_seconds(choice.plan),
        time_to_target=curve(choice),
        changes=what_would_change(known, choice, keeps_batch=ask.effective_batch is not None),
        configs=dict(_configs(choice.plan, None if rate is None else rate["recommended"])),
        notes=tuple(text for text in (note, _no_rate(known, rate), _poor_line(known)) if text),
    )
    run["plan"], run["recommendation"] = choice.plan.to_dict(), advised.to_dict()


def _critical(run: dict[str, Any], known: Known) -> tuple[CriticalBatch | None, str | None, str]:
    """Return the critical batch, what it rests on, and what has to be said about it."""
    branches, scale = run["branches"], known.noise_scale
    measured = critical_from(branches["critical_batch"]) if is_done(branches) else None
    if measured is not None:
        if measured.resolved or scale is None:
            return measured, "branches", ""
        ratio = branches["ratio"]
        if ratio:
            # Few seeds give a ratio without an interval; a noise scale that was averaged for longer has one.
            times = f"{ratio:.2g} times the noise scale"
            note = f"branches say that the critical batch is {times}; the interval is the latter's"
            scaled = replace(scale, value=scale.value * ratio, low=scale.low * ratio, high=scale.high * ratio)
            return scaled, "branches", note
        # Branches without an upper end are a lower bound: they rule out a noise scale below it, and nothing else.
        bound, in_samples = measured.low, scale.in_samples() or scale
        if bound > 0 and not in_samples.value >= bound:
            return measured, "branches", ""
        note = (
            f"branches found no upper end of the critical batch, so the noise scale, {in_samples}, stands in "
            "for it: more seeds and larger branches measure it"
        )
        return scale, "noise scale", note
    if scale is None:
        return None, None, ""
    note = (
        "the noise scale stands in for the critical batch, which was 2 to 5 times as large on two tasks under AdamW "
        "and momentum: --branches measures it on this one"
    )
    return scale, "noise scale", note


def _no_rate(known: Known, rate: dict[str, Any] | None) -> str:
    about = known.section("workload") or {}
    if rate is not None or about.get("optimizer") is None:
        return ""
    why = "groups of parameters have different ones" if about.get("learning_rate") is None else "nothing tells it"
    return f"the learning rate is left as it is: {why}"


def _poor_line(known: Known) -> str:
    error = None if known.times is None else known.times.largest_error
    if error is None or error < _POOR:
        return ""
    return f"the line through the step times misses one by {100 * error:.0f} %: treat times between sizes as rough"


def _configs(plan: Plan, rate: float | None) -> Iterable[tuple[str, str]]:
    for name in FRAMEWORKS:
        try:
            yield name, plan.snippet(name, learning_rate=rate)
        except NotExpressibleError as error:
            yield name, f"# {error.problem}"
