"""The stages of a run: each asks one part of batchwright and returns its section.

Promises:
- a stage reads what came before from the run, so that one that is resumed needs nothing else;
- of throughput: sizes take turns, so that a machine that slows down slows all of them alike; each size runs once
  unmeasured before; the answer is the median of the repeats, with their quartiles.
"""

from __future__ import annotations

import math
import platform
import statistics
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from batchwright.auditing.audit import audit_workload
from batchwright.device.batches import make_batch
from batchwright.device.device import open_device
from batchwright.device.outcome import is_too_small
from batchwright.device.step import build_optimizers, checked_loss, needing_larger_micro_batches
from batchwright.errors import BatchwrightError, InvalidInputError, NothingFitsError, RankFailedError, StepFailedError
from batchwright.fitting.fit import fit
from batchwright.fitting.fit_result import NEAR_BEST
from batchwright.memory.estimate import estimate
from batchwright.noise.measure_critical_batch import measure_critical_batch
from batchwright.noise.noise_run import Trained, fitting_split, measure_noise, training
from batchwright.planning.times import TimedPoint, TimeModel, fit_times
from batchwright.state.untouched import untouched
from batchwright.targets import load_workload
from batchwright.trace.run import build_skeleton
from batchwright.units import whole_number
from batchwright.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from batchwright.tuning.run_file import Measured, Section
    from batchwright.tuning.tune import TuneRequest

    Say = Callable[[str], None]


# At most so many sizes are timed, from a small one up to the largest: the answer may be far below what fits.
_TIMED_SIZES, _SMALL = 6, 8
_NOISE_BATCH = 64
_LARGEST_ON_CARD = 4096
_AUDITED = 8
# As many as an interval needs.
_BRANCH_SEEDS = 5
# Of a clock that repeats; beyond it differences between sizes may be the machine's.
_NOISY = 0.1


def describe_workload(workload: Workload, target: str | None, request: TuneRequest) -> Section:
    """Return what the workload is."""
    from batchwright import __version__

    with untouched(workload, is_traced=True):
        model, _ = build_skeleton(workload)
        optimizers = build_optimizers(workload, model) if workload.optimizer is not None else ()
        rates = {group.get("lr") for optimizer in optimizers for group in optimizer.param_groups}
        parameters = list(model.parameters())
    return {
        "name": workload.name,
        "target": target,
        "num_parameters": _num_numbers(parameters),
        "num_trained": _num_numbers([parameter for parameter in parameters if parameter.requires_grad]),
        "samples": None if workload.data is None else len(workload.data),
        "optimizer": type(optimizers[0]).__name__ if optimizers else None,
        "learning_rate": float(rates.pop()) if len(rates) == 1 and None not in rates else None,
        "batchwright": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": None if target is None else request.command(target),
        **request.to_dict(),
    }


def _num_numbers(parameters: list[nn.Parameter]) -> int | None:
    """Return the numbers in some parameters; None if a lazy one does not know its shape yet."""
    return None if any(map(is_lazy, parameters)) else sum(parameter.numel() for parameter in parameters)


