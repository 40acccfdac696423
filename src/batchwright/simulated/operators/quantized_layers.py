"""Layers of bitsandbytes on a simulated card: their weights in 8 or 4 bits, by the layout they have there.

bitsandbytes packs a weight when it is moved to a GPU, by a kernel that runs only there. So a layer is replaced by one
that holds what the packed one holds, and makes what its kernels make:

- 4 bits: half a byte a weight and a float32 for every block of weights; with double quantization a byte for every
  block, and a float32 for every 256 of those. Up to 4 rows are multiplied by one kernel, without the whole weight
  (up to 2 in float32 on AMD).
  Above that it is made in the type of the product: bitsandbytes may still run its one kernel, up to 1,536 rows by a
  rule of thumb for each card, so between 5 and 1,536 rows this is the most that forward takes. Backward makes the
  whole weight in the type that it had before it was packed, and casts it to the type of the gradient.
- 8 bits: a byte a weight and a float32 for every row. Forward makes the input in fp16 and in 8 bits and the product in
  32, and keeps the input for as long as the graph lives; backward makes the whole weight in the type of the input.
- embeddings: packed alike. The rows that are asked for are unpacked; a 4-bit one whose rows are no whole number of
  blocks is unpacked entirely.

Read off bitsandbytes 0.50 (nn/modules.py, autograd/_functions.py, backends/cuda/ops.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from batchwright.simulated.operators.cuda_kernels import CurrentCard
from batchwright.simulated.operators.library_work import LibraryWork, report

_BLOCK, _BLOCKS_PER_SCALE, _CODES, _CODES_OF_SCALES = 64, 256, 16, 256
_ROWS_OF_ONE_KERNEL, _ROWS_IN_FLOAT32_ON_AMD = 4, 2
_BITS = {"Linear4bit": 4, "Embedding4bit": 4, "Linear8bitLt": 8, "Embedding8bit": 8}


def quantized_parts(module: nn.Module) -> list[nn.Module]:
    """Return the layers of bitsandbytes in a module that hold, or will hold, a packed weight."""
    return [part for part in module.modules() if _bits(part)]


def stand_in(layer: nn.Module, device: torch.device) -> nn.Module:
    """Return what a layer is on a card; called where new tensors are fake ones."""
    if isinstance(layer, nn.Embedding):
        return FourBitEmbedding(layer, device) if _bits(layer) == 4 else EightBitEmbedding(layer, device)
    return FourBitLinear(layer, device) if _bits(layer) == 4 else EightBitLinear(layer, device)


def _bits(part: nn.Module) -> int:
    for kind in type(part).__mro__:
        if kind.__module__.startswith("bitsandbytes.") and kind.__name__ in _BITS:
            trains = getattr(getattr(part, "state", None), "has_fp16_weights", False)
            return 0 if trains else _BITS[kind.__name__]
    return 0


class _Quantized(nn.Module):
    """A packed weight of so many rows and columns, and the bias that a layer may have."""

    scales: torch.Tensor

    def __init__(self, layer: Any, device: torch.device, rows: int, columns: int) -> None:
        super().__init__()
        self.shape = (rows, columns)
        self.weight = nn.Parameter(_bytes(-(-rows * columns * _bits(layer) // 8), device), requires_grad=False)
        given = getattr(layer, "bias", None)
        self.bias = (
            None
            if given is None
            else nn.Parameter(torch.empty(given.shape, dtype=given.dtype, device=device), given.requires_grad)
        )

    def whole_weight(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight in a compute type, freshly made."""
        written = self.shape[0] * self.shape[1] * dtype.itemsize
        report(LibraryWork("bitsandbytes.dequantize", "elementwise", 0, self.weight.nbytes, written, 1, dtype))
        return torch.empty(self.shape, dtype=dtype, device=self.weight.device)


