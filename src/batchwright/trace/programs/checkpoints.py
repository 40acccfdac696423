"""Checkpoints of a program whose card is simulated: tensors of the card are saved without values, and loaded to it.

Promises:
- a checkpoint holds the shapes of the card's tensors, and real values of the host's;
- what is loaded to a card, because the program says so or because it was saved there, lies on the simulated one;
- what was saved without values comes back on the host as zeros, which large tensors are without taking memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from batchwright.simulated.torch_patches.patches import Patch

# Larger blocks come from the system as zeros, and are no memory until they are written to.
_SMALL = 2**20


def without_values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return what a checkpoint gives back of a tensor of the card."""
    is_small = dtype.itemsize * math.prod(shape) < _SMALL
    return torch.zeros(shape, dtype=dtype) if is_small else torch.empty(shape, dtype=dtype)


def checkpoints_of_the_card() -> Iterator[Patch]:
    """Save and load tensors of the card."""
    torch.serialization.add_safe_globals([without_values])
    load = torch.load

    def load_to_card(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        of_card: set[int] = set()

        def place(storage: Any, location: str) -> Any:
            if callable(map_location):
                return map_location(storage, location)
            to = map_location.get(location, location) if isinstance(map_location, dict) else map_location or location
            if torch.device(to).type == "cuda":
                of_card.add(storage._cdata)
            return storage

        def move(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata in of_card:
                return value.cuda()
            return value.cuda() if isinstance(value, nn.Module) and of_card else value

        return tree_map(move, load(f, place, *args, **kwargs))

    yield Patch(torch, "load", load_to_card)
    yield Patch(FakeTensor, "__reduce_ex__", _reduce)


def _reduce(tensor: torch.Tensor, _: Any) -> Any:
    return without_values, (tuple(tensor.shape), tensor.dtype)