def find_fit(work: Workload | str, measured: Measured, request: TuneRequest, say: Say) -> Section:
    """Find the largest micro-batch; if nothing fits, say so and end here."""
    if request.is_on_card and isinstance(work, str):
        work = load_workload(work)
    limit = request.limit
    if limit is None and request.is_on_card and isinstance(work, Workload) and work.data is not None:
        # A small model could take all of its data at once; a trace of that takes minutes, and says nothing new.
        limit = min(max(len(work.data) // request.devices, 1), _LARGEST_ON_CARD)
    try:
        largest = fit(
            spread_on_card(work, request) if isinstance(work, Workload) else work,
            on=request.on,
            memory=request.memory,
            limit=limit,
            shapes=request.shape,
            # Gradients of one micro-batch live through the forward of the next.
            accumulation=2,
            devices=request.devices if request.is_on_card else 1,
            progress=say,
        )
        if largest.micro_batch is not None:
            return largest.to_dict()
        reason = largest.reason
    except NothingFitsError as error:
        reason = str(error)
    say(reason)
    return {"skipped": f"nothing fits: {reason}", "nothing_fits": True}


def spread_on_card(work: Workload, request: TuneRequest) -> Workload:
    """Return the workload as one of the ranks of a card holds it: without `wrap` as DistributedDataParallel does."""
    if not request.is_on_card or request.devices == 1 or work.wrap is not None:
        return work
    return replace(work, wrap=nn.parallel.DistributedDataParallel)


def predict(work: Workload, measured: Measured, request: TuneRequest, say: Say) -> Section:
    """Predict the memory at the largest micro-batch that fits."""
    return estimate(
        spread_on_card(work, request),
        micro_batch=measured.micro_batch or 1,
        on=request.on if request.is_on_card else "cpu",
        shape=request.shape or None,
        accumulation=2,
        devices=request.devices if request.is_on_card else 1,
        what_if=True,
        progress=say,
    ).to_dict()


def time_steps(work: Workload, measured: Measured, request: TuneRequest, say: Say) -> Section:
    """Time steps from a small micro-batch up to the largest."""
    largest = measured.micro_batch or request.limit or _NOISE_BATCH
    if work.data is not None:
        largest = min(largest, max(len(work.data) // max(request.devices, 1), 1))
    sizes = sizes_to_time(largest)
    return measure_throughput(work, sizes, on=request.on, shape=request.shape or None, progress=say).to_dict()


def sizes_to_time(largest: int) -> list[int]:
    """Return sizes at equal ratios of 2 or more.

    >>> sizes_to_time(2048), sizes_to_time(28), sizes_to_time(3), sizes_to_time(1)
    ([8, 24, 74, 223, 676, 2048], [3, 6, 13, 28], [1, 3], [1])
    """
    smallest = max(min(_SMALL, largest // _SMALL), 1)
    count = min(_TIMED_SIZES, 1 + int(math.log2(largest / smallest)))
    return [round(smallest * (largest / smallest) ** (step / max(count - 1, 1))) for step in range(count)]


@dataclass(frozen=True)
class TimedSize:
    """One micro-batch: seconds of its forward and backward, and of the whole step with the update."""

    micro_batch: int
    pass_seconds: float
    seconds: float
    low_seconds: float
    high_seconds: float
    repeats: int
    accumulation: int = 1

    @property
    def samples_per_second(self) -> float:
        """Of one device, in whole steps."""
        return self.micro_batch / self.seconds

    @property
    def noise(self) -> float:
        """Half of what lies between the quartiles, over the middle."""
        return (self.high_seconds - self.low_seconds) / 2 / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {**asdict(self), "samples_per_second": self.samples_per_second}


@dataclass(frozen=True)
class Throughput:
    """How fast each micro-batch is, and the time model that follows."""

    name: str
    on: str
    devices: int
    rows: tuple[TimedSize, ...]
    times: TimeModel
    notes: tuple[str, ...] = ()

    @property
    def noise(self) -> float:
        """The largest noise of any size."""
        return max(row.noise for row in self.rows)

    @property
    def fastest_micro_batch(self) -> int:
        """The smallest size within 5 % of the best throughput: largest is not fastest."""
        best = max(row.samples_per_second for row in self.rows)
        return min(row.micro_batch for row in self.rows if row.samples_per_second >= NEAR_BEST * best)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data: the section `throughput` of a run."""
        return {
            "schema": 1,
            "source": "measured",
            "name": self.name,
            "on": self.on,
            "devices": self.devices,
            "rows": [row.to_dict() for row in self.rows],
            "noise": self.noise,
            "fastest_micro_batch": self.fastest_micro_batch,
            "best_samples_per_second": self.devices * max(row.samples_per_second for row in self.rows),
            "times": self.times.to_dict(),
            "notes": list(self.notes),
        }


def measure_throughput(
    workload: Workload,
    micro_batches: Sequence[int],
    *,
    on: str | None = None,
    shape: Mapping[str, Any] | None = None,
    repeats: int = 7,
    seconds: float = 3.0,
    progress: Callable[[str], None] = lambda text: None,
) -> Throughput:
    """Time whole steps at several micro-batches.

    >>> import torch
    >>> from batchwright.workload import Workload
    >>> workload = Workload(
    ...     model=lambda: torch.nn.Linear(8, 1),
    ...     batch=lambda n: torch.randn(n, 8),
    ...     loss=lambda model, batch: model(batch).pow(2).mean(),
    ...     optimizer=lambda params: torch.optim.SGD(params, lr=1e-3),
    ... )
    >>> found = measure_throughput(workload, [4, 16], repeats=3)
    >>> [row.micro_batch for row in found.rows], found.times.points[0].micro_batch
    ([4, 16], 4)

    There are at least `repeats` turns, and for quick steps as many as `seconds` hold, up to ten times that.
    """
    sizes = sorted({whole_number(size, "micro-batch") for size in micro_batches})
    if not sizes:
        raise InvalidInputError("no micro-batch was named to be timed.")
    whole_number(repeats, "repeats")
    device = open_device(on)
    now: Callable[[], float] = getattr(device, "now", time.perf_counter)
    seen: dict[int, list[tuple[float, float]]] = {size: [] for size in sizes}
    notes: list[str] = []
    with (
        needing_larger_micro_batches(f"micro-batch {sizes[-1]}"),
        training(workload, device=device.torch_device, shape=shape) as trained,
    ):
        progress(f"timing micro-batches {', '.join(map(str, sizes))}")
        for size in sizes:
            try:
                _one_step(trained, size, now)
            except ValueError as error:
                if not is_too_small(error) or size == sizes[-1]:
                    raise
                del seen[size]
                notes.append(f"micro-batch {size} is too small for batch normalization, and was not timed")
        start, turn = time.monotonic(), 0
        most = repeats if trained.ranks > 1 else 10 * repeats  # ranks must not disagree on how many there are
        while turn < repeats or (time.monotonic() - start < seconds and turn < most):
            for size, timed in seen.items():
                timed.append(_one_step(trained, size, now))
            turn += 1
    rows = tuple(_row(size, timed) for size, timed in seen.items())
    points = [TimedPoint(row.micro_batch, row.pass_seconds) for row in rows]
    whole = [TimedPoint(row.micro_batch, row.seconds, accumulation=1) for row in rows]
    throughput = Throughput(workload.name, on or device.name, trained.ranks, rows, fit_times([*points, *whole]))
    if throughput.noise <= _NOISY:
        return replace(throughput, notes=tuple(notes))
    off = f"{100 * throughput.noise:.0f} %"
    note = f"half of the repeats lie up to {off} off the middle: the machine was busy, or steps are short"
    return replace(throughput, notes=(*notes, note))


def _one_step(trained: Trained, size: int, now: Callable[[], float]) -> tuple[float, float]:
    """Return the seconds of forward and backward, and those with the update."""
    batch = make_batch(trained.workload, size, trained.shape, trained.device)
    assert trained.workload.loss is not None
    start = now()
    checked_loss(trained.workload.loss(trained.model, batch)).backward()
    passed = now()
    for optimizer in trained.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return passed - start, now() - start


def _row(size: int, timed: list[tuple[float, float]]) -> TimedSize:
    passes, whole = [one for one, _ in timed], [other for _, other in timed]
    low, high = (min(whole), max(whole)) if len(whole) < 4 else statistics.quantiles(whole, n=4)[::2]
    return TimedSize(size, statistics.median(passes), statistics.median(whole), low, high, len(timed))


def audit_accumulation(work: Workload, measured: Measured, request: TuneRequest, say: Say) -> Section:
    """Compare accumulated gradients with those of the big batch."""
    say("comparing the accumulated gradient with that of the big batch")
    # The big batch runs at once, beside the split.
    most = min(measured.micro_batch or _AUDITED, _AUDITED if work.data is None else len(work.data))
    size = 2 if most >= _AUDITED else 1
    accumulation = max(min(4, most // size), 2)
    return audit_workload(work, micro_batch=size, accumulation=accumulation, shape=request.shape or None).to_dict()


def watch_noise(work: Workload, measured: Measured, request: TuneRequest, say: Say) -> Section:
    """Train for some steps and measure the critical batch."""
    samples, devices = _NOISE_BATCH if work.data is None else len(work.data), request.devices
    batch = request.noise_batch or request.effective_batch or min(_NOISE_BATCH, samples - samples % devices) or 1
    batch = -(-batch // devices) * devices
    if work.data is not None and batch > len(work.data):
        raise InvalidInputError(f"a step of {batch:,} samples was asked for, and data= holds {len(work.data):,}.")
    return measure_noise(
        work,
        effective_batch=batch,
        steps=request.steps,
        micro_batch=fitting_split(batch // devices, measured.micro_batch)[0],
        on=request.on,
        shape=request.shape or None,
        seed=request.seed,
        progress=say,
    ).to_dict()


def train_branches(work: Workload, measured: Measured, request: TuneRequest, say: Say) -> Section:
    """Train short branches at several batches, from one place of the run or several: the critical batch itself."""
    sections: list[Section] = []
    failures: list[BatchwrightError] = []
    for place in request.branch_steps:
        if len(request.branch_steps) > 1:
            say(f"branches from step {place:,} on")
        try:
            measurement = measure_critical_batch(
                work,
                batches=request.branch_batches,
                steps=max(request.steps, 20),
                seeds=_BRANCH_SEEDS,
                warm_up=place,
                largest=measured.micro_batch,
                on=request.on,
                shape=request.shape or None,
                progress=say,
            )
        except (StepFailedError, RankFailedError):
            raise
        except BatchwrightError as error:
            say(f"branches from step {place:,} failed: {error}")
            error.add_note(f"Branches from step {place:,}.")
            failures.append(error)
            continue
        sections.append({**measurement.to_dict(), "first_step": place})
    if not sections:
        raise failures[0]
    first, *later = sections
    notes = [f"a place of the run is left out: {error} {' '.join(error.__notes__)}" for error in failures]
    return {**first, "notes": [*first["notes"], *notes], "later": later}
