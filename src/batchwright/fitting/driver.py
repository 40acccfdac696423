"""Fit every shape that was asked for, one after the other, each certified on its own.

Promises:
- each shape is searched independently; what one taught about the difference between prediction and run only warms the
  start of the next;
- a shape at which nothing fits is a row of the table, and an error only where no shape fits;
- whatever ends the search early carries a note of the shapes that were finished.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from batchwright.errors import NothingFitsError, StepFailedError
from batchwright.fitting.fit_result import Fit, NextSize, limited_peak, name_shape
from batchwright.fitting.forecast import Forecast
from batchwright.fitting.search import (
    Seen,
    by_doubling,
    by_growing,
    by_peaks,
    by_powers_of_two,
    by_prediction,
    fall_back,
)
from batchwright.fitting.subprocess import CRASHED
from batchwright.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from batchwright.device.outcome import Outcome
    from batchwright.fitting.budget import Budget
    from batchwright.fitting.cache import AnswerBook
    from batchwright.fitting.probers import Prober
    from batchwright.fitting.request import Question
    from batchwright.workload import Workload


# Drive one search: run its probes, say each, and tell what the end means.
#
# Promises:
# - a mistake in the user's step ends the series at once, with the user's own exception;
# - the answer is a size that ran, and no smaller size failed for want of memory;
# - the series never runs more than `max_trials` probes.


@dataclass(frozen=True)
class Cap:
    """The largest size that may be tried, and what set it."""

    size: int
    why: str


@dataclass(frozen=True)
class Series:
    """The probes of one search in order, and the answer they give; None where nothing fits."""

    trials: tuple[Outcome, ...]
    micro_batch: int | None
    next_size: NextSize
    reason: str


def run_series(
    search: Generator[int, Seen, None],
    probe: Callable[[int], Outcome],
    *,
    cap: Cap,
    max_trials: int,
    say: Callable[[str], None],
    is_stepwise: bool = False,
    tells_what_ran: bool = True,
) -> Series:
    """Run a search to its end, or to `max_trials`; `is_stepwise` where sizes between those tried are not wanted."""
    trials: list[Outcome] = []
    size = next(search, None)
    while size is not None and len(trials) < max_trials:
        say(f"trying micro-batch {size:,}")
        outcome = probe(size)
        trials.append(outcome)
        say(describe(outcome))
        if outcome.verdict == "failed" and not outcome.is_too_small:
            raise_failure(outcome, ran=[trial.micro_batch for trial in trials if trial.fits and tells_what_ran])
        # A size that is too small for the step is passed over: larger ones are the question.
        seen = Seen(size, outcome.fits or outcome.is_too_small, limited_peak(outcome) if outcome.fits else None)
        try:
            size = search.send(seen)
        except StopIteration:
            size = None
    return _concluded(trials, cap, unfinished=size is not None, max_trials=max_trials, is_stepwise=is_stepwise)


def raise_failure(outcome: Outcome, *, ran: Sequence[int] = ()) -> None:
    """Raise what the user's step raised, and say which sizes had run before."""
    told = outcome.traceback or outcome.error or "the step failed and left no word."
    error = outcome.exception if outcome.exception is not None else StepFailedError(told)
    if ran:
        sizes = ", ".join(f"{size:,}" for size in sorted(ran))
        error.add_note(f"It failed at micro-batch {outcome.micro_batch:,}; {sizes} had run: --limit {max(ran)}.")
    raise error


def describe(outcome: Outcome) -> str:
    """Say in one line how a probe went.

    >>> from batchwright.device.outcome import Outcome
    >>> from batchwright.units import PeakBytes
    >>> describe(Outcome(8, {}, "fits", PeakBytes(device=2**30), seconds=1.5, step_seconds=0.5))
    'micro-batch 8 fits: peak 1 GiB, 16.0 samples/s'
    """
    size = f"micro-batch {outcome.micro_batch:,}"
    if outcome.is_too_small:
        return f"{size} is too small for this step: {(outcome.error or '').removeprefix('ValueError: ')}"
    if not outcome.fits:
        return f"{size} {'ran out of memory' if outcome.verdict == 'out_of_memory' else 'failed'}"
    peak, speed = limited_peak(outcome), outcome.samples_per_second
    told = [f"peak {format_bytes(peak)}"] if peak is not None else []
    if speed:
        told.append(f"{speed:,.1f} samples/s")
    return f"{size} fits{': ' if told else ''}{', '.join(told)}"


