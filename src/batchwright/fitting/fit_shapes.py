"""Fit every shape that was asked for, one after the other, each certified on its own.

Promises:
- each shape is searched independently; what one taught about the difference between prediction and run only warms the
  start of the next;
- a shape at which nothing fits is a row of the table, and an error only where no shape fits;
- whatever ends the search early carries a note of the shapes that were finished.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from batchwright.errors import StepFailedError
from batchwright.fitting.fallback import or_else
from batchwright.fitting.forecast import Forecast
from batchwright.fitting.isolated import CRASHED
from batchwright.fitting.nothing_fits import Refusal, nothing_fits, refuse
from batchwright.fitting.predicted_search import by_prediction
from batchwright.fitting.result import Fit, limited_peak, name_shape
from batchwright.fitting.search import by_doubling, by_growing, by_peaks, by_powers_of_two
from batchwright.fitting.series import Cap, Series, run_series

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from batchwright.fitting.budget import Budget
    from batchwright.fitting.probers import Prober
    from batchwright.fitting.question import Question
    from batchwright.fitting.recalled import AnswerBook
    from batchwright.fitting.search import Seen
    from batchwright.workload import Workload

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
        return or_else(predicted, lambda: _unpredicted(cap, budget))
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
