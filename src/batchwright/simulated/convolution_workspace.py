"""The workspace of a convolution on a card: copies in the layout that tensor cores read.

cuDNN's kernels for tensor cores read NHWC. Given NCHW tensors they convert what they read, and of gradients what they
write, in a workspace: profiles of such runs show nchwToNhwc kernels before each of them. Tensors in channels_last need
none of it, 1x1 convolutions are products of matrices, depthwise ones run in PyTorch's own kernels, and without tensor
cores there is nothing to convert. Which kernel cuDNN's heuristics choose is not public: this is what they usually do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchwright.catalogue.gpus import Card

_WITH_TENSOR_CORES, _WITH_TF32 = (7, 0), (8, 0)


def convolution_workspace(
    card: Card, kind: str, read: torch.Tensor, weight: torch.Tensor, made: torch.Tensor, settings: Sequence[Any]
) -> int:
    """Return the bytes cuDNN holds while one convolution runs: `forward`, or the gradient of `data` or `weight`."""
    is_product = weight.shape[2:].numel() == 1  # of matrices: there is no neighbourhood to gather
    if is_product or not _runs_on_tensor_cores(card, read.dtype) or settings[-1] > 1 or _is_channels_last(read):
        return 0
    converted = {
        "forward": (read, weight),
        "data": (made, read, weight),
        "weight": (read, made, weight),
    }[kind]
    return sum(_in_nhwc(tensor) for tensor in converted)


def _runs_on_tensor_cores(card: Card, dtype: torch.dtype) -> bool:
    if dtype is torch.float32:
        return card.capability >= _WITH_TF32 and torch.backends.cudnn.allow_tf32
    return card.capability >= _WITH_TENSOR_CORES and dtype in (torch.float16, torch.bfloat16)


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def _in_nhwc(tensor: torch.Tensor) -> int:
    """Bytes of a tensor with its channels padded to whole vectors of 16 bytes."""
    vector = 16 // tensor.element_size()
    channels = tensor.shape[1]
    return tensor.numel() // max(channels, 1) * (-(-channels // vector) * vector) * tensor.element_size()
