"""A linear layer over weights in 4 bits, as far as memory goes: the layout of bitsandbytes' NF4.

Half a byte per weight and a float per block of 64; with double quantization a byte per block instead, and a float for
every 256 of those. Forward and backward each make the whole weight in fp16, cast it and drop both again. In the
versions that litgpt used (0.41, 0.42) the function keeps its input as a plain attribute, although it never reads it:
the input stays until the graph is gone, not only until its own backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_BLOCK = 64
_BLOCKS_PER_SCALE = 256


class _FourBitProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: FourBitLinear) -> torch.Tensor:
        # As attributes on purpose: see above.
        ctx.kept_input, ctx.layer = x, layer
        return nn.functional.linear(x, layer.whole_weight(x.dtype), layer.bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.matmul(gradient, ctx.layer.whole_weight(gradient.dtype)), None


class FourBitLinear(nn.Module):
    """A frozen linear layer in NF4."""

    packed: torch.Tensor
    scales: torch.Tensor

    def __init__(self, in_features: int, out_features: int, *, bias: bool, double: bool) -> None:
        super().__init__()
        self.in_features, self.out_features, self.nested = in_features, out_features, double
        weights = in_features * out_features
        blocks = -(-weights // _BLOCK)
        self.register_buffer("packed", torch.empty(-(-weights // 2), 1, dtype=torch.uint8))
        self.register_buffer("codes", torch.empty(16))
        if double:
            self.register_buffer("scales", torch.empty(blocks, dtype=torch.uint8))
            self.register_buffer("scales_of_scales", torch.empty(-(-blocks // _BLOCKS_PER_SCALE)))
            self.register_buffer("codes_of_scales", torch.empty(256))
        else:
            self.register_buffer("scales", torch.empty(blocks))
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def whole_weight(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight in a compute type, freshly made."""
        scales = torch.empty_like(self.scales, dtype=torch.float32) if self.nested else self.scales
        weight = torch.empty(self.out_features, self.in_features, dtype=torch.float16, device=self.packed.device)
        del scales
        # Fabric quantizes from fp16, so that is what comes back, and is cast.
        return weight.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product; where nothing wants a gradient, nothing is kept."""
        product: torch.Tensor = _FourBitProduct.apply(x, self)  # type: ignore[no-untyped-call]
        return product

    def _apply(self, fn: Any, recurse: bool = True) -> FourBitLinear:
        # `model.to(bfloat16)` is for the rest of the model: the scales are floats and stay so.
        floats = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in floats.items():
            now = self._buffers[name]
            if now is not None and now.dtype != buffer.dtype:
                self._buffers[name] = now.to(buffer.dtype)
        return self
