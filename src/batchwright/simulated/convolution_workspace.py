"""The workspace of a convolution on a card. Which kernel cuDNN chooses is not public; this is what they usually hold.

With tensor cores: its kernels read NHWC. Given NCHW tensors they convert what they read, and of gradients what they
write, in a workspace: profiles of such runs show nchwToNhwc kernels before each of them. Tensors in channels_last need
none of it, 1x1 convolutions are products of matrices, depthwise ones run in PyTorch's own kernels.

Without: a dense 3x3 convolution runs by Winograd's F(4x4, 3x3), which writes its tensors out transformed: 6x6 numbers
for every 4x4 of a map, and for every 3x3 of weights. MMSegmentation's peaks on V100 are met by it within 1 %, where
none at all left FCN 2 to 5 % low and PSPNet 7 to 11 % (benchmarks/memory_gpu.py; two of them in the calibration third).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from batchwright.simulated.convolution_layout import is_channels_last

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchwright.catalogue.gpus import Card

_WITH_TENSOR_CORES, _WITH_TF32 = (7, 0), (8, 0)


def convolution_workspace(
    card: Card, kind: str, read: torch.Tensor, weight: torch.Tensor, made: torch.Tensor, settings: Sequence[Any]
) -> int:
    """Return the bytes cuDNN holds while one convolution runs: `forward`, or the gradient of `data` or `weight`."""
    if is_channels_last(read, weight):
        # The kernel reads it as it is; of two that differ, one is copied.
        return sum(_in_nhwc(tensor) for tensor in (read, weight) if not is_channels_last(tensor))
    is_product = weight.shape[2:].numel() == 1  # of matrices: there is no neighbourhood to gather
    if is_product or settings[-1] > 1:
        return 0
    if not _runs_on_tensor_cores(card, read.dtype):
        return _in_winograds_form(read, weight, made, settings)
    converted = {
        "forward": (read, weight),
        "data": (made, read, weight),
        "weight": (read, made, weight),
    }[kind]
    return sum(_in_nhwc(tensor) for tensor in converted)


def largest_convolution_workspace(
    card: Card, read: torch.Tensor, weight: torch.Tensor, made: torch.Tensor, settings: Sequence[Any]
) -> int:
    """Return the most that cuDNN is likely to hold for one convolution, whichever kernel it chooses."""
    groups = settings[-1]
    if is_channels_last(read, weight):
        return convolution_workspace(card, "weight", read, weight, made, settings)
    if groups == read.shape[1] and groups > 1:
        return 0  # depthwise
    copies = sum(_in_nhwc(tensor) for tensor in (read, made, weight))
    if _runs_on_tensor_cores(card, read.dtype):
        return copies
    return max(copies, _in_winograds_form(read, weight, made, settings))


def _runs_on_tensor_cores(card: Card, dtype: torch.dtype) -> bool:
    if dtype is torch.float32:
        return card.capability >= _WITH_TF32 and torch.backends.cudnn.allow_tf32
    return card.capability >= _WITH_TENSOR_CORES and dtype in (torch.float16, torch.bfloat16)


def _in_winograds_form(read: torch.Tensor, weight: torch.Tensor, made: torch.Tensor, settings: Sequence[Any]) -> int:
    """Bytes of the three tensors transformed; none where Winograd's algorithm does not apply."""
    strides, dilations, groups = settings[0], settings[2], settings[-1]
    if groups > 1 or weight.shape[2:] != (3, 3) or any(n != 1 for n in (*strides, *dilations)):
        return 0
    if read.dtype is not torch.float32:
        return 0
    transformed = (read.numel() + made.numel()) * 36 // 16 + weight.numel() * 36 // 9
    return transformed * read.element_size()


def _in_nhwc(tensor: torch.Tensor) -> int:
    """Bytes of a tensor with its channels padded to whole vectors of 16 bytes."""
    vector = 16 // tensor.element_size()
    channels = tensor.shape[1]
    return tensor.numel() // max(channels, 1) * (-(-channels // vector) * vector) * tensor.element_size()