def _concluded(trials: list[Outcome], cap: Cap, *, unfinished: bool, max_trials: int, is_stepwise: bool) -> Series:
    smallest_failure = min((t.micro_batch for t in trials if t.verdict == "out_of_memory"), default=cap.size + 1)
    answer = max((t.micro_batch for t in trials if t.fits and t.micro_batch < smallest_failure), default=None)
    above = (answer or 0) + 1
    failed = next((t for t in trials if t.micro_batch == smallest_failure), None)
    if above > cap.size:
        return Series(tuple(trials), answer, NextSize(above, None, f"not tried: {cap.why}"), cap.why)
    if failed is None or (above < smallest_failure and unfinished):
        why = f"{max_trials} trials were used up (--max-trials)"
        return Series(tuple(trials), answer, NextSize(above, None, f"not tried: {why}"), why)
    if above < smallest_failure and is_stepwise:
        why = f"only powers of two are tried, and micro-batch {smallest_failure:,} ran out of memory"
        return Series(tuple(trials), answer, NextSize(above, None, f"not tried: {why}"), why)
    reason = f"micro-batch {smallest_failure:,} ran out of memory"
    told = f"{reason}: {failed.rule}" if failed.rule else reason
    if above < smallest_failure:
        # The search saw that the gap is narrower than its readings are exact.
        between = f"micro-batch {above:,}" + (f" to {smallest_failure - 1:,}" if above + 1 < smallest_failure else "")
        told += f" ({between} not tried: they differ from it by less than two runs of one size do)"
    return Series(tuple(trials), answer, NextSize(smallest_failure, "out_of_memory", told), reason)


# What is said where nothing fits: what was tried, what it would need by parts, and what would help.
#
# Promises:
# - with several shapes the one that needs least speaks for all: it is the nearest to fitting.


@dataclass(frozen=True)
class Refusal:
    """One shape at which nothing fits, the smallest size tried there, and what is known of its need."""

    shape: str
    micro_batch: int
    need_bytes: float
    details: tuple[str, ...]
    remedy: str


def refuse(found: Fit, forecast: Forecast) -> Refusal:
    """Gather what there is to say about a shape, while the forecast still speaks of it."""
    trials = found.trials
    smallest = min(trials, key=lambda trial: trial.micro_batch)
    too_small = next((trial for trial in trials if trial.is_too_small), None)
    tried = min((t for t in trials if not t.is_too_small), key=lambda trial: trial.micro_batch, default=smallest)
    details = [f"tried {', '.join(f'{t.micro_batch:,}' for t in trials)}; the smallest said: {tried.error}"]
    if too_small is not None:
        details.append(f"micro-batch {too_small.micro_batch} is no way out: {too_small.error}")
    parts = forecast.parts_needed(tried.micro_batch)
    if tried.doubt:
        parts.append(f"doubt: {tried.doubt}")
    return Refusal(
        shape=name_shape(found.shape),
        micro_batch=tried.micro_batch,
        need_bytes=forecast.need(tried.micro_batch),
        details=(*details, *parts),
        remedy=forecast.remedy() or "more memory, a smaller model or shape, or an optimizer that keeps less state",
    )


def nothing_fits(refusals: Sequence[Refusal], *, on: str, budget: Budget) -> NothingFitsError:
    """Make the error for a search that found nothing at any of its shapes."""
    within = "" if budget.probe_bytes is None else f" ({format_bytes(budget.probe_bytes)})"
    if len(refusals) == 1:
        (only,) = refusals
        problem = f"micro-batch {only.micro_batch:,} does not fit on {on}{within}."
        return NothingFitsError(problem, details=list(only.details), remedy=only.remedy)
    nearest = min(refusals, key=lambda refusal: refusal.need_bytes)
    is_known = nearest.need_bytes < math.inf
    # A shape that refused a smaller size refuses this one too.
    size = max(refusal.micro_batch for refusal in refusals)
    return NothingFitsError(
        f"micro-batch {size:,} fits on {on} at none of the {len(refusals)} shapes{within}.",
        details=[f"{'least is needed at' if is_known else 'the first is'} {nearest.shape}", *nearest.details],
        remedy=nearest.remedy,
    )


# Beyond this the question is no longer one of memory.
LARGEST_MICRO_BATCH = 2**20
# Two runs of one step were seen to differ by 0.3 MiB: one above, one below the middle. A rise must be clearly more.
_RESOLUTION_BYTES = 2**19
_NOISE_BYTES = 2**20


def fit_shapes(
    question: Question,
    prober: Prober,
    budget: Budget,
    *,
    name: str,
    traceable: Workload | None,
    say: Callable[[str], None],
    accumulation: int = 1,
    clip_norm: float | None = None,
    book: AnswerBook | None = None,
) -> Fit:
    """Fit every shape; `traceable` is the workload to predict from, None where there is none."""
    forecast = Forecast(traceable, budget.probe_bytes, accumulation=accumulation, clip_norm=clip_norm, say=say)
    cap = _cap(traceable, question)
    fits: list[Fit] = []
    refusals: list[Refusal] = []
    with _finished_ones_told(fits):
        for shape in question.shapes:
            if len(question.shapes) > 1:
                say(f"shape {name_shape(shape)}")
            forecast.turn_to(shape)
            found = _fit_shape(shape, question, cap, prober, budget, forecast, name=name, say=say, book=book)
            if found.micro_batch is None:
                refusals.append(refuse(found, forecast))
            fits.append(found)
    fitting = [found for found in fits if found.micro_batch is not None]
    if not fitting:
        raise nothing_fits(refusals, on=prober.on, budget=budget)
    if len(fits) == 1:
        return fits[0]
    smallest = min(fitting, key=lambda found: found.micro_batch or 0)
    return replace(smallest, shapes=tuple(fits))


