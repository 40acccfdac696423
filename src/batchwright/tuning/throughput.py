"""Throughput at a few micro-batches, with repeats, and how much of it is noise.

Promises:
- sizes take turns, so that a machine that slows down slows all of them alike;
- each size runs once unmeasured before;
- the answer is the median of the repeats, with their quartiles; nothing of a live model is changed.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from batchwright.device.batches import make_batch
from batchwright.device.device import open_device
from batchwright.device.out_of_memory import is_too_small
from batchwright.device.step import checked_loss, needing_larger_micro_batches
from batchwright.errors import InvalidInputError
from batchwright.fitting.fit_result import NEAR_BEST
from batchwright.noise.noise_run import Trained, training
from batchwright.planning.times import TimedPoint, TimeModel, fit_times
from batchwright.units import whole_number

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from batchwright.workload import Workload


# Of a clock that repeats; beyond it differences between sizes may be the machine's.
_NOISY = 0.1


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
    source: str = "measured"

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
            "source": self.source,
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
        training(workload, device=device.torch_device, shape=shape) as trained,  # type: ignore[attr-defined]
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
