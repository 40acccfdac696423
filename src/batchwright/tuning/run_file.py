"""A run as one JSON file, and its sections as the objects that the arithmetic takes.

A run that is resumed has only its file: so everything after a measurement reads the section, not the result.

Promises:
- a run is written whole or not at all, and one that cannot be read is refused with the reason;
- every section is there: what `--json` of its command prints, or `{"skipped": reason}`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchwright.errors import InvalidInputError
from batchwright.planning.critical_batch import CriticalBatch, fit_critical
from batchwright.planning.horizon import Course, Stretch
from batchwright.planning.likely_time import RacedSteps
from batchwright.planning.times import TimedPoint, TimeModel, fit_times
from batchwright.units import LARGEST_COUNT
from batchwright.user_files import read_text, replace_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from batchwright.planning.plan import Plan


Section = dict[str, Any]
"""Plain data, as JSON holds it."""
Run = dict[str, Any]
"""All sections by name, beside `schema`, `kind`, `created` and `finished`."""

KIND, SCHEMA = "batchwright run", 1
SECTIONS = ("workload", "estimate", "fit", "throughput", "audit", "noise", "plan", "recommendation")
_NUMBER = (int, float)
_MAYBE = (*_NUMBER, None)
_CRITICAL = {
    **dict.fromkeys(("value", "low", "high", "trace", "signal", "steps_needed"), _MAYBE),
    "unit": str,
    "observations": int,
}
_LINE = {"fixed_bytes": _NUMBER, "bytes_per_sample": _NUMBER}
# What `Measured` reads of each section; everything else is only shown.
_NEEDED: dict[str, Section] = {
    "workload": {"name": str, "samples": (int, None), "optimizer": (str, None), "learning_rate": _MAYBE},
    "estimate": {
        "micro_batch": int,
        "peak_bytes": dict,
        "parts": dict,
        "grows_with_batch": dict,
        "what_if": [{"change": str, "peak_bytes": _MAYBE, "note": str}],
    },
    "fit": {"micro_batch": int, "limit": _MAYBE, "limit_bytes": _MAYBE, "line": (_LINE, None), "peak_bytes": dict},
    "throughput": {
        "fastest_micro_batch": int,
        "times": {"points": [{"micro_batch": int, "seconds": _NUMBER, "accumulation": (int, None)}]},
    },
    "audit": {"exact": (bool, None), "what": str, "cause": (str, None)},
    "noise": {"effective_batch": _NUMBER, "critical_batch": _CRITICAL},
    "branches": {
        "critical_batch": _CRITICAL,
        "branches": [{"batch": int, "learning_rate_factor": _MAYBE, "mean_steps": _MAYBE}],
    },
    "race": {
        "winner": int,
        "factors": [{"batch": int, "learning_rate_factor": _NUMBER}],
        "shown": [{"batch": int, "other": int, "log_ratio": _NUMBER, "error": _NUMBER, "growth": _NUMBER}],
        "reaches_horizon": bool,
        "summary": str,
    },
    "rate": {
        "batch": int,
        "learning_rate_factor": _MAYBE,
        "is_lowest_tried": bool,
        "is_highest_tried": bool,
        "too_high_from": _MAYBE,
    },
}
_STRETCH: dict[str, Any] = {
    "step": int,
    "observations": int,
    "units": _NUMBER,
    "samples": _NUMBER,
    "trace": _NUMBER,
    "signal": _NUMBER,
    "loss": _MAYBE,
}
# Stages that are no command of their own, and may be missing in a run.
_MAY_BE_MISSING = ("branches", "race", "rate")


def new_run(created: str) -> Run:
    """Return a run of which nothing has been done.

    >>> new_run("2026-11-16")["fit"]
    {'skipped': 'not reached'}
    """
    empty = {name: {"skipped": "not reached"} for name in (*SECTIONS, *_MAY_BE_MISSING)}
    return {"schema": SCHEMA, "kind": KIND, "created": created, "finished": False, **empty}


def is_done(section: Section) -> bool:
    """Whether a section holds an answer; that of `noise` has a `skipped` of its own, which counts steps.

    >>> is_done({"skipped": "as asked"}), is_done({"micro_batch": 8}), is_done({"skipped": {"not finite": 2}})
    (False, True, True)
    """
    return not isinstance(section.get("skipped"), str)


def write_run(run: Run, file: Path) -> None:
    """Replace the file by this run; a number that is none, or infinite, is written as null."""
    text = json.dumps(_finite(run), indent=1, allow_nan=False) + "\n"
    replace_file(file, text.encode(), what="the run", option="file=FILE")


def read_run_file(file: str | Path) -> Run:
    """Return the run in a file."""
    path = Path(file)
    try:
        text = read_text(path)
    except FileNotFoundError:
        raise InvalidInputError(f"no run at '{path}'.", remedy="the file that tune wrote") from None
    except OSError as error:
        raise InvalidInputError(
            f"the run at '{path}' cannot be read: {error.strerror}.", remedy="the file that tune wrote"
        ) from None
    try:
        run = _finite(json.loads(text))
    except (ValueError, RecursionError) as error:
        place = f" from line {error.lineno} on" if isinstance(error, json.JSONDecodeError) else ""
        raise _damaged(path, f"it is no JSON{place} ({error})") from None
    if not isinstance(run, dict) or run.get("kind") != KIND:
        raise InvalidInputError(f"'{path}' is no run of batchwright tune.", remedy="the file that tune wrote")
    schema = run.get("schema")
    if isinstance(schema, bool) or not isinstance(schema, int) or schema < 1:
        raise _damaged(path, "it does not say which schema it has")
    if schema > SCHEMA:
        raise InvalidInputError(
            f"the run at '{path}' has schema {schema}, and this batchwright reads up to {SCHEMA}.",
            remedy="pip install --upgrade batchwright",
        )
    run = {**{name: {"skipped": "not reached"} for name in _MAY_BE_MISSING}, **run}
    missing = [name for name in (*SECTIONS, *_MAY_BE_MISSING) if not isinstance(run.get(name), dict)]
    if missing:
        raise _damaged(path, f"it has no {', '.join(missing)}")
    return run


def read_run_to_resume(file: str | Path) -> tuple[Run, list[str]]:
    """Return the run in a file, and the sections that are damaged, which are to be measured again.

    A damaged workload may be another one, so there is nothing to resume.
    """
    run = read_run_file(file)
    damaged = [name for name, needed in _NEEDED.items() if is_done(run[name]) and not _holds(run[name], needed)]
    if "workload" in damaged or not is_done(run["workload"]):
        raise _damaged(Path(file), "its section workload does not say what was asked")
    return {**run, **{name: {"skipped": "its section was damaged"} for name in damaged}}, damaged


def _damaged(path: Path, reason: str) -> InvalidInputError:
    return InvalidInputError(
        f"the run at '{path}' is damaged: {reason}.",
        remedy="the file of another run, or tune again, which replaces it",
    )


def _holds(value: Any, needed: Any) -> bool:
    """Whether a value is of the type that is needed, or has every part that is; of several it must be one.

    >>> _holds({"size": 8}, {"size": int}), _holds({"size": "8"}, {"size": (int, None)}), _holds({}, {"size": int})
    (True, False, False)
    """
    if isinstance(needed, tuple):
        return any(_holds(value, kind) for kind in needed)
    if isinstance(needed, dict):
        return isinstance(value, dict) and all(name in value and _holds(value[name], needed[name]) for name in needed)
    if isinstance(needed, list):
        return isinstance(value, list) and all(_holds(item, needed[0]) for item in value)
    if needed is None or isinstance(value, bool):  # a truth value is an int to Python, and no count
        return value is needed or (needed is bool and isinstance(value, bool))
    return isinstance(value, needed)


def _finite(value: Any) -> Any:
    """Return plain data with null for what JSON has no number for.

    >>> _finite({"loss": [1.0, float("nan")]})
    {'loss': [1.0, None]}
    """
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class MemoryLine:
    """A limit, and the line along which memory grows with the micro-batch."""

    limit_bytes: int
    fixed_bytes: float
    bytes_per_sample: float
    limit: int
    """The largest micro-batch of interest."""

    def largest(self, limit_bytes: float) -> int:
        """Return the largest micro-batch within so many bytes.

        >>> MemoryLine(1000, 200, 10, limit=4096).largest(2000)
        180
        """
        return max(min(int((limit_bytes - self.fixed_bytes) // max(self.bytes_per_sample, 1)), self.limit), 1)


@dataclass(frozen=True)
class WorkloadSection:
    """What is trained."""

    name: str
    samples: int | None
    """None without a dataset."""
    optimizer: str | None
    learning_rate: float | None
    """None if parameter groups have different ones."""

    @classmethod
    def read(cls, section: Section) -> WorkloadSection:
        """Read the section `workload`."""
        return cls(**{argument.name: section[argument.name] for argument in fields(cls)})


@dataclass(frozen=True)
class FitSection:
    """The largest micro-batch that fits."""

    micro_batch: int | None
    limit: int | None
    """The largest size of interest."""
    limit_bytes: int | None
    line: tuple[float, float] | None
    """Bytes whatever the batch, and bytes of a sample; None if a single probe ran."""
    peak_bytes: int | None
    reason: str
    """Why no larger one, in the fit's own words."""

    @classmethod
    def read(cls, section: Section) -> FitSection:
        """Read the section `fit`."""
        line, peaks = section.get("line"), section.get("peak_bytes") or {}
        return cls(
            section["micro_batch"],
            section.get("limit"),
            section.get("limit_bytes"),
            (line["fixed_bytes"], line["bytes_per_sample"]) if line else None,
            next((peak for peak in reversed(peaks.values()) if peak), section.get("limit_bytes")),
            str(section.get("reason") or "no larger one was asked for"),
        )


