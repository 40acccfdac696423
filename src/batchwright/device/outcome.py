"""`Outcome`: what one probe did, the same for every device.

Promises:
- a verdict is one of three: it fits, it ran out of memory, or the user's code failed;
- a kind of peak that a device does not have is None, never 0;
- a failure keeps its exception with the user's traceback, but none of the tensors that its frames held.
"""

from __future__ import annotations

import gc
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from batchwright.device.out_of_memory import find_rule, is_too_small
from batchwright.errors import BatchwrightError
from batchwright.targets import users_traceback_text
from batchwright.units import PeakBytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


# Forward graphs, and backward graphs that are compiled when the first backward runs. Names as of torch 2.13; where
# they change, the count stays right and the time is no longer taken off.
_STAGES = ("_compile.compile_inner", "backward._backward_impl")


@dataclass(frozen=True)
class Compilations:
    """Graphs compiled in this process and the seconds they took: no part of what a step costs.

    >>> Compilations(3, 2.5) - Compilations(1, 0.5)
    Compilations(count=2, seconds=2.0)
    """

    count: int
    seconds: float

    @staticmethod
    def so_far() -> Compilations:
        """Read torch's own counters; nothing was compiled where they were never loaded."""
        dynamo = sys.modules.get("torch._dynamo.utils")
        if dynamo is None:
            return Compilations(0, 0.0)
        times = [t for name in _STAGES for t in dynamo.compilation_time_metrics.get(name, [])]
        return Compilations(dynamo.counters["stats"]["unique_graphs"], float(sum(times)))

    def __sub__(self, before: Compilations) -> Compilations:
        return Compilations(self.count - before.count, self.seconds - before.seconds)


Verdict = Literal["fits", "out_of_memory", "failed"]


@dataclass(frozen=True)
class Outcome:
    """One probe at one size.

    >>> ran = Outcome(8, {}, "fits", PeakBytes(allocated=2**20), seconds=1.5, step_seconds=0.5)
    >>> ran.fits, ran.samples_per_second
    (True, 16.0)

    `seconds` are those of the whole probe without what torch.compile took, `step_seconds` those of its last full step.
    After out-of-memory the peak is what had been reached by then, a lower bound of what the size needs, or None.
    """

    micro_batch: int
    shape: dict[str, Any]
    verdict: Verdict
    peak_bytes: PeakBytes | None
    seconds: float
    step_seconds: float | None = None
    accumulation: int = 1
    rule: str | None = None
    doubt: str = ""
    is_too_small: bool = False
    """The step cannot run on so few samples (BatchNorm over one); the verdict is `failed`, but it is nobody's bug."""
    num_compilations: int = 0
    error: str | None = None
    traceback: str | None = field(default=None, repr=False)
    exception: Exception | None = field(default=None, repr=False, compare=False)

    @property
    def fits(self) -> bool:
        """Whether full steps ran at this size."""
        return self.verdict == "fits"

    @property
    def samples_per_second(self) -> float | None:
        """Samples of a step over the seconds of the last one; None where no step ended."""
        return self.micro_batch * self.accumulation / self.step_seconds if self.step_seconds else None

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as plain data."""
        return {
            "micro_batch": self.micro_batch,
            "shape": dict(self.shape),
            "accumulation": self.accumulation,
            "outcome": self.verdict,
            "peak_bytes": asdict(self.peak_bytes) if self.peak_bytes else None,
            "seconds": self.seconds,
            "step_seconds": self.step_seconds,
            "samples_per_second": self.samples_per_second,
            "num_compilations": self.num_compilations,
            "rule": self.rule,
            "doubt": self.doubt or None,
            "error": self.error,
            "is_too_small": self.is_too_small,
            "traceback": self.traceback,
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Outcome:
        """Read back what `to_dict` wrote, in another process or in an earlier run.

        >>> ran = Outcome(8, {}, "fits", PeakBytes(device=2**20), seconds=1.5, step_seconds=0.5)
        >>> Outcome.from_dict(ran.to_dict()) == ran
        True
        """
        fields = {key: value for key, value in data.items() if key not in ("outcome", "samples_per_second")}
        fields["peak_bytes"] = PeakBytes(**data["peak_bytes"]) if data["peak_bytes"] else None
        return Outcome(**{**fields, "verdict": data["outcome"], "doubt": data["doubt"] or ""})


def judge(
    run: Callable[[], tuple[float, ...]],
    *,
    micro_batch: int,
    shape: Mapping[str, Any],
    accumulation: int,
    peak: Callable[[], PeakBytes | None],
) -> Outcome:
    """Run a probe and say how it ended; `peak` is read at the end, whatever it was.

    What batchwright raises on purpose, and an interrupt, are no outcome: they pass through.
    """
    start = time.perf_counter()
    compiled_before = Compilations.so_far()
    outcome = Outcome(micro_batch, dict(shape), "fits", None, 0.0, accumulation=accumulation)
    try:
        outcome = replace(outcome, step_seconds=run()[-1])
    except BatchwrightError:
        raise
    except Exception as error:
        rule = find_rule(error)
        message = "".join(traceback.format_exception_only(error)).strip()
        if rule is not None:
            outcome = replace(outcome, verdict="out_of_memory", error=message, rule=rule.name, doubt=rule.doubt)
        else:
            outcome = replace(
                outcome,
                verdict="failed",
                error=message,
                is_too_small=is_too_small(error),
                traceback=users_traceback_text(error),
                exception=error,
            )
        _forget_locals(error)
    compiled = Compilations.so_far() - compiled_before
    seconds = max(0.0, time.perf_counter() - start - compiled.seconds)
    peak_bytes = peak()
    # Outside the except block, where the traceback no longer holds the failed step's tensors; models are often in
    # reference cycles, so counting references alone does not free them.
    gc.collect()
    return replace(outcome, peak_bytes=peak_bytes, seconds=seconds, num_compilations=compiled.count)


def _forget_locals(error: BaseException | None) -> None:
    """Let go of the tensors in the frames of an exception and of those it came from; the lines stay readable."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
