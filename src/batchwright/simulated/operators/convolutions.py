"""Convolutions as cuDNN runs them: the layouts of what they make, and the workspace that each holds.

Which kernel cuDNN 8 or 9 chooses is not public; its families and what each writes to a workspace are. They are told
apart by the card's generation, the number format, the layout and the kind of convolution, never by the model:

- tensors in channels_last: tensor cores read them as they are; of two that differ, one is copied;
- tensor cores, tensors in NCHW: each of the three tensors has a copy in NHWC, channels padded to whole vectors of 16
  bytes. Profiles of such runs show nchwToNhwc kernels before and nhwcToNchw kernels after each of them, grouped
  convolutions with channels to share included;
- no tensor cores, a dense 3x3 in fp32: Winograd's F(4x4, 3x3) writes its tensors out transformed, 6x6 numbers for every
  4x4 of a map and for every 3x3 of weights. MMSegmentation's peaks on V100 are met by it within 1 %, where none at all
  left FCN 2 to 5 % low and PSPNet 7 to 11 % (benchmarks/memory_gpu.py; two of them in the calibration third);
- 1x1 convolutions are products of matrices, which need none unless their gradients fill the tiles of a tensor-core
  kernel; depthwise ones run in PyTorch's own kernels: nothing.

PyTorch takes the first plan of cuDNN's heuristics that runs: where a workspace has no room it tries the next plan, down
to one without (cuda_kernels.py asks the allocator). With `cudnn.benchmark` it tries
those whose workspace fits into the largest free block and gives what it cached back to the driver (Conv_v8.cpp), so
what a trial held is in the bound and not in the peak.

Promises:
- a workspace is held while its kernel runs: after its result was made, before the next result is;
- the largest workspace is never less than the usual one.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch._prims_common import suggest_memory_format

from batchwright.device.device import Moment, around

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchwright.catalogue.cards import Card

_aten = torch.ops.aten
CONVOLUTIONS = (_aten.convolution.default, _aten.convolution_backward.default)

# The layout of what a convolution makes: channels_last where its input or its weight is. torch's shape rule asks which
# backend would run, and knows none for a simulated device: everything would come out in plain NCHW. cuDNN's rule is
# that of ATen/native/ConvUtils.h, `cudnn_conv_suggest_memory_format`.


def is_channels_last(*tensors: torch.Tensor) -> bool:
    """Whether cuDNN runs a convolution of these tensors in channels_last."""
    if any(tensor.dtype is torch.float64 for tensor in tensors):
        return False
    return any(
        tensor.dim() in (4, 5) and suggest_memory_format(tensor) is not torch.contiguous_format for tensor in tensors
    )


def _convolution_in_layout(*args: Any, **kwargs: Any) -> Any:
    result = _aten.convolution.default(*args, **kwargs)
    return _laid_out(result) if is_channels_last(args[0], args[1]) else result


def _convolution_backward_in_layout(*args: Any, **kwargs: Any) -> Any:
    gradients = _aten.convolution_backward.default(*args, **kwargs)
    if not is_channels_last(args[1], args[2]):
        return gradients
    of_input, of_weight, of_bias = gradients
    return _laid_out(of_input), _laid_out(of_weight), of_bias


def _laid_out(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None or tensor.dim() not in (4, 5):
        return tensor
    layout = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    return torch.empty_like(tensor, memory_format=layout)


LAYOUT_RULES: dict[Any, Any] = {
    _aten.convolution.default: _convolution_in_layout,
    _aten.convolution_backward.default: _convolution_backward_in_layout,
}


_VOLTA, _AMPERE = (7, 0), (8, 0)  # the first with tensor cores, and the first whose tensor cores take TF32 and bf16
_HALF = (torch.float16, torch.bfloat16)
_TILE = 128  # rows and columns of a product that one block of a tensor-core kernel computes


def convolution_moments(
    card: Card, func: Callable[..., Any], args: Sequence[Any], outputs: Sequence[torch.Tensor]
) -> list[Moment]:
    """Return what a convolution or its backward makes and holds, in order (native/cudnn/ConvShared.cpp)."""
    if func is _aten.convolution.default:
        held = convolution_workspace(card, "forward", args[0], args[1], outputs[0], args[3:9])
        return around([held] if held else [], [Moment(output=tensor) for tensor in outputs])
    gradient, read, weight, settings = args[0], args[1], args[2], args[4:10]
    kinds = [kind for kind, is_asked in zip(("data", "weight"), args[10][:2], strict=True) if is_asked]
    moments = []
    for kind, output in zip_longest(kinds, outputs):  # the gradient of the bias comes last, and needs nothing
        moments += [] if output is None else [Moment(output=output)]
        held = 0 if kind is None else convolution_workspace(card, kind, read, weight, gradient, settings)
        moments += [Moment(held), Moment(-held)] if held else []
    return moments


def convolution_workspace(
    card: Card, kind: str, read: torch.Tensor, weight: torch.Tensor, result: torch.Tensor, settings: Sequence[Any]
) -> int:
    """Return the bytes cuDNN holds while one convolution runs: `forward`, or the gradient of `data` or `weight`."""
    if is_channels_last(read, weight):
        return sum(_in_nhwc(tensor) for tensor in (read, weight) if not is_channels_last(tensor))
    is_product = weight.shape[2:].numel() == 1  # of matrices: there is no neighbourhood to gather
    if _is_depthwise(read, settings) or (is_product and not _fills_a_tile(kind, weight)):
        return 0
    if not _runs_on_tensor_cores(card, read.dtype):
        return _in_winograds_form(read, weight, result, settings)
    return sum(_in_nhwc(tensor) for tensor in (read, weight, result))


def largest_convolution_workspace(
    card: Card, read: torch.Tensor, weight: torch.Tensor, result: torch.Tensor, settings: Sequence[Any]
) -> int:
    """Return the most that cuDNN is likely to hold for one convolution, whichever kernel it chooses."""
    if is_channels_last(read, weight):
        return convolution_workspace(card, "weight", read, weight, result, settings)
    if _is_depthwise(read, settings):
        return 0
    copies = sum(_in_nhwc(tensor) for tensor in (read, result, weight))
    if _runs_on_tensor_cores(card, read.dtype):
        return copies
    return max(copies, _in_winograds_form(read, weight, result, settings))


def most_workspace(card: Card, func: Callable[..., Any], args: Sequence[Any], outputs: Sequence[torch.Tensor]) -> int:
    """Return what a convolution may hold at most; nothing for any other operator."""
    if func is _aten.convolution.default:
        return largest_convolution_workspace(card, args[0], args[1], outputs[0], args[3:9])
    if func is _aten.convolution_backward.default:
        return largest_convolution_workspace(card, args[1], args[2], args[0], args[4:10])
    return 0


def _fills_a_tile(kind: str, weight: torch.Tensor) -> bool:
    """Whether a gradient of a 1x1 convolution is worth a kernel of tensor cores that reads NHWC, in tiles of 128x128.

    That 1x1 convolutions hold nothing forward, and from 128 channels on both sides hold copies backward, is what fits
    the calibration third best of nine such rules (none, and all, forward or backward, from 64 or 128 channels on).
    """
    return kind != "forward" and min(weight.shape[:2]) >= _TILE


def _is_depthwise(read: torch.Tensor, settings: Sequence[Any]) -> bool:
    groups: int = settings[-1]
    return groups > 1 and groups == read.shape[1]


def _runs_on_tensor_cores(card: Card, dtype: torch.dtype) -> bool:
    if dtype is torch.float32:
        return card.capability >= _AMPERE and torch.backends.cudnn.allow_tf32
    return card.capability >= _VOLTA and dtype in _HALF


def _in_winograds_form(read: torch.Tensor, weight: torch.Tensor, result: torch.Tensor, settings: Sequence[Any]) -> int:
    """Bytes of the three tensors transformed; none where Winograd's algorithm does not apply."""
    strides, dilations, groups = settings[0], settings[2], settings[-1]
    if groups > 1 or weight.shape[2:] != (3, 3) or any(n != 1 for n in (*strides, *dilations)):
        return 0
    if read.dtype is not torch.float32:
        return 0
    transformed = (read.numel() + result.numel()) * 36 // 16 + weight.numel() * 36 // 9
    return transformed * read.element_size()


def _in_nhwc(tensor: torch.Tensor) -> int:
    """Bytes of a tensor with its channels padded to whole vectors of 16 bytes."""
    vector = 16 // tensor.element_size()
    channels = tensor.shape[1]
    return tensor.numel() // max(channels, 1) * (-(-channels // vector) * vector) * tensor.element_size()
