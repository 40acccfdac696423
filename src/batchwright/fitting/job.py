"""What one probe is asked to do, as plain data that another process can read."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from batchwright.targets import load_workload

if TYPE_CHECKING:
    from batchwright.workload import Workload


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
    def from_dict(data: dict[str, Any]) -> Job:
        """Read back what `to_dict` wrote.

        >>> job = Job(8, target="train.py:workload", shape={"seq_len": 512})
        >>> Job.from_dict(job.to_dict()) == job
        True
        """
        meeting = data["rendezvous"]
        order = data["order"]
        return Job(
            **{
                **data,
                "rendezvous": Rendezvous(**meeting) if meeting else None,
                "order": None if order is None else tuple(order),
            }
        )

    def load(self) -> Workload:
        """Load the workload in the process that is to run it."""
        if self.target is not None:
            return load_workload(self.target)
        import pickle
        from pathlib import Path

        assert self.pickled is not None
        loaded: Workload = pickle.loads(Path(self.pickled).read_bytes())
        return loaded


def part_to_probe(workload: Workload, *, only_evaluate: bool, order: tuple[int, ...] | None) -> Workload:
    """Return the workload as a probe runs it: its longest samples first, or only what evaluation does."""
    if order is not None:
        from torch.utils.data import Subset

        workload = replace(workload, data=Subset(workload.data, list(order)))
    if not only_evaluate:
        return workload
    # What is left runs under no_grad; a workload without an `evaluate` evaluates its loss, and generates if it can.
    if workload.evaluate is not None:
        return replace(workload, optimizer=None, scaler=None, loss=None, generate=None)
    return replace(workload, optimizer=None, scaler=None)
