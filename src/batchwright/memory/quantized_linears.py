"""Linear layers of bitsandbytes on a simulated card: their weights in 8 or 4 bits, by the layout they have there.

bitsandbytes packs a weight when it is moved to a GPU, by a kernel that runs only there. So a layer is replaced by one
that holds what the packed one holds, and makes what its kernels make:

- 4 bits: half a byte a weight and a float32 for every block of 64; with double quantization a byte for every block,
  and a float32 for every 256 of those. Forward and backward each make the whole weight in the type of their product.
- 8 bits: a byte a weight and a float32 for every row. Forward makes the input in fp16 and in 8 bits and the product in
  32, and keeps the input for as long as the graph lives; backward makes the whole weight in the type of the input.

Read off bitsandbytes 0.50 (nn/modules.py, autograd/_functions.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_BLOCK, _BLOCKS_PER_SCALE, _CODES, _CODES_OF_SCALES = 64, 256, 16, 256


def quantized_parts(module: nn.Module) -> list[nn.Module]:
    """Return the layers of bitsandbytes in a module that hold, or will hold, a packed weight."""
    return [part for part in module.modules() if _bits(part)]


def stand_in(layer: nn.Module, device: torch.device) -> nn.Module:
    """Return what a layer is on a card; called where new tensors are fake ones."""
    return FourBitLinear(layer, device) if _bits(layer) == 4 else EightBitLinear(layer, device)


def _bits(part: nn.Module) -> int:
    for kind in type(part).__mro__:
        if kind.__module__.startswith("bitsandbytes.") and kind.__name__ in ("Linear4bit", "Linear8bitLt"):
            trains = getattr(getattr(part, "state", None), "has_fp16_weights", False)
            return 0 if trains else 4 if kind.__name__ == "Linear4bit" else 8
    return 0


class _Quantized(nn.Module):
    def __init__(self, layer: Any, device: torch.device, num_bytes: int) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight = nn.Parameter(_bytes(num_bytes, device), requires_grad=False)
        given = layer.bias
        self.bias = (
            None
            if given is None
            else nn.Parameter(torch.empty(given.shape, dtype=given.dtype, device=device), given.requires_grad)
        )

    def whole_weight(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight in a compute type, freshly made."""
        return torch.empty(self.out_features, self.in_features, dtype=dtype, device=self.weight.device)


class FourBitLinear(_Quantized):
    """`Linear4bit` as it is on a card."""

    def __init__(self, layer: Any, device: torch.device) -> None:
        weights = layer.in_features * layer.out_features
        super().__init__(layer, device, -(-weights // 2))
        self.compute_dtype: torch.dtype | None = getattr(layer, "compute_dtype", None)
        blocks = -(-weights // _BLOCK)
        self.register_buffer("codes", torch.empty(_CODES, device=device))
        if getattr(layer.weight, "compress_statistics", True):
            self.register_buffer("scales", _bytes(blocks, device))
            self.register_buffer("scales_of_scales", torch.empty(-(-blocks // _BLOCKS_PER_SCALE), device=device))
            self.register_buffer("codes_of_scales", torch.empty(_CODES_OF_SCALES, device=device))
        else:
            self.register_buffer("scales", torch.empty(blocks, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product, in the type of the input."""
        dtype = self.compute_dtype or x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        product: torch.Tensor = _FourBitProduct.apply(x.to(dtype), self, bias)  # type: ignore[no-untyped-call]
        return product.to(x.dtype)


class _FourBitProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: FourBitLinear, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.layer = layer
        return nn.functional.linear(x, layer.whole_weight(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor | None]:
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return gradient @ ctx.layer.whole_weight(gradient.dtype), None, of_bias


class EightBitLinear(_Quantized):
    """`Linear8bitLt` with packed weights as it is on a card."""

    def __init__(self, layer: Any, device: torch.device) -> None:
        super().__init__(layer, device, layer.in_features * layer.out_features)
        self.register_buffer("scales", torch.empty(layer.out_features, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product, in the type of the input."""
        product: torch.Tensor = _EightBitProduct.apply(x, self, self.bias)  # type: ignore[no-untyped-call]
        return product


class _EightBitProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: EightBitLinear, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.layer = layer
        if ctx.needs_input_grad[0]:
            ctx.kept_input = x  # as a plain attribute, as there: it stays until the graph is gone
        half = x.to(torch.float16)
        narrow = torch.empty_like(half, dtype=torch.int8)
        wide = torch.empty(*x.shape[:-1], layer.out_features, dtype=torch.int32, device=x.device)
        del half
        out = torch.empty_like(wide, dtype=x.dtype)
        del narrow, wide
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None, torch.Tensor | None]:
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        if not ctx.needs_input_grad[0]:
            return None, None, of_bias
        return gradient @ ctx.layer.whole_weight(gradient.dtype), None, of_bias


def _bytes(number: int, device: torch.device) -> torch.Tensor:
    return torch.empty(number, 1, dtype=torch.uint8, device=device)
