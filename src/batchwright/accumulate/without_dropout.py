"""Turn dropout off without leaving training mode: everything else in a model behaves as it does in training."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[list[str]]:
    """Set every rate of dropout in a model to 0, and put them back; hands out the names of what was set.

    >>> import torch
    >>> layer = torch.nn.Dropout(0.5)
    >>> with without_dropout(layer) as names:
    ...     print(names, layer(torch.ones(2)))
    ['p'] tensor([1., 1.])
    >>> layer.p
    0.5
    """
    rates = []
    for path, module in model.named_modules():
        is_dropout = "dropout" in type(module).__name__.lower() or "droppath" in type(module).__name__.lower()
        for name, value in vars(module).items():
            if isinstance(value, float) and 0 < value <= 1 and ("drop" in name.lower() or (is_dropout and name == "p")):
                rates.append((module, f"{path}.{name}".lstrip("."), name, value))
    for module, _, name, _ in rates:
        setattr(module, name, 0.0)
    try:
        yield [shown for _, shown, _, _ in rates]
    finally:
        for module, _, name, value in rates:
            setattr(module, name, value)
