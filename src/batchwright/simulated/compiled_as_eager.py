"""`torch.compile` while a card is simulated: the eager module is traced, and a note says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from batchwright.errors import CannotTraceError
from batchwright.simulated.torch_patches import Patch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_WITH_GRAPHS = ("reduce-overhead", "max-autotune")
_NOTE = "the model is compiled; it was traced as eager, and a compiled run may need less"


def compiled_as_eager(note: Callable[[str], None]) -> Iterator[Patch]:
    """Have `torch.compile` and `module.compile` return what they are given."""

    def compile_(model: Any = None, **options: Any) -> Any:
        _refuse_graphs(options)
        note(_NOTE)
        return (lambda function: function) if model is None else model

    def compile_module(self: nn.Module, *_: Any, **options: Any) -> None:
        compile_(self, **options)

    yield Patch(torch, "compile", compile_)
    yield Patch(nn.Module, "compile", compile_module)


def _refuse_graphs(options: dict[str, Any]) -> None:
    if options.get("mode") in _WITH_GRAPHS or (options.get("options") or {}).get("triton.cudagraphs"):
        raise CannotTraceError(
            "the model is compiled with CUDA graphs, whose memory pools of their own are not simulated.",
            remedy='torch.compile(model) without mode="reduce-overhead" or "max-autotune"',
        )
