"""The work of a step as plain data: what a program's own process hands over to the one that asked for its time.

Promises:
- what is read is what was written, to the number;
- most layers of a model repeat each other: equal work is written once.
"""

from __future__ import annotations

from typing import Any

from batchwright.trace.work import StepWork, Work


def pack_work(step: StepWork) -> dict[str, Any]:
    """Return a step's work as JSON takes it.

    >>> step = StepWork((Work("aten.mm", "matmul", 8, 4, 2, 1, "fp16", dims=(1, 2, 2, 1)),) * 2, ("a", "b"), 3)
    >>> packed = pack_work(step)
    >>> len(packed["kinds"]), unpack_work(packed) == step
    (1, True)
    """
    kinds = {work: number for number, work in enumerate(dict.fromkeys(step.entries))}
    modules = {name: number for number, name in enumerate(dict.fromkeys(step.modules))}
    return {
        "kinds": [list(work) for work in kinds],
        "modules": list(modules),
        "entries": [[kinds[work], modules[name]] for work, name in zip(step.entries, step.modules, strict=True)],
        "num_views": step.num_views,
    }


def unpack_work(packed: dict[str, Any]) -> StepWork:
    """Read back what `pack_work` wrote."""
    kinds = [Work(*row)._replace(dims=tuple(row[Work._fields.index("dims")])) for row in packed["kinds"]]
    entries = tuple(kinds[kind] for kind, _ in packed["entries"])
    return StepWork(entries, tuple(packed["modules"][name] for _, name in packed["entries"]), packed["num_views"])
