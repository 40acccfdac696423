"""The kernels of a simulated card: layouts of what they make, and what they hold beyond the outputs that shapes show.

Promises:
- each rule is read off PyTorch 2.13's source; the file is named beside it;
- what cuBLAS keeps for each thread is taken when a thread multiplies for the first time, as on the card;
- an operator that CUDA runs as one kernel is not taken apart.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor

from batchwright.catalogue.cards import cublas_workspace_bytes
from batchwright.device.kernels import Moment, around
from batchwright.simulated.torch_patches.backend import card_device, simulated_device

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch._subclasses.fake_tensor import FakeTensorMode

    from batchwright.catalogue.cards import Card
    from batchwright.device.kernels import Arguments
    from batchwright.simulated.allocator.caching_allocator import CachingAllocator


_aten = torch.ops.aten
_COPY = _aten._to_copy.default
_MULTIPLIES = {
    *(_aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default, _aten.addbmm.default),
    *(_aten.mv.default, _aten.addmv.default, _aten.dot.default),
}


class CudaKernels:
    """How one card runs operators, from its first to its last."""

    def __init__(self, card: Card, allocator: CachingAllocator) -> None:
        self._card, self._allocator = card, allocator
        self._threads_that_multiplied: set[str] = set()
        self._most_allocated = 0

    def following(self) -> AbstractContextManager[Any]:
        """Have tensors tell their device as it is: to the user's code they say that they are on a GPU."""
        context: AbstractContextManager[Any] = torch._C.DisableTorchFunction()
        return context

    def take_arguments(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], mode: FakeTensorMode
    ) -> Arguments:
        """Return the arguments with the simulated card for a GPU, and with a fake tensor to copy from."""
        if func is _COPY:
            # A real tensor is taken for a fake one of its kind. Fake ones compute with small constants for real,
            # and on the card there is nothing to compute with.
            given = args[0] if isinstance(args[0], FakeTensor) else mode.from_tensor(args[0])
            given.constant = None
            args = (given, *args[1:])
        # A device that was not named in a call of torch's but handed on inside of one.
        return tuple(map(card_device, args)), {name: card_device(value) for name, value in kwargs.items()}

    def library_bytes(self, func: Callable[..., Any], phase: str) -> int:
        """Return the workspace that cuBLAS takes where a thread multiplies for the first time."""
        thread = "backward" if phase == "backward" else "forward"
        if func not in _MULTIPLIES or thread in self._threads_that_multiplied:
            return 0
        self._threads_that_multiplied.add(thread)
        return cublas_workspace_bytes(self._card)

    def shape_rule(self, func: Callable[..., Any]) -> Callable[..., Any] | None:
        """Return the rule of an operator's results, in cuDNN's layouts; None for updates of lists."""
        return None if _changes_a_list(func) else _LAYOUT_RULES.get(func, func)

    def moments_of(
        self, func: Callable[..., Any], args: Sequence[Any], outputs: Sequence[torch.Tensor], _: Mapping[str, Any]
    ) -> list[Moment]:
        """Return what happens inside an operator on this card."""
        most = _most_workspace(self._card, func, args, outputs)
        if most:
            output_bytes = sum(tensor.numel() * tensor.element_size() for tensor in outputs)
            now = self._allocator.stats.allocated.current
            self._most_allocated = max(self._most_allocated, now + output_bytes + most)
        moments = [Moment(output=tensor) for tensor in outputs]
        rule = _WORKSPACES.get(func)
        if rule is None:
            return moments
        return around([num_bytes for num_bytes in rule(self._card, args, outputs) if num_bytes > 0], moments)

    @property
    def unsure_bytes(self) -> int:
        """By how much the peak would be higher if every convolution held the most that it may."""
        return max(self._most_allocated - self._allocator.stats.allocated.peak, 0)


@cache
def _changes_a_list(func: Any) -> bool:
    """Whether an operator updates a list of tensors in place: it makes nothing, and asking it takes its time."""
    name: str = func._schema.name
    return name.startswith("aten::_foreach_") and name.endswith("_")


# Operators that CUDA runs as one kernel, and that torch takes apart on a device it does not know. Taken apart, their
# temporaries would be counted: the backward of SiLU alone would hold four more tensors of its size. torch's own table
# (native_functions.yaml) tells which they are: a kernel for CUDA beside one result of operators that autograd follows.
_FUSED_ON_CUDA = ("silu_backward", "mish_backward", "_fused_rms_norm")


