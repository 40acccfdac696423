"""What CUDA kernels hold while they run, beyond the outputs that shape rules show.

Each rule is read off PyTorch 2.13's source; the file is named beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from batchwright.device.moments import Moment, around
from batchwright.simulated.convolution_workspace import convolution_workspace, largest_convolution_workspace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchwright.catalogue.gpus import Card

_aten = torch.ops.aten
_FLOAT = 4
_LONG = 8
# embedding backward: rows of one thread in its first pass (native/cuda/EmbeddingBackwardKernel.cu).
_ROWS_PER_THREAD = 10


def moments_on_card(
    card: Card, func: Callable[..., Any], args: Sequence[Any], outputs: Sequence[torch.Tensor]
) -> list[Moment]:
    """What happens inside an operator on a card, in order: each of its outputs once, and the copies around them."""
    made = [Moment(output=tensor) for tensor in outputs]
    rule = _RULES.get(func)
    if rule is None:
        return made
    return around([num_bytes for num_bytes in rule(card, args, outputs) if num_bytes > 0], made)


def _flash_backward(_: Card, args: Sequence[Any], outputs: Sequence[torch.Tensor]) -> list[int]:
    """Row sums, the gradient of the queries in float32, and where heads are grouped those of keys and values apart.

    native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd.
    """
    query, key = args[1], args[2]
    batch, heads, length, head_dim = query.shape
    rows = _up_to(length, 128)
    rounded = _up_to(head_dim, 32) if head_dim <= 128 else _up_to(head_dim, 64)
    held = [batch * heads * rows * _FLOAT, batch * rows * heads * rounded * _FLOAT]
    if key.shape[1] != heads:
        held += [batch * key.shape[2] * heads * head_dim * key.element_size()] * 2
    return held


def _efficient_backward(_: Card, args: Sequence[Any], outputs: Sequence[torch.Tensor]) -> list[int]:
    """Row sums, and in 16 bits the gradient of the queries in float32.

    native/transformers/cuda/attention_backward.cu.
    """
    query = args[1]
    batch, heads, length, head_dim = query.shape
    held = [batch * heads * length * _FLOAT]
    if query.element_size() < _FLOAT:
        held.append(batch * heads * _up_to(length, 64) * _up_to(head_dim, 64) * _FLOAT)
    return held


def _embedding_backward(_: Card, args: Sequence[Any], outputs: Sequence[torch.Tensor]) -> list[int]:
    """Indices sorted beside their places, and sums of parts in float32 (native/cuda/EmbeddingBackwardKernel.cu)."""
    gradient, indices, num_weights = args[0], args[1], int(args[2])
    number = indices.numel()
    if number <= 3072:  # few indices are added up without sorting
        return []
    parts = number // _ROWS_PER_THREAD + min(number, num_weights)
    return [number * _LONG, number * _LONG, parts * gradient.shape[-1] * _FLOAT]


def _convolution(card: Card, args: Sequence[Any], outputs: Sequence[torch.Tensor]) -> list[int]:
    return [convolution_workspace(card, "forward", args[0], args[1], outputs[0], args[3:9])]


def _convolution_backward(card: Card, args: Sequence[Any], outputs: Sequence[torch.Tensor]) -> list[int]:
    gradient, read, weight = args[0], args[1], args[2]
    kinds = [kind for kind, is_asked in zip(("data", "weight"), args[10][:2], strict=True) if is_asked]
    # One after the other, so the larger of the two counts.
    return [max((convolution_workspace(card, kind, read, weight, gradient, args[4:10]) for kind in kinds), default=0)]


def _loss_of_logits(_: Card, args: Sequence[Any], outputs: Sequence[torch.Tensor]) -> list[int]:
    """log_sigmoid, and the losses before they are summed up (native/Loss.cpp)."""
    num_bytes = args[0].numel() * args[0].element_size()
    return [num_bytes] * (2 if outputs[0].numel() < args[0].numel() else 1)


def most_workspace(card: Card, func: Callable[..., Any], args: Sequence[Any], outputs: Sequence[torch.Tensor]) -> int:
    """Return what a convolution may hold at most; nothing for any other operator."""
    if func is _aten.convolution.default:
        return largest_convolution_workspace(card, args[0], args[1], outputs[0], args[3:9])
    if func is _aten.convolution_backward.default:
        return largest_convolution_workspace(card, args[1], args[2], args[0], args[4:10])
    return 0


def _up_to(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


_RULES: dict[Any, Callable[[Card, Sequence[Any], Sequence[torch.Tensor]], list[int]]] = {
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    _aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    _aten.embedding_dense_backward.default: _embedding_backward,
    _aten.binary_cross_entropy_with_logits.default: _loss_of_logits,
    _aten.convolution.default: _convolution,
    _aten.convolution_backward.default: _convolution_backward,
}
