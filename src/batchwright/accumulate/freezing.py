"""Freeze what batch normalization measures: it then uses its running statistics, whatever mode the model is put in."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def frozen_statistics(model: nn.Module) -> Iterator[None]:
    """Hold batch normalization in evaluation mode.

    >>> layer = nn.BatchNorm1d(2)
    >>> with frozen_statistics(layer):
    ...     print(layer.train().training)
    False
    >>> layer.training
    True
    """
    frozen = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]
    for module in frozen:
        module.eval()
        # model.train() goes through all modules and calls this on each.
        vars(module)["train"] = lambda mode=True, module=module: module
    try:
        yield
    finally:
        for module in frozen:
            del vars(module)["train"]
            module.train()
