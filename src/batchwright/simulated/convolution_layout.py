"""The layout of what a convolution makes on a card: channels_last where its input or its weight is.

torch's shape rule asks which backend would run, and knows none for a device it does not know: everything would come out
in plain NCHW. cuDNN's rule is that of ATen/native/ConvUtils.h, `cudnn_conv_suggest_memory_format`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._prims_common import suggest_memory_format

_aten = torch.ops.aten


def is_channels_last(*tensors: torch.Tensor) -> bool:
    """Whether cuDNN runs a convolution of these tensors in channels_last."""
    if any(tensor.dtype is torch.float64 for tensor in tensors):
        return False
    return any(
        tensor.dim() in (4, 5) and suggest_memory_format(tensor) is not torch.contiguous_format for tensor in tensors
    )


def _convolution(*args: Any, **kwargs: Any) -> Any:
    made = _aten.convolution.default(*args, **kwargs)
    return _laid_out(made) if is_channels_last(args[0], args[1]) else made


def _convolution_backward(*args: Any, **kwargs: Any) -> Any:
    made = _aten.convolution_backward.default(*args, **kwargs)
    if not is_channels_last(args[1], args[2]):
        return made
    of_input, of_weight, of_bias = made
    return _laid_out(of_input), _laid_out(of_weight), of_bias


def _laid_out(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None or tensor.dim() not in (4, 5):
        return tensor
    layout = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    return torch.empty_like(tensor, memory_format=layout)


LAYOUT_RULES: dict[Any, Any] = {
    _aten.convolution.default: _convolution,
    _aten.convolution_backward.default: _convolution_backward,
}
