"""Drive a search at every shape of a request, one after the other, each certified on its own.

Promises:
- the answer is a size that ran, and no smaller size failed for want of memory; no series runs more than `max_trials`;
- a mistake in the user's step ends the series at once, with the user's own exception;
- why a search went no further is a value (`Stop`); its sentence is written at the end;
- each shape is searched independently; what one taught about the difference between prediction and run only warms the
  start of the next;
- a shape at which nothing fits is a row of the table, and an error only if no shape fits: the one that needs least
  then speaks for all;
- whatever ends the search early carries a note of the shapes that were finished;
- a `Forecast` is what the trace says a size will take, corrected by what earlier probes took beyond it, and the
  correction learnt at one shape starts the next; a step that cannot be traced is no error: the search then goes by what
  probes measure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from batchwright.device.outcome import Outcome, is_too_small
from batchwright.device.step import StepSettings
from batchwright.errors import BatchwrightError, NothingFitsError, StepFailedError
from batchwright.fitting.fit_result import Fit, MemoryLine, NextSize, limited_peak, name_shape
from batchwright.fitting.probe_process import CRASHED
from batchwright.memory.breakdown import Breakdown, break_down
from batchwright.memory.estimate import LARGEST_MICRO_BATCH, without_torchs_own_log
from batchwright.planning.search import (
    CannotPredictError,
    Curve,
    Seen,
    by_doubling,
    by_exact_peaks,
    by_growing,
    by_peaks,
    by_powers_of_two,
    by_prediction,
    fall_back,
    next_size,
)
from batchwright.trace.run import trace_workload
from batchwright.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence, Sized

    from batchwright.fitting.cache import AnswerBook
    from batchwright.fitting.probers import Budget, Prober
    from batchwright.fitting.request import FitRequest
    from batchwright.workload import Workload


# A thread's stack as Linux reserves it: private memory from the moment the thread starts.
_STACK_BYTES = 8 * 2**20
_KERNELS_KEEP_BYTES = 16 * 2**20


class Forecast:
    """Predicted peaks of one workload, shape after shape."""

    def __init__(
        self,
        workload: Workload | None,
        limit_bytes: int | None,
        request: FitRequest,
        *,
        say: Callable[[str], None],
    ) -> None:
        self._workload, self._limit_bytes, self._request, self._say = workload, limit_bytes, request, say
        self._shape: Mapping[str, Any] = {}
        self._seen: dict[int, Breakdown] = {}
        # The main thread has its stack already; each of torch's others, and autograd's, takes one.
        self.allowance = (torch.get_num_threads() + 1) * _STACK_BYTES + _KERNELS_KEEP_BYTES

    def turn_to(self, shape: Mapping[str, Any]) -> None:
        """Speak of this shape from now on."""
        self._shape, self._seen = shape, {}

    def is_possible(self) -> bool:
        """Whether the step can be traced at all."""
        if self._workload is None:
            return False
        self._say("predicting from traces")
        return self._try_predict(1) is not None

    def predict(self, micro_batch: int) -> int:
        """Return the bytes at a size; a trace that fails there is a `CannotPredictError`."""
        try:
            return self._break_down(micro_batch).peak_bytes
        except Exception as error:
            # Whatever it is, a probe at that size will say it better: it has real values and the user's own traceback.
            raise CannotPredictError(f"the trace failed at micro-batch {micro_batch:,}") from error

    def _try_predict(self, micro_batch: int) -> int | None:
        try:
            return self.predict(micro_batch)
        except CannotPredictError:
            return None

    def guess_largest(self, cap: int) -> int | None:
        """Return the largest size that should fit by prediction alone; None if nothing can be predicted."""
        if self._limit_bytes is None or not self.is_possible():
            return None
        try:
            return Curve(self.predict, cap=cap).roughly_within(self._limit_bytes - self.allowance) or None
        except CannotPredictError:
            return None

    def learn(self, trials: Sequence[Outcome]) -> None:
        """Take over what the largest size that fits took beyond its prediction."""
        measured = ((t.micro_batch, limited_peak(t)) for t in trials if t.fits and t.micro_batch in self._seen)
        known = [(size, peak) for size, peak in measured if peak is not None]
        if known:
            size, peak = max(known)
            # Rounding differs from shape to shape: a little more, so that the first probe still fits.
            self.allowance = max(0, math.ceil(1.02 * (peak - self.predict(size))))

    def draw_line(self, micro_batch: int | None, trials: Sequence[Outcome]) -> MemoryLine | None:
        """Return the line near the answer: its slope from the trace if there is one, else from two probes."""
        peaks = {t.micro_batch: peak for t in trials if t.fits and (peak := limited_peak(t)) is not None}
        if micro_batch is None or micro_batch not in peaks:
            return None
        slope, source = self._slope(micro_batch), "predicted"
        below = [n for n in peaks if n < micro_batch]
        if slope is None and below:
            slope, source = (peaks[micro_batch] - peaks[max(below)]) / (micro_batch - max(below)), "measured"
        if slope is None or slope <= 0:
            return None  # one reading, or two that differ by noise alone
        return MemoryLine(round(peaks[micro_batch] - slope * micro_batch), round(slope), source)

    def _slope(self, micro_batch: int) -> float | None:
        half = micro_batch // 2
        if not self._seen or half == 0:
            return None
        upper, lower = self._try_predict(micro_batch), self._try_predict(half)
        return None if upper is None or lower is None else (upper - lower) / (micro_batch - half)

    def predict_need(self, micro_batch: int) -> float:
        """Return the bytes at a size; infinite if they are not known."""
        need = self._try_predict(micro_batch) if self._seen else None
        return math.inf if need is None else need

    def describe_need(self, micro_batch: int) -> list[str]:
        """Say what a size needs, by parts; nothing if it cannot be predicted."""
        if self.predict_need(micro_batch) == math.inf:
            return []
        needed = self._break_down(micro_batch)
        return [f"predicted need {format_bytes(needed.peak_bytes)}: {needed.list_parts()}"]

    def suggest_remedy(self) -> str:
        """Return what would help."""
        if not self._seen:
            return "more memory, a smaller model or shape, or an optimizer that keeps less state"
        return "bw.estimate(workload, what_if=True) prints what each change of the set-up would save"

    def _break_down(self, micro_batch: int) -> Breakdown:
        if micro_batch not in self._seen:
            assert self._workload is not None
            try:
                with without_torchs_own_log():
                    traced = trace_workload(
                        self._workload,
                        micro_batch,
                        StepSettings(self._shape, self._request.accumulation, self._request.clip_norm),
                    )
            except BatchwrightError:
                raise
            except Exception as error:
                if not is_too_small(error):
                    raise
                # One sample is too few for BatchNorm; two need hardly more.
                return self._break_down(micro_batch + 1)
            self._seen[micro_batch] = break_down(traced.log)
        return self._seen[micro_batch]


class Cause(Enum):
    """What ends a search; each has a number of its own: a size, or the trials."""

    LIMIT = "the limit is {number:,}"
    DATASET = "the dataset holds {number:,} samples"
    RECEIVED = "the model receives {number:,} samples at most"
    EFFECTIVE_BATCH = "the effective batch is {number:,}"
    LARGEST = "{number:,} is the largest size that is tried unless a limit is given"
    TRIALS = "{number:,} trials were used up (max_trials)"
    OUT_OF_MEMORY = "micro-batch {number:,} ran out of memory"
    POWERS_OF_TWO = "only powers of two are tried, and micro-batch {number:,} ran out of memory"


@dataclass(frozen=True)
class Cap:
    """The largest size that may be tried, and what set it."""

    size: int
    cause: Cause


@dataclass(frozen=True)
class Stop:
    """Why a search went no further; `rule` is the sign by which out-of-memory was recognised."""

    cause: Cause
    number: int
    rule: str | None = None


@dataclass(frozen=True)
class Series:
    """The probes of one search in order, the answer they give (None if nothing fits), and why it is not larger.

    `above` is the first size above the answer that could have been one.

    >>> Series((), 64, 65, Stop(Cause.LIMIT, 64)).reason
    'the limit is 64'
    """

    trials: tuple[Outcome, ...]
    micro_batch: int | None
    above: int
    stop: Stop

    @property
    def reason(self) -> str:
        """Why the answer is not larger."""
        return self.stop.cause.value.format(number=self.stop.number)

    @property
    def next_size(self) -> NextSize:
        """What is known of the next size."""
        if self.stop.cause is not Cause.OUT_OF_MEMORY:
            return NextSize(self.above, None, f"not tried: {self.reason}")
        failed = self.stop.number
        message = f"{self.reason}: {self.stop.rule}" if self.stop.rule else self.reason
        if self.above < failed:
            # The search saw that the gap is narrower than its readings are exact.
            between = f"micro-batch {self.above:,}" + (f" to {failed - 1:,}" if self.above + 1 < failed else "")
            message += f" ({between} not tried: they differ from it by less than two runs of one size do)"
        return NextSize(failed, "out_of_memory", message)


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
    """Run a search to its end, or to `max_trials`; `is_stepwise` if sizes between those tried are not wanted."""
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
        allocated = None if outcome.peak_bytes is None else outcome.peak_bytes.allocated
        seen = Seen(size, outcome.fits or outcome.is_too_small, limited_peak(outcome), allocated)
        size = next_size(search, seen)
    return _conclude(trials, cap, unfinished=size is not None, max_trials=max_trials, is_stepwise=is_stepwise)


def raise_failure(outcome: Outcome, *, ran: Sequence[int] = ()) -> None:
    """Raise what the user's step raised, and say which sizes had run before."""
    message = outcome.traceback or outcome.error or "the step failed without a message."
    error = outcome.exception if outcome.exception is not None else StepFailedError(message)
    if ran:
        sizes = ", ".join(f"{size:,}" for size in sorted(ran))
        error.add_note(f"It failed at micro-batch {outcome.micro_batch:,}; {sizes} had run: limit={max(ran)}.")
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
    measured = [f"peak {format_bytes(peak)}"] if peak is not None else []
    if speed:
        measured.append(f"{speed:,.1f} samples/s")
    return f"{size} fits{': ' if measured else ''}{', '.join(measured)}"


