"""What the sections of a run say, as the objects that the arithmetic takes.

A run that is taken up again has only its file: so everything after a measurement reads the section, not the object.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchwright.noise.critical_batch import CriticalBatch
from batchwright.planning.times import TimedPoint, TimeModel, fit_times
from batchwright.tuning.run_file import is_done

if TYPE_CHECKING:
    from batchwright.planning.plan import Plan


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