@dataclass(frozen=True)
class EstimateSection:
    """What the trace predicts of memory."""

    micro_batch: int
    peak_bytes: int
    fixed_bytes: int
    """Weights, gradients and optimizer state, which do not grow with the batch."""
    bytes_per_sample: float
    checkpointing_peak_bytes: int | None
    checkpointing_note: str

    @classmethod
    def read(cls, section: Section) -> EstimateSection:
        """Read the section `estimate`."""
        parts, savings = section.get("parts", {}), section.get("what_if", ())
        saving: Section = next((saving for saving in savings if saving["change"] == "activation checkpointing"), {})
        return cls(
            section.get("micro_batch", 1),
            section.get("peak_bytes", {}).get("allocated", 0),
            sum(parts.get(name) or 0 for name in ("weights", "gradients", "optimizer")),
            sum(grown or 0 for grown in section.get("grows_with_batch", {}).values()),
            saving.get("peak_bytes"),
            saving.get("note") or "was not traced",
        )


def _read_times(section: Section) -> TimeModel:
    return fit_times([TimedPoint(p["micro_batch"], p["seconds"], p["accumulation"]) for p in section["points"]])


@dataclass(frozen=True)
class ThroughputSection:
    """How long steps take."""

    devices: int
    fastest_micro_batch: int
    """The smallest that is within 5 % of the best throughput."""
    times: TimeModel
    is_predicted: bool = False
    """Whether nothing ran: a card that is simulated."""
    interval: tuple[float, float] = (1.0, 1.0)
    """True over predicted seconds, in nine of ten cases."""
    by_devices: tuple[tuple[int, TimeModel], ...] = ()
    """Times on other numbers of devices, where they were predicted."""

    @classmethod
    def read(cls, section: Section) -> ThroughputSection:
        """Read the section `throughput`."""
        low, high = section.get("interval") or (1.0, 1.0)
        others = ((int(row["devices"]), _read_times(row["times"])) for row in section.get("by_devices") or ())
        return cls(
            int(section.get("devices") or 1),
            int(section["fastest_micro_batch"]),
            _read_times(section["times"]),
            section.get("source") == "predicted",
            (float(low), float(high)),
            tuple(others),
        )

    def step_seconds(self, plan: Plan) -> float:
        """Return what one step of a plan takes: as it was timed, else by the time model."""
        for point in self.times.points:
            if (point.micro_batch, point.accumulation) == (plan.micro_batch, plan.accumulation):
                return point.seconds
        return self.times.step_seconds(plan.split)