def _conclude(trials: list[Outcome], cap: Cap, *, unfinished: bool, max_trials: int, is_stepwise: bool) -> Series:
    smallest_failure = min((t.micro_batch for t in trials if t.verdict == "out_of_memory"), default=cap.size + 1)
    answer = max((t.micro_batch for t in trials if t.fits and t.micro_batch < smallest_failure), default=None)
    failed = next((t for t in trials if t.micro_batch == smallest_failure), None)
    has_no_step_left = is_stepwise and failed is None and answer is not None and not unfinished
    above = 2 * (answer or 0) if has_no_step_left else (answer or 0) + 1
    if above > cap.size:
        stop = Stop(cap.cause, cap.size)
    elif failed is None or (above < smallest_failure and unfinished):
        stop = Stop(Cause.TRIALS, max_trials)
    elif above < smallest_failure and is_stepwise:
        stop = Stop(Cause.POWERS_OF_TWO, smallest_failure)
    else:
        stop = Stop(Cause.OUT_OF_MEMORY, smallest_failure, failed.rule)
    return Series(tuple(trials), answer, above, stop)


@dataclass(frozen=True)
class Refusal:
    """One shape at which nothing fits, the smallest size tried there, and what is known of its need."""

    shape: str
    micro_batch: int
    need_bytes: float
    details: tuple[str, ...]
    remedy: str