class _FourBit(_Quantized):
    def __init__(self, layer: Any, device: torch.device, rows: int, columns: int) -> None:
        super().__init__(layer, device, rows, columns)
        # A weight that is packed already tells by its state how it was.
        packed = getattr(layer.weight, "quant_state", None)
        self.block: int = getattr(packed or layer.weight, "blocksize", _BLOCK)
        self.unpacked_dtype: torch.dtype = getattr(packed, "dtype", layer.weight.dtype)
        if not self.unpacked_dtype.is_floating_point:
            self.unpacked_dtype = torch.get_default_dtype()
        blocks = -(-rows * columns // self.block)
        self.is_double = bool(getattr(layer.weight, "compress_statistics", True))
        self.register_buffer("codes", _floats(_CODES, device))
        if self.is_double:
            self.register_buffer("scales", _bytes(blocks, device))
            self.register_buffer("scales_of_scales", _floats(-(-blocks // _BLOCKS_PER_SCALE), device))
            self.register_buffer("codes_of_scales", _floats(_CODES_OF_SCALES, device))
        else:
            self.register_buffer("scales", _floats(blocks, device))

    def whole_scales(self) -> torch.Tensor | None:
        """Return the scales of all blocks, freshly made; None where they are kept whole."""
        return torch.empty_like(self.scales, dtype=torch.float32) if self.is_double else None

    def unpacked(self) -> torch.Tensor:
        """Return the weight in the type that it had before it was packed, as `dequantize_4bit` makes it."""
        scales = self.whole_scales()
        weight = self.whole_weight(self.unpacked_dtype)
        del scales
        return weight


class FourBitLinear(_FourBit):
    """`Linear4bit` as it is on a card."""

    def __init__(self, layer: Any, device: torch.device) -> None:
        super().__init__(layer, device, layer.out_features, layer.in_features)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.compute_dtype: torch.dtype | None = getattr(layer, "compute_dtype", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product, in the type of the input."""
        dtype = self.compute_dtype or x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        product: torch.Tensor = _FourBitProduct.apply(x.to(dtype), self, bias)  # type: ignore[no-untyped-call]
        return product.to(x.dtype)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiply by the kernel that unpacks as it goes, or by the whole weight."""
        is_slow = x.dtype is torch.float32 and CurrentCard.card is not None and CurrentCard.card.vendor == "amd"
        most_rows = _ROWS_IN_FLOAT32_ON_AMD if is_slow else _ROWS_OF_ONE_KERNEL
        if x.numel() <= most_rows * self.in_features and self.in_features % self.block == 0:
            x = x.contiguous()
            flops = 2 * x.numel() * self.out_features
            report(LibraryWork("bitsandbytes.gemv_4bit", "matmul", flops, self.weight.nbytes, 0, 1, x.dtype))
            return x.new_empty((*x.shape[:-1], self.out_features))
        # Unpacked, and then shifted into a second tensor: both stay until the product is made.
        scales = self.whole_scales(), self.whole_scales()
        product = functional.linear(x, self.whole_weight(x.dtype), bias)
        del scales
        return product


class _Product(torch.autograd.Function):
    """A product whose backward makes the whole weight, by `ctx.make_weight`."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None, torch.Tensor | None]:
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        if not ctx.needs_input_grad[0]:
            return None, None, of_bias
        return gradient @ ctx.make_weight(gradient.dtype), None, of_bias


class _FourBitProduct(_Product):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: FourBitLinear, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.make_weight = lambda dtype: layer.unpacked().to(dtype)
        return layer.product(x, bias)


class EightBitLinear(_Quantized):
    """`Linear8bitLt` with packed weights as it is on a card."""

    def __init__(self, layer: Any, device: torch.device) -> None:
        super().__init__(layer, device, layer.out_features, layer.in_features)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.register_buffer("scales", _floats(layer.out_features, device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product, in the type of the input."""
        product: torch.Tensor = _EightBitProduct.apply(x, self, self.bias)  # type: ignore[no-untyped-call]
        return product


class _EightBitProduct(_Product):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: EightBitLinear, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.make_weight = layer.whole_weight
        if ctx.needs_input_grad[0]:
            ctx.kept_input = x  # as a plain attribute, as there: it stays until the graph is gone
        half = x.to(torch.float16)
        flops = 2 * x.numel() * layer.out_features
        report(LibraryWork("bitsandbytes.int8_product", "matmul", flops, layer.weight.nbytes, 0, 2, torch.int8))
        narrow = torch.empty_like(half, dtype=torch.int8)
        wide = torch.empty(*x.shape[:-1], layer.out_features, dtype=torch.int32, device=x.device)
        del half
        out = torch.empty_like(wide, dtype=x.dtype)
        del narrow, wide
        return out


class FourBitEmbedding(_FourBit):
    """`Embedding4bit` as it is on a card."""

    def __init__(self, layer: Any, device: torch.device) -> None:
        super().__init__(layer, device, layer.num_embeddings, layer.embedding_dim)
        self.num_embeddings, self.embedding_dim, self.dtype = *self.shape, layer.dtype

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the rows that are asked for."""
        if self.embedding_dim % self.block:
            return functional.embedding(tokens, self.unpacked()).to(self.dtype)
        rows = functional.embedding(tokens, self.weight.view(self.num_embeddings, -1))
        scales = functional.embedding(tokens, self.scales.view(self.num_embeddings, -1))
        self.scales.clone()  # the state of the weight is copied whole, and its scales replaced by those of the rows
        unpacked = torch.empty(*tokens.shape, self.embedding_dim, dtype=self.unpacked_dtype, device=rows.device)
        out = unpacked.to(self.dtype)
        del rows, scales
        return out


class EightBitEmbedding(_Quantized):
    """`Embedding8bit` as it is on a card."""

    def __init__(self, layer: Any, device: torch.device) -> None:
        super().__init__(layer, device, layer.num_embeddings, layer.embedding_dim)
        self.num_embeddings, self.embedding_dim, self.dtype = *self.shape, layer.dtype
        self.register_buffer("scales", _floats(layer.num_embeddings, device))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the rows that are asked for."""
        rows = functional.embedding(tokens, self.weight.view(self.shape))
        scales = functional.embedding(tokens, self.scales.view(-1, 1))
        unpacked = rows * (scales / 127.0)
        return unpacked.to(self.dtype)


def _bytes(number: int, device: torch.device) -> torch.Tensor:
    return torch.empty(number, 1, dtype=torch.uint8, device=device)


def _floats(number: int, device: torch.device) -> torch.Tensor:
    return torch.empty(number, dtype=torch.float32, device=device)
