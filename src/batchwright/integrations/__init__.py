"""batchwright inside the frameworks, a thin file for each: `integrations.transformers`, `.lightning`, `.accelerate`."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchwright.integrations import transformers as transformers


def __getattr__(name: str) -> object:
    if importlib.util.find_spec(f"{__name__}.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