def refuse(fit: Fit, forecast: Forecast) -> Refusal:
    """Gather what there is to say about a shape, while the forecast still speaks of it."""
    refusal = refuse_series(fit.trials)
    tried = next(trial for trial in fit.trials if trial.micro_batch == refusal.micro_batch)
    too_small = next((trial for trial in fit.trials if trial.is_too_small), None)
    return replace(
        refusal,
        shape=name_shape(fit.shape),
        need_bytes=forecast.predict_need(tried.micro_batch),
        details=(
            *refusal.details,
            *([f"micro-batch {too_small.micro_batch} cannot run either: {too_small.error}"] if too_small else []),
            *forecast.describe_need(tried.micro_batch),
            *([f"doubt: {tried.doubt}"] if tried.doubt else []),
        ),
        remedy=forecast.suggest_remedy(),
    )


def refuse_series(trials: Sequence[Outcome], *, notes: Sequence[str] = ()) -> Refusal:
    """Gather what there is to say about trials in which nothing fits: what was tried, and how the smallest ended."""
    smallest = min(trials, key=lambda trial: (trial.is_too_small, trial.micro_batch))
    tried = ", ".join(f"{trial.micro_batch:,}" for trial in trials)
    return Refusal(
        shape="",
        micro_batch=smallest.micro_batch,
        need_bytes=math.inf,
        details=(f"tried {tried}; the smallest failed with: {smallest.error}", *notes),
        remedy="more memory, a smaller model, or an optimizer that keeps less state",
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


# Two runs of one step were seen to differ by 0.3 MiB: one above, one below the middle. A rise must be clearly more.
_RESOLUTION_BYTES = 2**19
_NOISE_BYTES = 2**20


def fit_shapes(
    request: FitRequest,
    prober: Prober,
    budget: Budget,
    *,
    cap: Cap,
    name: str,
    say: Callable[[str], None],
    traceable: Workload | None = None,
    book: AnswerBook | None = None,
) -> Fit:
    """Fit every shape; `traceable` is the workload to predict from, None if there is none."""
    forecast = Forecast(traceable, budget.probe_bytes, request, say=say)
    driver = _Driver(request, prober, budget, forecast, cap, name, say, book)
    fits: list[Fit] = []
    refusals: list[Refusal] = []
    try:
        for shape in request.shapes:
            if len(request.shapes) > 1:
                say(f"shape {name_shape(shape)}")
            forecast.turn_to(shape)
            fits.append(driver.fit_shape(shape))
            if fits[-1].micro_batch is None:
                refusals.append(refuse(fits[-1], forecast))
    except BaseException as error:
        # Also to an interrupt: finding what was found before it took minutes.
        answers = (
            f"{'nothing fits' if fit.micro_batch is None else f'micro-batch {fit.micro_batch:,} fits'} "
            f"at {name_shape(fit.shape)}"
            for fit in fits
        )
        if fits:
            error.add_note(f"found before that: {'; '.join(answers)}")
        raise
    fitting = [fit for fit in fits if fit.micro_batch is not None]
    if not fitting:
        raise nothing_fits(refusals, on=prober.on, budget=budget)
    if len(fits) == 1:
        return fits[0]
    return replace(min(fitting, key=lambda fit: fit.micro_batch or 0), shapes=tuple(fits))


@dataclass(frozen=True)
class _Driver:
    """The search at one shape after the other."""

    request: FitRequest
    prober: Prober
    budget: Budget
    forecast: Forecast
    cap: Cap
    name: str
    say: Callable[[str], None]
    book: AnswerBook | None

    def fit_shape(self, shape: Mapping[str, Any]) -> Fit:
        """Find the largest size at a shape; a remembered one is tried first."""
        search = partial(self._search, shape)
        book, cap = self.book, self.cap.size
        recalled = None if book is None else book.look_up(shape, self.prober.on, self.budget, cap=cap)
        series = run_series(
            search() if recalled is None else recalled.try_first(search),
            lambda size: self.prober.probe(size, shape),
            cap=self.cap,
            max_trials=self.request.max_trials,
            say=self.say,
            is_stepwise=self.request.powers_of_two,
        )
        self.forecast.learn(series.trials)
        crashed = [trial for trial in series.trials if trial.rule == CRASHED]
        if series.micro_batch is None and crashed:
            # Under a limit a crash is mostly memory. One that comes at every size is the step's own.
            raise StepFailedError(
                f"{crashed[-1].traceback}\n{crashed[-1].error}, at micro-batch {crashed[-1].micro_batch:,}"
            )
        fit = Fit(
            name=self.name,
            on=self.prober.on,
            micro_batch=series.micro_batch,
            limit=self.cap.size,
            limit_bytes=self.budget.limit_bytes,
            trials=series.trials,
            next_size=series.next_size,
            reason=series.reason,
            shape=dict(shape),
            line=self.forecast.draw_line(series.micro_batch, series.trials),
            restored=self.prober.restored(),
            where=self.prober.where,
            notes=(*self.budget.notes, *_doubts(series)),
        )
        return fit if recalled is None else recalled.conclude(fit, is_final=series.stop.cause is not Cause.TRIALS)

    def _search(self, shape: Mapping[str, Any]) -> Generator[int, Seen, None]:
        request, cap, limit_bytes = self.request, self.cap.size, self.budget.probe_bytes
        if request.powers_of_two:
            return by_powers_of_two(cap, start=request.start or self.forecast.guess_largest(cap) or 1)
        if request.scale is not None:
            assert request.limit is not None
            return by_growing(request.scale.start(request.limit, shape), cap)
        if request.start is not None:
            return by_growing(request.start, cap)
        if limit_bytes is None or not self.forecast.is_possible():
            return self._search_unpredicted()
        predicted = by_prediction(
            cap,
            limit_bytes,
            self.forecast.predict,
            allowance=self.forecast.allowance,
            resolution=_RESOLUTION_BYTES if self.budget.is_host else 0,
        )
        return fall_back(predicted, self._search_unpredicted)

    def _search_unpredicted(self) -> Generator[int, Seen, None]:
        # If nobody set a budget, a limit that far out is no help: a step that only raises moves no peak at all.
        if self.budget.probe_bytes is not None and self.budget.is_tight:
            if self.request.is_on_card:
                return by_exact_peaks(self.cap.size, self.budget.probe_bytes)
            return by_peaks(self.cap.size, self.budget.probe_bytes, noise=_NOISE_BYTES)
        return by_doubling(self.cap.size)


def _doubts(series: Series) -> list[str]:
    """Note a step that seems to do nothing with its size."""
    peaks = {t.micro_batch: peak for t in series.trials if t.fits and (peak := limited_peak(t)) is not None}
    if not peaks or max(peaks) < 64 * min(peaks) or peaks[max(peaks)] > peaks[min(peaks)] + _NOISE_BYTES:
        return []
    return [f"the peak is the same at {min(peaks):,} and at {max(peaks):,} samples: does the step use its size?"]


def find_cap(request: FitRequest, data: Sized | None = None) -> Cap:
    """Return the largest size that may be tried: the limit, or the end of the data."""
    limit = request.limit
    cap = Cap(LARGEST_MICRO_BATCH, Cause.LARGEST) if limit is None else Cap(limit, Cause.LIMIT)
    if data is not None and len(data) < cap.size:
        cap = Cap(len(data), Cause.DATASET)
    return cap