@dataclass(frozen=True)
class NoiseSection:
    """The noise scale, and the effective batch that was trained at."""

    effective_batch: float
    noise_scale: CriticalBatch
    course: Course | None
    """How noise scale and loss went along; None if samples were not counted."""

    @classmethod
    def read(cls, section: Section) -> NoiseSection:
        """Read the section `noise`."""
        scale = CriticalBatch.from_dict(section["critical_batch"])
        return cls(section["effective_batch"], scale, _read_course(section, scale))


def _read_course(section: Section, last: CriticalBatch) -> Course | None:
    in_samples = last.in_samples()
    if in_samples is None:
        return None
    rows = section.get("course")  # a run of an older version has none
    if rows is None or not _holds(rows, [_STRETCH]):
        rows = []
    stretches = (Stretch(**{**row, "loss": math.nan if row["loss"] is None else row["loss"]}) for row in rows)
    return Course(float(section["effective_batch"]), in_samples, tuple(stretches))


@dataclass(frozen=True)
class BranchEstimate:
    """The critical batch that branches from one place of a run measured."""

    critical_batch: CriticalBatch
    begin: float
    """Samples of the smallest batch before them."""
    end: float | None
    """Samples until that one's loss; None if it did not get there on every seed."""
    factors: Mapping[int, float]
    """The best learning rate by batch, in factors of the workload's own."""

    @classmethod
    def read(cls, section: Section) -> BranchEstimate:
        """Read what branches from one place showed."""
        rows = section.get("branches", ())
        reached = [row for row in rows if row["mean_steps"] is not None]
        factors = {row["batch"]: row["learning_rate_factor"] for row in reached if row["learning_rate_factor"]}
        begin = section.get("first_step", 0) * min((row["batch"] for row in rows), default=0)
        samples = reached[0]["batch"] * reached[0]["mean_steps"] if reached else None
        critical = fit_critical({row["batch"]: row["steps"] for row in reached if row.get("steps")})
        return cls(
            critical or CriticalBatch.from_dict(section["critical_batch"]),
            begin,
            None if samples is None else begin + samples,
            factors,
        )


