"""Random numbers come again as if no probe had drawn any: how each source of them is put back.

Promises:
- numpy is looked up, never imported: a program without it has no state of numpy's to keep.
"""

from __future__ import annotations

import random
import sys
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    PutBack = Callable[[], object]


def random_sources(accelerator: torch.device | None) -> dict[str, PutBack]:
    """Return what the whole process draws from, by name, with what puts it back to where it is now.

    >>> list(random_sources(None))[:2]
    ['torch', 'Python']
    """
    sources: dict[str, PutBack] = {
        "torch": partial(torch.set_rng_state, torch.get_rng_state()),
        "Python": partial(random.setstate, random.getstate()),
    }
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        sources["numpy"] = partial(numpy_random.set_state, numpy_random.get_state(legacy=False))
    if accelerator is not None and accelerator.type != "cpu":
        module = torch.get_device_module(accelerator)
        # MPS is one device, and its functions took no argument in earlier versions.
        where = () if accelerator.type == "mps" else (accelerator,)
        sources[str(accelerator)] = partial(module.set_rng_state, module.get_rng_state(*where), *where)
    return sources


@contextmanager
def kept_random_state(accelerator: torch.device | None = None) -> Iterator[None]:
    """Put the generators of torch, numpy and Python back as they were, whatever happened inside."""
    sources = random_sources(accelerator)
    try:
        yield
    finally:
        for put_back in sources.values():
            put_back()


def put_back_of_generator(thing: Any) -> PutBack | None:
    """Return what puts a random generator back to where it is now; None for anything else."""
    if isinstance(thing, torch.Generator):
        return partial(thing.set_state, thing.get_state())
    # The system's randomness has no state.
    if isinstance(thing, random.Random) and not isinstance(thing, random.SystemRandom):
        return partial(thing.setstate, thing.getstate())
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None and isinstance(thing, numpy_random.Generator):
        return partial(setattr, thing.bit_generator, "state", thing.bit_generator.state)
    if numpy_random is not None and isinstance(thing, numpy_random.RandomState):
        return partial(thing.set_state, thing.get_state(legacy=False))
    return None
