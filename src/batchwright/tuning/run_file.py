"""What the sections of a run say, as the objects that the arithmetic takes.

A run that is taken up again has only its file: so everything after a measurement reads the section, not the object.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchwright.errors import InvalidInputError
from batchwright.planning.critical_batch import CriticalBatch
from batchwright.planning.times import TimedPoint, TimeModel, fit_times
from batchwright.user_files import read_text, replace_file

if TYPE_CHECKING:
    from batchwright.planning.plan import Plan


# A run as one JSON file: written whole or not at all, and read back with a clear word where it cannot be.
#
# Promises:
# - every section is there: what `--json` of its command prints, or `{"skipped": reason}`.

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
# What a run that is taken up again reads of each section (known.py, advise_run.py); everything else is only shown.
_NEEDED: dict[str, dict[str, Any]] = {
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
        "ratio": _MAYBE,
        "critical_batch": _CRITICAL,
        "branches": [{"batch": int, "learning_rate_factor": _MAYBE, "mean_steps": _MAYBE}],
    },
}


def new_run(created: str) -> dict[str, Any]:
    """Return a run of which nothing has been done.

    >>> new_run("2026-11-16")["fit"]
    {'skipped': 'not reached'}
    """
    # Branches are no command of their own, and may be missing.
    empty = {name: {"skipped": "not reached"} for name in (*SECTIONS, "branches")}
    return {"schema": SCHEMA, "kind": KIND, "created": created, "finished": False, **empty}


def is_done(section: dict[str, Any]) -> bool:
    """Whether a section holds an answer; that of `noise` has a `skipped` of its own, which counts steps.

    >>> is_done({"skipped": "as asked"}), is_done({"micro_batch": 8}), is_done({"skipped": {"not finite": 2}})
    (False, True, True)
    """
    return not isinstance(section.get("skipped"), str)


def write_run(run: dict[str, Any], file: Path) -> None:
    """Replace the file by this run; a number that is none, or infinite, is written as null."""
    text = json.dumps(_finite(run), indent=1, allow_nan=False) + "\n"
    replace_file(file, text.encode(), what="the run", option="--run-file FILE")


def read_run_file(file: str | Path) -> dict[str, Any]:
    """Return the run in a file."""
    path = Path(file)
    try:
        text = read_text(path)
    except FileNotFoundError:
        raise InvalidInputError(
            f"no run at '{path}'.", remedy="batchwright tune TARGET writes one; --run-file FILE says where"
        ) from None
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
    run = {"branches": {"skipped": "not reached"}, **run}
    missing = [name for name in (*SECTIONS, "branches") if not isinstance(run.get(name), dict)]
    if missing:
        raise _damaged(path, f"it has no {', '.join(missing)}")
    return run


def read_run_to_resume(file: str | Path) -> tuple[dict[str, Any], list[str]]:
    """Return the run in a file, and the sections that are damaged, which are to be measured again.

    A workload that is damaged cannot be told from another one, so there is nothing to go on with.
    """
    run = read_run_file(file)
    damaged = [name for name, needed in _NEEDED.items() if is_done(run[name]) and not _holds(run[name], needed)]
    if "workload" in damaged or not is_done(run["workload"]):
        raise _damaged(Path(file), "its section workload does not say what was asked")
    return {**run, **{name: {"skipped": "its section was damaged"} for name in damaged}}, damaged


def _damaged(path: Path, why: str) -> InvalidInputError:
    return InvalidInputError(
        f"the run at '{path}' is damaged: {why}.",
        remedy="batchwright tune TARGET --run-file FILE, which writes it anew",
    )


def _holds(value: Any, needed: Any) -> bool:
    """Whether a value is of the type that is needed, or has every part that is; of several it must be one.

    >>> _holds({"size": 8}, {"size": int}), _holds({"size": "8"}, {"size": (int, None)}), _holds({}, {"size": int})
    (True, False, False)
    """
    if isinstance(needed, tuple):
        return any(_holds(value, each) for each in needed)
    if isinstance(needed, dict):
        return isinstance(value, dict) and all(name in value and _holds(value[name], needed[name]) for name in needed)
    if isinstance(needed, list):
        return isinstance(value, list) and all(_holds(each, needed[0]) for each in value)
    if needed is None or isinstance(value, bool):  # a truth value is an int to Python, and no count
        return value is needed or (needed is bool and isinstance(value, bool))
    return isinstance(value, needed)


def _finite(value: Any) -> Any:
    """Return plain data with null for what JSON has no number for.

    >>> _finite({"loss": [1.0, float("nan")]})
    {'loss': [1.0, None]}
    """
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
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
class Known:
    """A run, read."""

    run: dict[str, Any]

    def section(self, name: str) -> dict[str, Any] | None:
        """Return a section that was answered."""
        section: dict[str, Any] = self.run[name]
        return section if is_done(section) else None

    @property
    def micro_batch(self) -> int | None:
        """The largest that fits."""
        found = self.section("fit")
        size = None if found is None else found["micro_batch"]
        return size if isinstance(size, int) else None

    @property
    def nothing_fits(self) -> bool:
        """Whether a fit has found that not even the smallest micro-batch fits."""
        return self.run["fit"].get("nothing_fits") is True

    @property
    def why_no_larger(self) -> str:
        """Why the fit ended where it did, in its own words."""
        fit = self.section("fit") or {}
        return str(fit.get("reason") or "no larger one was asked for")

    @property
    def is_at_limit(self) -> bool:
        """Whether the fit ended at the largest size of interest, not at the memory."""
        fit = self.section("fit") or {}
        return fit.get("micro_batch") is not None and fit.get("micro_batch") == fit.get("limit")

    @property
    def memory_line(self) -> MemoryLine | None:
        """What a sample takes near the answer, where there was a limit: measured by the fit, else as predicted."""
        fit, estimate = self.section("fit"), self.section("estimate")
        if fit is None or not fit["micro_batch"] or not fit.get("limit_bytes"):
            return None
        if fit.get("line"):
            fixed, slope = fit["line"]["fixed_bytes"], fit["line"]["bytes_per_sample"]
        elif estimate is not None:
            # A fit that was remembered has one probe: its peak, and the slope of the trace.
            slope = sum(grown or 0 for grown in estimate["grows_with_batch"].values())
            peak = next((value for value in reversed(fit["peak_bytes"].values()) if value), fit["limit_bytes"])
            fixed = max(peak - slope * fit["micro_batch"], 0)
        else:
            return None
        return MemoryLine(fit["limit_bytes"], fixed, slope, fit["limit"]) if slope > 0 else None

    @property
    def fastest_micro_batch(self) -> int | None:
        """The smallest that is within 5 % of the best throughput."""
        found = self.section("throughput")
        return None if found is None else int(found["fastest_micro_batch"])

    @property
    def timed_devices(self) -> int:
        """On how many devices steps were timed."""
        return int((self.section("throughput") or {}).get("devices") or 1)

    @property
    def times(self) -> TimeModel | None:
        """The time model of the throughput."""
        found = self.section("throughput")
        if found is None:
            return None
        points = [TimedPoint(p["micro_batch"], p["seconds"], p["accumulation"]) for p in found["times"]["points"]]
        return fit_times(points)

    def step_seconds(self, plan: Plan) -> float | None:
        """What one step of a plan takes: as it was timed, else by the time model."""
        if self.times is None:
            return None
        for point in self.times.points:
            if (point.micro_batch, point.accumulation) == (plan.micro_batch, plan.accumulation):
                return point.seconds
        return self.times.step_seconds(plan.split)

    @property
    def noise_scale(self) -> CriticalBatch | None:
        """The critical batch by the noise scale."""
        found = self.section("noise")
        return None if found is None else critical_from(found["critical_batch"])

    @property
    def samples(self) -> int | None:
        """How many samples there are."""
        found = self.section("workload")
        return None if found is None else found["samples"]


def critical_from(data: dict[str, Any]) -> CriticalBatch:
    """Return the critical batch that `to_dict` wrote down.

    >>> print(critical_from(CriticalBatch(300.0, 200.0, 500.0, "samples", 50).to_dict()))
    300 [200, 500] samples
    """

    def number(name: str, otherwise: float) -> float:
        return otherwise if data[name] is None else float(data[name])

    return CriticalBatch(
        number("value", math.inf),
        number("low", 0.0),
        number("high", math.inf),
        str(data["unit"]),
        int(data["observations"]),
        steps_needed=data["steps_needed"],
        trace=number("trace", math.nan),
        signal=number("signal", math.nan),
        samples_per_unit=data.get("samples_per_unit"),
    )
