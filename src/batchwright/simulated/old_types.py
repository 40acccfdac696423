"""The old way to name a number format together with a device: `torch.cuda.FloatTensor`, as a type, a name or a call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from batchwright.simulated.backend import is_on_card
from batchwright.simulated.torch_patches import Patch

if TYPE_CHECKING:
    from collections.abc import Iterator

_NAMES = {
    torch.float32: "FloatTensor",
    torch.float64: "DoubleTensor",
    torch.float16: "HalfTensor",
    torch.bfloat16: "BFloat16Tensor",
    torch.int64: "LongTensor",
    torch.int32: "IntTensor",
    torch.int16: "ShortTensor",
    torch.int8: "CharTensor",
    torch.uint8: "ByteTensor",
    torch.bool: "BoolTensor",
}


class _OnCard(type):
    """A type whose instances are all tensors of one number format on the card."""

    dtype: torch.dtype

    def __instancecheck__(cls, tensor: object) -> bool:
        return isinstance(tensor, torch.Tensor) and is_on_card(tensor) and tensor.dtype == cls.dtype

    def __call__(cls, *given: Any) -> torch.Tensor:
        if len(given) == 1 and not isinstance(given[0], int | torch.Size):
            return torch.as_tensor(given[0], dtype=cls.dtype, device="cuda")
        return torch.empty(*given, dtype=cls.dtype, device="cuda")


def old_types() -> Iterator[Patch]:
    """Have `torch.cuda.FloatTensor` and the like stand for tensors of the card."""
    for dtype, name in _NAMES.items():
        yield Patch(torch.cuda, name, _OnCard(name, (), {"dtype": dtype, "__module__": "torch.cuda"}))


def typed(target: torch.device, tensor: torch.Tensor, dtype: Any = None, **options: Any) -> Any:
    """Do what `Tensor.type` does, the card being `target`: say the type, or cast to one."""
    if dtype is None:
        return ("torch.cuda." if is_on_card(tensor) else "torch.") + _NAMES[tensor.dtype]
    called = f"{dtype.__module__}.{dtype.__name__}" if isinstance(dtype, type) else str(dtype)
    for known, name in _NAMES.items():
        if called in (f"torch.cuda.{name}", f"torch.{name}"):
            return tensor.to(target if "cuda" in called else torch.device("cpu"), known, **options)
    return tensor.type(dtype, **options)
