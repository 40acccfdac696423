"""How often torch.compile compiled, and how long that took: no part of what a step costs."""

from __future__ import annotations

import sys
from dataclasses import dataclass

# Forward graphs, and backward graphs that are compiled when the first backward runs. Names as of torch 2.13; where
# they change, the count stays right and the time is no longer taken off.
_STAGES = ("_compile.compile_inner", "backward._backward_impl")


@dataclass(frozen=True)
class Compilations:
    """Graphs compiled in this process and the seconds they took.

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
