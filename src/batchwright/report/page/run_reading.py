"""What the page shows, read from a run's JSON: fields by path, then the data of each chart.

Promises:
- what is missing, null, infinite, absurd or of another kind than expected is None or empty, never an error: a page of
  half a run is better than none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

Data = dict[str, Any]


def section_of(run: Data, name: str) -> Data | None:
    """Return a section that holds an answer.

    >>> section_of({"fit": {"skipped": "asked for"}}, "fit")
    """
    record = run.get(name)
    # Only words: the section of the noise has a `skipped` of its own, the windows it left out.
    is_skipped = isinstance(record, dict) and isinstance(record.get("skipped"), str)
    return record if isinstance(record, dict) and record and not is_skipped else None


def why_missing(run: Data, name: str) -> str:
    """Return why a section holds no answer.

    >>> why_missing({"fit": {"skipped": "asked for"}}, "fit"), why_missing({}, "fit")
    ('asked for', 'it is not in the file')
    """
    return in_one_line(text_in(run, name, "skipped")) or "it is not in the file"


def in_one_line(why: str) -> str:
    """Return why a stage gave nothing: of a traceback what stands behind its frames, of a message all of it.

    >>> in_one_line("failed: Traceback (most recent call last):\\n  File 'train.py'\\nValueError: no")
    'failed: ValueError: no'
    >>> in_one_line("failed: data= holds 0 samples.\\n  try: a dataset that is not empty")
    'failed: data= holds 0 samples. try: a dataset that is not empty'
    """
    before, trace, after = why.rpartition("Traceback (most recent call last):")
    lines = (after if trace else why).splitlines()
    if trace:
        frames = [number for number, line in enumerate(lines) if line.startswith(" ")]
        lines = lines[frames[-1] + 1 :] if frames else lines
        before = before.partition("Traceback")[0]  # of errors that caused it
    return before + " ".join(line.strip() for line in lines if line.strip())


def number_in(data: object, *path: str) -> float | None:
    """Return the number at a path.

    >>> number_in({"peak": {"device": 512}}, "peak", "device"), number_in({"peak": None}, "peak", "device")
    (512, None)
    """
    value = _at(data, path)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # Beyond it the arithmetic of a drawing overflows, and nobody measured it; infinite and not-a-number fail it too.
    return value if value == 0 or 1e-30 <= abs(value) <= 1e30 else None


def text_in(data: object, *path: str) -> str:
    """Return the text at a path, with no space around it.

    >>> text_in({"name": " tiny "}, "name"), text_in({"name": 3}, "name")
    ('tiny', '')
    """
    value = _at(data, path)
    return value.strip() if isinstance(value, str) else ""


def texts_in(data: object, *path: str) -> list[str]:
    """Return the texts in the list at a path."""
    return [item.strip() for item in _list_at(data, path) if isinstance(item, str) and item.strip()]


def rows_in(data: object, *path: str) -> list[Data]:
    """Return the objects in the list at a path."""
    return [item for item in _list_at(data, path) if isinstance(item, dict)]


def mapping_in(data: object, *path: str) -> Data:
    """Return the object at a path."""
    value = _at(data, path)
    return value if isinstance(value, dict) else {}


def span_in(data: object, *path: str) -> tuple[float, float] | None:
    """Return the two ends at a path.

    >>> span_in({"range": [28, 61]}, "range"), span_in({"range": [28, None]}, "range")
    ((28, 61), None)
    """
    ends = [number_in({"end": item}, "end") for item in _list_at(data, path)]
    if len(ends) != 2 or ends[0] is None or ends[1] is None:
        return None
    return ends[0], ends[1]


def _list_at(data: object, path: tuple[str, ...]) -> list[Any]:
    value = _at(data, path)
    return value if isinstance(value, list) else []


def _at(data: object, path: tuple[str, ...]) -> object:
    for key in path:
        data = data.get(key) if isinstance(data, dict) else None
    return data


PEAK_KINDS = ("device", "reserved", "allocated")


@dataclass(frozen=True)
class MemoryParts:
    """What is alive at the predicted peak, and what there is room for."""

    micro_batch: float | None
    parts: tuple[tuple[str, float], ...]
    growth: dict[str, float | None]
    peak_bytes: float
    upper_bytes: float | None
    limit_bytes: float | None
    source: str


@dataclass(frozen=True)
class Trial:
    """One probe of a fit; where it ran out of memory there is no peak."""

    micro_batch: float
    peak_bytes: float | None
    outcome: str


@dataclass(frozen=True)
class Peaks:
    """Peak against micro-batch: probes, the predicted line, the limit and the answer."""

    trials: tuple[Trial, ...]
    kind: str
    fixed_bytes: float | None
    bytes_per_sample: float | None
    line_source: str
    limit_bytes: float | None
    micro_batch: float | None
    is_certified: bool


@dataclass(frozen=True)
class Point:
    """What was measured or predicted at a batch, with its ends: samples a second, or time over that of the best."""

    batch: float
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Moment:
    """The critical batch and the loss at one step; what is not resolved is None."""

    step: float
    value: float | None
    low: float | None
    high: float | None
    loss: float | None


def is_far_below(used: float, limit: float | None) -> bool:
    """Whether what is used would be a sliver beside what there is, so that both have no place on one axis.

    >>> is_far_below(12.0, 21_000.0), is_far_below(500.0, 512.0), is_far_below(500.0, None)
    (True, False, False)
    """
    return limit is not None and used < limit / 3


def memory_parts(run: Data) -> MemoryParts | None:
    """Read the parts of the predicted peak."""
    record = section_of(run, "estimate")
    parts = tuple(
        (str(name), size)
        for name in mapping_in(record, "parts")
        if (size := number_in(record, "parts", name)) is not None and size > 0
    )
    if not parts:
        return None
    # The parts are those of the largest kind of peak that the device has.
    kind = next((kind for kind in PEAK_KINDS if number_in(record, "peak_bytes", kind) is not None), None)
    peak = None if kind is None else number_in(record, "peak_bytes", kind)
    return MemoryParts(
        number_in(record, "micro_batch"),
        parts,
        {name: number_in(record, "grows_with_batch", name) for name, _ in parts},
        sum(size for _, size in parts) if peak is None else peak,
        None if kind is None else number_in(record, "upper_bytes", kind),
        limit_bytes(run),
        text_in(record, "source"),
    )


def limit_bytes(run: Data) -> float | None:
    """Read how much memory there is: the budget, or the card's."""
    places = (("estimate", "limit_bytes"), ("fit", "limit_bytes"), ("workload", "memory_bytes"), ("workload", "memory"))
    limits = (number_in(section_of(run, section), key) for section, key in places)
    return next((limit for limit in limits if limit is not None and limit > 0), None)


