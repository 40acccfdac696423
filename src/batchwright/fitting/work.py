"""What was handed in to be fitted: a target, a workload, a function that makes one, or a plain step.

Promises:
- what can be loaded by another process is known as such;
- a live model that is already spread over ranks is refused, with the reason.
"""

from __future__ import annotations

import inspect
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from batchwright.errors import InvalidInputError
from batchwright.targets import load_workload
from batchwright.units import shortened
from batchwright.workload import Workload

Step = Callable[[int], Any]


@dataclass(frozen=True)
class Work:
    """A workload, with the target another process loads it from if there is one; or a plain step."""

    name: str
    workload: Workload | None = None
    target: str | None = None
    step: Step | None = None

    def pickled(self) -> bytes:
        """Return the workload for a process that cannot load it by name."""
        try:
            return pickle.dumps(self.workload)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise InvalidInputError(
                f"the workload cannot be handed to another process: {error}.",
                remedy='bw.fit("train.py:workload"), which a child loads by itself; or functions in place of lambdas',
            ) from None


def read_work(given: Workload | Step | str) -> Work:
    """Tell what was handed in."""
    if isinstance(given, str):
        workload = load_workload(given)
        return Work(workload.name, _checked(workload), target=given)
    if isinstance(given, Workload):
        return Work(given.name, _checked(given))
    if not callable(given):
        raise InvalidInputError(
            "fit takes a Workload, a function step(n), or a target such as train.py:workload; "
            f"received {shortened(given)}."
        )
    if _takes(given, 1):
        return Work(getattr(given, "__name__", "step"), step=given)
    if not _takes(given, 0):
        raise InvalidInputError(f"a step is called with the number of samples alone; received {shortened(given)}.")
    made = given()  # type: ignore[call-arg]
    if not isinstance(made, Workload):
        raise InvalidInputError(
            f"{getattr(given, '__name__', 'the function')}() takes no size, so it should make a Workload; "
            f"it returned {shortened(made)}.",
            remedy="def step(n): ..., which takes the number of samples",
        )
    return Work(made.name, _checked(made), target=_target_of(given))


def _target_of(function: Any) -> str | None:
    """Return `path.py:function` for a function that stands at the top of a file; None for any other."""
    module = sys.modules.get(getattr(function, "__module__", ""))
    name = getattr(function, "__qualname__", "")
    file = getattr(module, "__file__", None)
    if file is None or getattr(module, name, None) is not function or not Path(file).is_file():
        return None
    return f"{file}:{name}"


def _takes(function: Any, num_arguments: int) -> bool:
    try:
        inspect.signature(function).bind(*range(num_arguments))
    except TypeError:
        return False
    except ValueError:
        return num_arguments == 1  # some builtins have no signature
    return True


def _checked(workload: Workload) -> Workload:
    if workload.data is not None and len(workload.data) == 0:
        raise InvalidInputError("the workload's data is empty: there is no sample to probe with.")
    if isinstance(workload.model, nn.Module):
        refuse_spread(workload.model)
    return workload


def refuse_spread(model: nn.Module) -> None:
    """Refuse a live model under DDP or FSDP: one rank out of memory would leave the others waiting for ever."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    for module in model.modules():
        if isinstance(module, DistributedDataParallel | FullyShardedDataParallel | FSDPModule):
            raise InvalidInputError(
                f"the model is already spread over ranks ({type(module).__name__}), and a probe that runs out of "
                "memory on one rank leaves the others waiting in a collective that nothing can end.",
                remedy="model=a function that builds it, wrap=lambda model: DDP(model): probes then run in child ranks",
            )
