"""What crosses processes and ranks in a fit: records with named fields, each with `to_dict` and `from_dict`.

Promises:
- `from_dict(json.loads(json.dumps(record.to_dict())))` is the record again;
- a report is an outcome, an error or an interrupt, an instruction a job, an answer or an error: exactly one of them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from batchwright.device.outcome import Outcome
from batchwright.errors import BatchwrightError, error_from_dict
from batchwright.fitting.fit_result import Fit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchwright.workload import Workload

# The rule of a probe whose process crashed under a limit.
CRASHED = "crashed"
# The rule of a probe that was ended because it had no point any more.
STOPPED = "stopped"


@dataclass(frozen=True)
class Rendezvous:
    """Where the child ranks of one probe meet."""

    host: str
    port: int
    prefix: str
    rank: int
    world_size: int
    local_rank: int


@dataclass(frozen=True)
class Job:
    """One probe: which workload, how large, where, and within how many bytes.

    The workload is a target (`path.py:function`) that the child loads itself, or a file that holds it pickled.
    """

    micro_batch: int
    target: str | None = None
    pickled: str | None = None
    on: str = "cpu"
    limit_bytes: int | None = None
    shape: dict[str, Any] = field(default_factory=dict)
    accumulation: int = 1
    clip_norm: float | None = None
    only_evaluate: bool = False
    order: tuple[int, ...] | None = None
    rendezvous: Rendezvous | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the job as plain data."""
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Job:
        """Read back what `to_dict` wrote."""
        meeting, order = data["rendezvous"], data["order"]
        job = Job(**{**data, "rendezvous": Rendezvous(**meeting) if meeting else None})
        return replace(job, order=None if order is None else tuple(order))

    def select_part(self, workload: Workload) -> Workload:
        """Return the workload as this job probes it: its longest samples first, or only what evaluation does."""
        if self.order is not None:
            from torch.utils.data import Subset

            workload = replace(workload, data=Subset(workload.data, list(self.order)))
        if not self.only_evaluate:
            return workload
        # What is left runs under no_grad; a workload without an `evaluate` evaluates its loss, and generates if it can.
        if workload.evaluate is not None:
            return replace(workload, optimizer=None, scaler=None, loss=None, generate=None)
        return replace(workload, optimizer=None, scaler=None)


@dataclass(frozen=True)
class ProbeReport:
    """How a probe ended in the process that ran it: an outcome, a deliberate error, or an interrupt."""

    outcome: Outcome | None = None
    error: BatchwrightError | None = None
    is_interrupted: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {
            "outcome": self.outcome.to_dict() if self.outcome else None,
            "error": self.error.to_dict() if self.error else None,
            "is_interrupted": self.is_interrupted,
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> ProbeReport:
        """Read back what `to_dict` wrote."""
        return ProbeReport(
            outcome=Outcome.from_dict(data["outcome"]) if data["outcome"] else None,
            error=error_from_dict(data["error"]) if data["error"] else None,
            is_interrupted=data["is_interrupted"],
        )

    def unwrap(self) -> Outcome:
        """Return the outcome, or raise what came in its place."""
        if self.is_interrupted:
            raise KeyboardInterrupt
        if self.error is not None:
            raise self.error
        assert self.outcome is not None
        return self.outcome


@dataclass(frozen=True)
class Instruction:
    """What the leading rank has all ranks do next: run a job, or end with the answer or with the error."""

    job: Job | None = None
    answer: Fit | None = None
    error: BatchwrightError | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the instruction as plain data."""
        return {
            "job": self.job.to_dict() if self.job else None,
            "answer": self.answer.to_dict() if self.answer else None,
            "error": self.error.to_dict() if self.error else None,
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Instruction:
        """Read back what `to_dict` wrote."""
        return Instruction(
            job=Job.from_dict(data["job"]) if data["job"] else None,
            answer=Fit.from_dict(data["answer"]) if data["answer"] else None,
            error=error_from_dict(data["error"]) if data["error"] else None,
        )
