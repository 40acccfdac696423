"""Copies that CUDA's kernels make of what they read, dropped when they end.

Most kernels read any strides. Some walk memory as it lies, and PyTorch lays out a copy for them where it lies
otherwise: softmax over transposed logits, a norm over channels that were moved last, a product with an expanded matrix.

Promises:
- each rule is read off PyTorch's source; the file is named beside it;
- what lies as the kernel reads it is not copied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_aten = torch.ops.aten


def copied_bytes(func: Callable[..., Any], args: Sequence[Any]) -> list[int]:
    """Return the sizes of what an operator copies or multiplies out before its kernel runs, in order."""
    rule = _RULES.get(func)
    return [] if rule is None else [num_bytes for num_bytes in rule(args) if num_bytes]


def _if_strided(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_contiguous() else _bytes_of(tensor)


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _first(args: Sequence[Any]) -> list[int]:
    return [_if_strided(args[0])]


def _log_softmax_backward(args: Sequence[Any]) -> list[int]:
    """`host_softmax_backward`."""
    return [_if_strided(args[0]), _if_strided(args[1])]


def _softmax_backward(args: Sequence[Any]) -> list[int]:
    """The gradient times the output is made first (`softmax_backward_cuda_out`); it lies as the gradient does."""
    gradient, output = args[:2]
    leads = output if 0 in gradient.stride() else gradient  # the other, where one is expanded
    return [_bytes_of(gradient), _bytes_of(gradient) if _if_strided(leads) else 0, _if_strided(output)]


def _second(args: Sequence[Any]) -> list[int]:
    return [_if_strided(args[1])]


def _flash_backward(args: Sequence[Any]) -> list[int]:
    """The kernel reads gradient and output by batch, place, head (native/transformers/cuda/attention_backward.cu)."""
    return [_if_strided(args[0].transpose(1, 2)), _if_strided(args[4].transpose(1, 2))]


def _product(args: Sequence[Any]) -> list[int]:
    """`prepare_matrix_for_cublas` and `prepare_batch_matrix_for_cublas` of native/cuda/Blas.cpp."""
    return [0 if _is_matrix(factor) else _bytes_of(factor) for factor in args[-2:]]


def _is_matrix(tensor: torch.Tensor) -> bool:
    """Whether rows or columns lie one after another, with any distance between them."""
    if tensor.is_contiguous():
        return True
    (rows, columns), (by_row, by_column) = tensor.shape[-2:], tensor.stride()[-2:]
    return (by_column == 1 and by_row >= max(1, columns)) or (by_row == 1 and by_column >= max(1, rows))


_RULES: dict[Any, Callable[[Sequence[Any]], list[int]]] = {
    # `host_softmax` of native/cuda/SoftMax.cu
    _aten._softmax.default: _first,
    _aten._log_softmax.default: _first,
    _aten._softmax_backward_data.default: _softmax_backward,
    _aten._log_softmax_backward_data.default: _log_softmax_backward,
    # `expect_contiguous` in native/cuda/layer_norm_kernel.cu
    _aten.native_layer_norm.default: _first,
    _aten.native_layer_norm_backward.default: _second,
    _aten._fused_rms_norm.default: _first,
    _aten._fused_rms_norm_backward.default: _second,
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    # native/cuda/Embedding.cu
    _aten.embedding_dense_backward.default: _first,
    _aten.mm.default: _product,
    _aten.bmm.default: _product,
    _aten.addmm.default: _product,
    _aten.baddbmm.default: _product,
}