@cache
def register_fused_operators() -> torch.library.Library:
    """Have the simulated device own these operators, once per process: as long as the library is held."""
    simulated_device()
    library = torch.library.Library("aten", "IMPL", "PrivateUse1")
    for name in _FUSED_ON_CUDA:
        library.impl(name, _computes_nothing)
    return library


def _computes_nothing(*args: Any, **options: Any) -> NoReturn:
    raise AssertionError("a fake tensor answers before any kernel of the simulated device is asked")


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


_LAYOUT_RULES: dict[Any, Any] = {
    _aten.convolution.default: _convolution_in_layout,
    _aten.convolution_backward.default: _convolution_backward_in_layout,
}


# The workspace of a convolution. Which kernel cuDNN chooses is not public; this is what they usually hold.
#
# With tensor cores: its kernels read NHWC. Given NCHW tensors they convert what they read, and of gradients what they
# write, in a workspace: profiles of such runs show nchwToNhwc kernels before each of them. Tensors in channels_last
# need none of it, 1x1 convolutions are products of matrices, depthwise ones run in PyTorch's own kernels.
#
# Without: a dense 3x3 convolution runs by Winograd's F(4x4, 3x3), which writes its tensors out transformed: 6x6 numbers
# for every 4x4 of a map, and for every 3x3 of weights. MMSegmentation's peaks on V100 are met by it within 1 %, where
# none at all left FCN 2 to 5 % low and PSPNet 7 to 11 % (benchmarks/memory_gpu.py; two of them in the calibration
# third).

_WITH_TENSOR_CORES, _WITH_TF32 = (7, 0), (8, 0)


def convolution_workspace(
    card: Card, kind: str, read: torch.Tensor, weight: torch.Tensor, result: torch.Tensor, settings: Sequence[Any]
) -> int:
    """Return the bytes cuDNN holds while one convolution runs: `forward`, or the gradient of `data` or `weight`."""
    if is_channels_last(read, weight):
        # The kernel reads it as it is; of two that differ, one is copied.
        return sum(_in_nhwc(tensor) for tensor in (read, weight) if not is_channels_last(tensor))
    is_product = weight.shape[2:].numel() == 1  # of matrices: there is no neighbourhood to gather
    if is_product or settings[-1] > 1:
        return 0
    if not _runs_on_tensor_cores(card, read.dtype):
        return _in_winograds_form(read, weight, result, settings)
    converted = {
        "forward": (read, weight),
        "data": (result, read, weight),
        "weight": (read, result, weight),
    }[kind]
    return sum(_in_nhwc(tensor) for tensor in converted)


def largest_convolution_workspace(
    card: Card, read: torch.Tensor, weight: torch.Tensor, result: torch.Tensor, settings: Sequence[Any]
) -> int:
    """Return the most that cuDNN is likely to hold for one convolution, whichever kernel it chooses."""
    groups = settings[-1]
    if is_channels_last(read, weight):
        return convolution_workspace(card, "weight", read, weight, result, settings)
    if groups == read.shape[1] and groups > 1:
        return 0  # depthwise
    copies = sum(_in_nhwc(tensor) for tensor in (read, result, weight))
    if _runs_on_tensor_cores(card, read.dtype):
        return copies
    return max(copies, _in_winograds_form(read, weight, result, settings))


def _runs_on_tensor_cores(card: Card, dtype: torch.dtype) -> bool:
    if dtype is torch.float32:
        return card.capability >= _WITH_TF32 and torch.backends.cudnn.allow_tf32
    return card.capability >= _WITH_TENSOR_CORES and dtype in (torch.float16, torch.bfloat16)


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


_FLOAT = 4
_LONG = 8
# embedding backward: rows of one thread in its first pass (native/cuda/EmbeddingBackwardKernel.cu).
_ROWS_PER_THREAD = 10


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


def _most_workspace(card: Card, func: Callable[..., Any], args: Sequence[Any], outputs: Sequence[torch.Tensor]) -> int:
    """Return what a convolution may hold at most; nothing for any other operator."""
    if func is _aten.convolution.default:
        return largest_convolution_workspace(card, args[0], args[1], outputs[0], args[3:9])
    if func is _aten.convolution_backward.default:
        return largest_convolution_workspace(card, args[1], args[2], args[0], args[4:10])
    return 0


def _up_to(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


_WORKSPACES: dict[Any, Callable[[Card, Sequence[Any], Sequence[torch.Tensor]], list[int]]] = {
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    _aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    _aten.embedding_dense_backward.default: _embedding_backward,
    _aten.binary_cross_entropy_with_logits.default: _loss_of_logits,
    _aten.convolution.default: _convolution,
    _aten.convolution_backward.default: _convolution_backward,
}