def peaks(run: Data) -> Peaks | None:
    """Read the probes of the fit and the line that was predicted."""
    record = section_of(run, "fit")
    shape = mapping_in(record, "shape")
    rows = [row for row in rows_in(record, "trials") if mapping_in(row, "shape") == shape]
    kinds = [k for k in PEAK_KINDS if any(number_in(row, "peak_bytes", k) is not None for row in rows)]
    kind = kinds[0] if kinds else "device"
    trials = tuple(
        Trial(size, number_in(row, "peak_bytes", kind), text_in(row, "outcome"))
        for row in rows
        if (size := number_in(row, "micro_batch")) is not None and size > 0
    )
    if not trials:
        return None
    return Peaks(
        tuple(sorted(trials, key=lambda trial: trial.micro_batch)),
        kind,
        number_in(record, "line", "fixed_bytes"),
        number_in(record, "line", "bytes_per_sample"),
        text_in(record, "line", "source"),
        number_in(record, "limit_bytes"),
        number_in(record, "micro_batch"),
        mapping_in(run, "fit").get("certified") is True,
    )


def speeds(run: Data) -> tuple[Point, ...]:
    """Read the throughput, each row's spread turned from seconds into samples per second."""
    rows = []
    for row in rows_in(section_of(run, "throughput"), "rows"):
        size, rate, middle = (number_in(row, key) for key in ("micro_batch", "samples_per_second", "seconds"))
        if size is None or rate is None or size <= 0 or rate <= 0:
            continue
        slow, fast = number_in(row, "high_seconds"), number_in(row, "low_seconds")
        low = rate if not slow or not middle else rate * middle / slow
        high = rate if not fast or not middle else rate * middle / fast
        rows.append(Point(size, rate, min(low, rate), max(high, rate)))
    return tuple(sorted(rows, key=lambda row: row.batch))


def moments(run: Data) -> tuple[Moment, ...]:
    """Read the critical batch along training."""
    rows = rows_in(section_of(run, "noise"), "history")
    points = [
        Moment(step, _positive(row, "value"), _positive(row, "low"), _positive(row, "high"), number_in(row, "loss"))
        for row in rows
        if (step := number_in(row, "step")) is not None
    ]
    return tuple(sorted(points, key=lambda moment: moment.step))


def times_to_target(run: Data) -> tuple[Point, ...]:
    """Read the time to the loss against the batch."""
    rows = []
    for row in rows_in(section_of(run, "recommendation"), "time_to_target"):
        batch, ratio = _positive(row, "effective_batch"), _positive(row, "ratio")
        if batch is not None and ratio is not None:
            low, high = _positive(row, "low"), _positive(row, "high")
            rows.append(Point(batch, ratio, min(low or ratio, ratio), max(high or ratio, ratio)))
    return tuple(sorted(rows, key=lambda row: row.batch))


def raced(run: Data) -> tuple[Point, ...]:
    """Read the batches of a race, with their time as a multiple of the soonest: the middle one lies on the curve."""
    record, curve = section_of(run, "race"), times_to_target(run)
    middle = _positive(record or {}, "middle")
    if middle is None or not curve:
        return ()
    near = min(curve, key=lambda point: abs(math.log(point.batch / middle)))
    points = [Point(middle, near.value, near.value, near.value)]
    for row in rows_in(record, "rivals"):
        ratio, batch = mapping_in(row, "time_ratio"), _positive(row, "batch")
        value, low = _positive(ratio, "value"), _positive(ratio, "low")
        if batch is not None and value is not None and low is not None:
            high = _positive(ratio, "high") or math.inf
            points.append(Point(batch, near.value * value, near.value * low, near.value * high))
    return tuple(sorted(points, key=lambda point: point.batch))


def good_range(run: Data) -> tuple[float, float] | None:
    """Read the batches that are as good."""
    return span_in(section_of(run, "recommendation"), "range_within_5_percent")


def _positive(row: Data, key: str) -> float | None:
    value = number_in(row, key)
    return value if value is not None and value > 0 else None