@dataclass(frozen=True)
class BranchesSection:
    """What branches measured, by the place of the run where they began."""

    estimates: tuple[BranchEstimate, ...]

    @classmethod
    def read(cls, section: Section) -> BranchesSection:
        """Read the section `branches`."""
        return cls(tuple(map(BranchEstimate.read, (section, *(section.get("later") or ())))))

    @property
    def factors(self) -> Mapping[int, float]:
        """The best learning rate by batch, in the middle of all places."""
        by_batch: dict[int, list[float]] = {}
        for estimate in self.estimates:
            for batch, factor in estimate.factors.items():
                by_batch.setdefault(batch, []).append(math.log(factor))
        return {batch: math.exp(sum(logs) / len(logs)) for batch, logs in sorted(by_batch.items())}


@dataclass(frozen=True)
class RaceSection:
    """Which batch won a race."""

    winner: int
    factors: Mapping[int, float]
    """Of the workload's own rate, by batch."""
    shown: tuple[RacedSteps, ...]
    reaches_horizon: bool
    summary: str

    @classmethod
    def read(cls, section: Section) -> RaceSection:
        """Read the section `race`."""
        factors = {row["batch"]: row["learning_rate_factor"] for row in section["factors"]}
        shown = tuple(RacedSteps(**row) for row in section["shown"])
        return cls(section["winner"], factors, shown, section["reaches_horizon"], section["summary"])


@dataclass(frozen=True)
class RateSection:
    """The best of a few learning rates at one batch."""

    batch: int
    factor: float | None
    """Of the workload's own rate; None if the loss came down at none that was tried."""
    open_sides: tuple[bool, bool]
    """Whether no lower one was tried, and no higher one."""
    too_high: float
    """The lowest factor at which the loss did not come down; infinite if there was none."""

    @classmethod
    def read(cls, section: Section) -> RateSection:
        """Read the section `rate`."""
        sides = section["is_lowest_tried"], section["is_highest_tried"]
        return cls(section["batch"], section["learning_rate_factor"], sides, section["too_high_from"] or math.inf)


_READERS: dict[str, Callable[[Section], Any]] = {
    "workload": WorkloadSection.read,
    "fit": FitSection.read,
    "estimate": EstimateSection.read,
    "throughput": ThroughputSection.read,
    "noise": NoiseSection.read,
    "branches": BranchesSection.read,
    "race": RaceSection.read,
    "rate": RateSection.read,
}


@dataclass(frozen=True)
class Measured:
    """What a run has measured; a section that was skipped is None."""

    workload: WorkloadSection | None = None
    fit: FitSection | None = None
    estimate: EstimateSection | None = None
    throughput: ThroughputSection | None = None
    noise: NoiseSection | None = None
    branches: BranchesSection | None = None
    race: RaceSection | None = None
    rate: RateSection | None = None
    nothing_fits: bool = False
    """Whether a fit has shown that not even the smallest micro-batch fits."""

    @classmethod
    def read(cls, run: Run) -> Measured:
        """Read the sections of a run."""
        readers = {name: reader for name, reader in _READERS.items() if is_done(run[name])}
        sections = {name: reader(run[name]) for name, reader in readers.items()}
        return cls(**sections, nothing_fits=run["fit"].get("nothing_fits") is True)

    @property
    def micro_batch(self) -> int | None:
        """The largest that fits."""
        return None if self.fit is None else self.fit.micro_batch

    @property
    def samples(self) -> int | None:
        """How many samples the dataset has."""
        return None if self.workload is None else self.workload.samples

    @property
    def times(self) -> TimeModel | None:
        """The time model of the throughput."""
        return None if self.throughput is None else self.throughput.times

    @property
    def memory_line(self) -> MemoryLine | None:
        """What a sample takes near the answer, if there was a limit: measured by the fit, else as predicted."""
        fit, estimate = self.fit, self.estimate
        if fit is None or not fit.micro_batch or not fit.limit_bytes:
            return None
        if fit.line is not None:
            fixed, slope = fit.line
        elif estimate is not None:
            # A fit that was remembered has one probe: its peak, and the slope of the trace.
            slope = estimate.bytes_per_sample
            fixed = max((fit.peak_bytes or fit.limit_bytes) - slope * fit.micro_batch, 0)
        else:
            return None
        return MemoryLine(fit.limit_bytes, fixed, slope, fit.limit or LARGEST_COUNT) if slope > 0 else None
