"""What was handed in to be fitted: a target, a workload, a function that makes one, or a plain step; and its data.

Promises:
- what can be loaded by another process is known as such;
- a live model that is already spread over ranks is refused, with the reason;
- the longest samples of a dataset are found by reading it through its own `__getitem__`: they decide whether a run
  survives its worst batch; a set too large to read in the time is read as far as that goes, and the result says so.
"""

from __future__ import annotations

import inspect
import pickle
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

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
    """Recognise what was handed in, and check it."""
    if isinstance(given, str):
        workload = load_workload(given)
        return Work(workload.name, _check(workload), target=given)
    if isinstance(given, Workload):
        return Work(given.name, _check(given))
    if not callable(given):
        raise InvalidInputError(
            "fit takes a Workload, a function step(n), or a target such as train.py:workload; "
            f"received {shortened(given)}."
        )
    if _takes(given, 1):
        return Work(getattr(given, "__name__", "step"), step=given)
    if not _takes(given, 0):
        raise InvalidInputError(f"a step is called with the number of samples alone; received {shortened(given)}.")
    workload = given()  # type: ignore[call-arg]
    if not isinstance(workload, Workload):
        raise InvalidInputError(
            f"{getattr(given, '__name__', 'the function')}() takes no size, so it should make a Workload; "
            f"it returned {shortened(workload)}.",
            remedy="def step(n): ..., which takes the number of samples",
        )
    return Work(workload.name, _check(workload), target=_target_of(given))


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


def _check(workload: Workload) -> Workload:
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


# Long enough for most sets; a larger one is read as far as this goes.
_SECONDS = 20.0


@dataclass(frozen=True)
class LongestFirst:
    """Numbers of samples, longest first; None if all that were read are equally long, so that any will do."""

    order: tuple[int, ...] | None
    note: str


def longest_first(data: Any, *, most: int, say: Callable[[str], None], seconds: float = _SECONDS) -> LongestFirst:
    """Read the samples and order them by length; at most `most` numbers are returned.

    >>> longest_first([torch.zeros(3), torch.zeros(9), torch.zeros(5)], most=2, say=print).order
    (1, 2)
    """
    say(f"reading {len(data):,} samples for the longest") if len(data) > 1000 else None
    sizes: list[int] = []
    end = time.monotonic() + seconds
    for index in range(len(data)):
        sizes.append(measure_length(data[index]))
        if time.monotonic() > end:
            break
    read = "" if len(sizes) == len(data) else f" of the first {len(sizes):,} of {len(data):,} samples"
    if len(set(sizes)) <= 1:
        return LongestFirst(None, f"all samples read are equally long{read and ','}{read}" if read else "")
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    # Those that were not read come last, so that sizes beyond what was read can still be tried.
    order += range(len(sizes), len(data))
    return LongestFirst(tuple(order[:most]), f"the longest samples{read} were probed")


def measure_length(sample: Any) -> int:
    """Count the numbers in a sample: elements of tensors and arrays, entries of lists, characters of texts.

    >>> measure_length({"ids": torch.zeros(4, 2), "text": "abc", "label": 1})
    12
    """
    if isinstance(sample, Mapping):
        sample = dict(sample)
    return sum(_count(leaf) for leaf in tree_leaves(sample))


def _count(leaf: Any) -> int:
    if isinstance(leaf, torch.Tensor):
        return leaf.numel()
    size = getattr(leaf, "size", None)
    if isinstance(size, int):
        return size  # a numpy array
    if isinstance(size, tuple):
        return int(torch.Size(size).numel())  # an image
    return len(leaf) if isinstance(leaf, str | bytes) else 1
