"""`torch.compile` while a card is simulated: the eager module is traced, and a note says so."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import nn

from batchwright.errors import CannotTraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_WITH_GRAPHS = ("reduce-overhead", "max-autotune")
_NOTE = "the model is compiled; it was traced as eager, and a compiled run may need less"


@contextmanager
def compiled_as_eager(note: Callable[[str], None]) -> Iterator[None]:
    """Have `torch.compile` and `module.compile` return what they are given."""

    def compile_(model: Any = None, **options: Any) -> Any:
        _refuse_graphs(options)
        note(_NOTE)
        return (lambda function: function) if model is None else model

    def compile_module(self: nn.Module, *_: Any, **options: Any) -> None:
        compile_(self, **options)

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch, "compile", compile_))
        stack.enter_context(patch.object(nn.Module, "compile", compile_module))
        yield


def _refuse_graphs(options: dict[str, Any]) -> None:
    if options.get("mode") in _WITH_GRAPHS or (options.get("options") or {}).get("triton.cudagraphs"):
        raise CannotTraceError(
            "the model is compiled with CUDA graphs, whose memory pools of their own are not simulated.",
            remedy='torch.compile(model) without mode="reduce-overhead" or "max-autotune"',
        )