@contextmanager
def _finished_ones_told(fits: Sequence[Fit]) -> Iterator[None]:
    """Have an error, or an interrupt, say what was found before it: finding it took minutes."""
    try:
        yield
    except BaseException as error:
        answers = (
            f"{'nothing fits' if found.micro_batch is None else f'micro-batch {found.micro_batch:,} fits'} "
            f"at {name_shape(found.shape)}"
            for found in fits
        )
        if fits:
            error.add_note(f"found before that: {'; '.join(answers)}")
        raise


def _fit_shape(
    shape: Mapping[str, Any],
    question: Question,
    cap: Cap,
    prober: Prober,
    budget: Budget,
    forecast: Forecast,
    *,
    name: str,
    say: Callable[[str], None],
    book: AnswerBook | None,
) -> Fit:
    search = partial(_search, question, cap, shape, budget, forecast)
    recalled = None if book is None else book.look_up(shape, prober.on, budget, cap=cap.size)
    series = run_series(
        search() if recalled is None else recalled.first(search),
        lambda size: prober.probe(size, shape),
        cap=cap,
        max_trials=question.trials,
        say=say,
        is_stepwise=question.powers_of_two,
    )
    series = series if recalled is None else recalled.concluded(series)
    forecast.learn(series.trials)
    crashed = [trial for trial in series.trials if trial.rule == CRASHED]
    if series.micro_batch is None and crashed:
        # Under a limit a crash is mostly memory. One that comes at every size is the step's own.
        raise StepFailedError(
            f"{crashed[-1].traceback}\n{crashed[-1].error}, at micro-batch {crashed[-1].micro_batch:,}"
        )
    found = Fit(
        name=name,
        on=prober.on,
        micro_batch=series.micro_batch,
        limit=cap.size,
        limit_bytes=budget.limit_bytes,
        trials=series.trials,
        next_size=series.next_size,
        reason=series.reason,
        shape=dict(shape),
        line=forecast.line(series.micro_batch, series.trials),
        restored=prober.restored(),
        where=prober.where,
        notes=(*budget.notes, *_doubts(series)),
    )
    note = "" if recalled is None else recalled.remember(found)
    return replace(found, notes=(*found.notes, note)) if note else found


def _doubts(series: Series) -> list[str]:
    """Say so where a step seems to do nothing with its size."""
    peaks = {t.micro_batch: peak for t in series.trials if t.fits and (peak := limited_peak(t)) is not None}
    if not peaks or max(peaks) < 64 * min(peaks) or peaks[max(peaks)] > peaks[min(peaks)] + _NOISE_BYTES:
        return []
    return [f"the peak is the same at {min(peaks):,} and at {max(peaks):,} samples: does the step use its size?"]


def _search(
    question: Question,
    cap: Cap,
    shape: Mapping[str, Any],
    budget: Budget,
    forecast: Forecast,
) -> Generator[int, Seen, None]:
    if question.powers_of_two:
        return by_powers_of_two(cap.size, start=question.start or forecast.first_guess(cap.size) or 1)
    if question.scale is not None:
        assert question.limit is not None
        return by_growing(question.scale.start(question.limit, shape), cap.size)
    if question.start is not None:
        return by_growing(question.start, cap.size)
    limit = budget.probe_bytes
    if limit is not None and forecast.is_possible(shape):
        resolution = _RESOLUTION_BYTES if budget.is_host else 0
        predicted = by_prediction(cap.size, limit, forecast.peak, allowance=forecast.allowance, resolution=resolution)
        return fall_back(predicted, lambda: _unpredicted(cap, budget))
    return _unpredicted(cap, budget)


def _unpredicted(cap: Cap, budget: Budget) -> Generator[int, Seen, None]:
    limit = budget.probe_bytes
    # Where nobody set a budget, a limit that far out is no help: a step that merely raises moves no peak at all.
    if limit is not None and budget.is_tight:
        return by_peaks(cap.size, limit, noise=_NOISE_BYTES)
    return by_doubling(cap.size)


def _cap(workload: Workload | None, question: Question) -> Cap:
    data = workload.data if workload is not None else None
    cap = Cap(LARGEST_MICRO_BATCH, f"{LARGEST_MICRO_BATCH:,} is the largest size that is tried")
    if question.limit is not None:
        cap = Cap(question.limit, f"the limit is {question.limit:,}")
    if data is not None and len(data) < cap.size:
        cap = Cap(len(data), f"the dataset holds {len(data):,} samples")
    return cap
