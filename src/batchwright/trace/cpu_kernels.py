"""What CPU kernels do to memory that the shape rules of fake tensors do not show.

Copies that live only inside an operator are part of the peak all the same: in a conv net, in a recurrent one, in
whatever multiplies 16-bit matrices. Those that oneDNN makes are asked of the kernel (`cpu_workspaces`); those of a few
others are given here, read off torch 2.13.0's source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from batchwright.device.device import Arguments, Moment, around
from batchwright.trace.cpu_workspaces import (
    allocations_of,
    can_be_asked,
    held_while_running,
    never_freed,
    workspace_for,
)

# What oneDNN's LSTM layer returns, where torch's rules for fake tensors say something else. The workspace that it keeps
# for its backward is the largest thing it keeps, and the fake rule gives it no bytes: its size is asked of the kernel
# at two short lengths, at the real batch and widths, and grows in proportion to the length, up to rounding to pages.
# The gradients of a bf16 layer are fp32, and those of a bias have a bias's shape; the fake rule of torch 2.10 has both
# otherwise, that of 2.13 has them right. So types and shapes are asked too, on one sample of length one.

_LAYER = torch.ops.aten.mkldnn_rnn_layer.default
_LAYER_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default
_LSTM = 2  # ATen's number for this kind of cell
_SHORT, _LONGER = 16, 32
# Arguments of the backward: by (length, batch, width), by (batch, width), and whatever is no tensor.
_SEQUENCES, _STATES, _OPTIONS = (0, 7, 10), (5, 6, 8, 9, 11, 12), slice(13, 22)
# Its results that are as large as an argument; the others are as large as the kernel makes them.
_LIKE_ARGUMENT = {0: 0, 5: 5, 6: 6}


def layer_with_workspace(*args: Any) -> tuple[torch.Tensor, ...]:
    """Run the layer on fake tensors, with a workspace of the size that it really has."""
    output, hidden_state, cell_state, workspace = _LAYER(*args)
    x, hidden, keeps_workspace = args[0], args[10], args[15]
    num_bytes = workspace_bytes(x.shape, hidden, x.dtype) if keeps_workspace else 0
    return output, hidden_state, cell_state, workspace.new_empty((num_bytes,), dtype=torch.uint8)


def workspace_bytes(shape: Sequence[int], hidden: int, dtype: torch.dtype = torch.float32) -> int:
    """Bytes that one layer keeps for its backward, by (length, batch, inputs)."""
    length, batch, inputs = shape
    threads = torch.get_num_threads()
    if length <= _LONGER:
        return _measured(length, batch, inputs, hidden, dtype, threads)
    short, longer = (_measured(steps, batch, inputs, hidden, dtype, threads) for steps in (_SHORT, _LONGER))
    return round(short + (longer - short) * (length - _SHORT) / (_LONGER - _SHORT))


@lru_cache(maxsize=256)
def _measured(length: int, batch: int, inputs: int, hidden: int, dtype: torch.dtype, _threads: int) -> int:
    # With gradients on: without them the kernel keeps no workspace.
    with unset_fake_temporarily(), torch.enable_grad():
        weights = [torch.zeros(4 * hidden, size, dtype=dtype) for size in (inputs, hidden)]
        biases = [torch.zeros(4 * hidden, dtype=dtype)] * 2
        state = torch.zeros(batch, hidden, dtype=dtype)
        x = torch.zeros(length, batch, inputs, dtype=dtype)
        outputs = _LAYER(x, *weights, *biases, state, state, False, [], _LSTM, hidden, 1, True, False, False, True)
    return int(outputs[3].untyped_storage().nbytes())


def gradients_of_layer(*args: Any) -> list[torch.Tensor]:
    """Give the layer's backward, on fake tensors, the types and shapes that it really has."""
    like: torch.Tensor = args[0]
    signature = tuple(_one_sample(i, arg) for i, arg in enumerate(args[: _OPTIONS.start]))
    options = tuple(tuple(option) if isinstance(option, list) else option for option in args[_OPTIONS])
    return [
        like.new_empty(args[_LIKE_ARGUMENT[i]].shape if i in _LIKE_ARGUMENT else shape, dtype=dtype)
        for i, (shape, dtype) in enumerate(_gradients(signature, options))
    ]


def _one_sample(position: int, arg: torch.Tensor | None) -> tuple[tuple[int, ...], torch.dtype] | None:
    if arg is None:
        return None
    cut = 2 if position in _SEQUENCES else 1 if position in _STATES else 0
    return (1,) * cut + tuple(arg.shape[cut:]), arg.dtype


@lru_cache(maxsize=256)
def _gradients(signature: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[tuple[torch.Size, torch.dtype], ...]:
    with unset_fake_temporarily():
        tensors = [None if kind is None else torch.zeros(kind[0], dtype=kind[1]) for kind in signature]
        args = [*tensors, *(list(option) if isinstance(option, tuple) else option for option in options)]
        results = _LAYER_BACKWARD(*args, workspace_for(args))
    return tuple((result.shape, result.dtype) for result in results)


_aten = torch.ops.aten
_Rule = Callable[[Sequence[Any], list[Moment]], list[Moment]]
_NOTHING = nullcontext()


class CpuKernels:
    """How the host runs operators."""

    def following(self) -> AbstractContextManager[Any]:
        """Need nothing."""
        return _NOTHING

    def take_arguments(
        self, _: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], __: FakeTensorMode
    ) -> Arguments:
        """Take arguments as they are."""
        return args, kwargs

    def library_bytes(self, _: Callable[..., Any], __: str) -> int:
        """Keep nothing: what a CPU library holds is asked of its kernels."""
        return 0

    def shape_rule(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Return our rule for an operator's results, or torch's own."""
        return _SHAPE_RULES.get(func, func)

    def moments_of(
        self, func: Callable[..., Any], args: Sequence[Any], outputs: Sequence[torch.Tensor], kwargs: Mapping[str, Any]
    ) -> list[Moment]:
        """Return what happens inside an operator, in order: each of its outputs once, and the copies around them."""
        if can_be_asked(func, args):
            return _with_outputs(allocations_of(func, args, kwargs), outputs)
        moments = [Moment(output=tensor) for tensor in outputs]
        if func in _IN_SPREADING:
            node: Any = torch._C._current_autograd_node()
            if node is not None and node.name() in _SPREADS:
                return _spreading(func, args, moments, node._input_metadata[0].dtype)
        held = held_while_running(func, args)
        if held:
            return around(list(held), moments)
        rule = _RULES.get(func)
        if rule is not None and moments and any(isinstance(a, torch.Tensor) and a.device.type == "cpu" for a in args):
            return rule(args, moments)
        if torch.Tag.pointwise in getattr(func, "tags", ()) and moments:
            return around(_copies_in_common_type(func, args, outputs[0]), moments)
        return moments


def _spreading(func: Any, args: Sequence[Any], outputs: list[Moment], dtype: torch.dtype) -> list[Moment]:
    """The gradient of one largest element, as FunctionsManual.cpp has it for the CPU without a dispatch mode.

    There it is made before equal elements are counted, and filled by one mask; under a mode there are three masks, and
    one of them is multiplied.
    """
    if func is _aten.mul.Tensor:
        return outputs
    masks = 2 * _num_bytes(args[0])
    return around([_num_bytes(args[0], torch.int64) + max(0, _num_bytes(args[0], dtype) - masks)], outputs)


def _copies_in_common_type(func: Any, args: Sequence[Any], result: torch.Tensor) -> list[int]:
    """What an elementwise operator copies first: operands of another type than it computes in (TensorIterator.cpp)."""
    operands = [arg for i, arg in enumerate(args) if i != _MASK.get(func) and isinstance(arg, torch.Tensor)]
    # Nearly always all are of one type; and real and imaginary parts are read in place.
    if all(t.dtype is result.dtype for t in operands) or any(t.is_complex() for t in operands):
        return []
    common = result.dtype
    is_in_place = func._schema.is_mutable
    if is_in_place or common is torch.bool:
        numbers = [arg for arg in args if isinstance(arg, torch.Tensor | float | int)]
        common = operands[0].dtype
        for number in numbers[1:]:
            common = torch.promote_types(common, torch.result_type(operands[0], number))
    # One that is written in place is copied twice, to read from and to write to.
    written = operands[:1] if is_in_place else []
    return [t.numel() * common.itemsize for t in (*operands, *written) if t.dtype is not common and t.dim()]


def _num_bytes(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> int:
    return tensor.numel() * (dtype or tensor.dtype).itemsize


def _batch_norm_backward(args: Sequence[Any], outputs: list[Moment]) -> list[Moment]:
    """The CPU kernel normalises the input once more before it forms the gradient."""
    if not args[0].is_floating_point() or args[0].dim() < 3:
        return outputs
    normalised = _num_bytes(args[1])
    return [Moment(normalised), *outputs[:1], Moment(-normalised), *outputs[1:]]


def _masked_select(args: Sequence[Any], outputs: list[Moment]) -> list[Moment]:
    """The mask as whole numbers, and their running sums (TensorAdvancedIndexing.cpp)."""
    numbers = torch.broadcast_shapes(args[0].shape, args[1].shape).numel() * torch.int64.itemsize
    return around([numbers, numbers], outputs)


def _masked_scatter_backward(args: Sequence[Any], outputs: list[Moment]) -> list[Moment]:
    """The same for the mask alone, before there is anything else; then what it selects."""
    numbers = _num_bytes(args[0], torch.int64)
    return [Moment(numbers), Moment(-numbers), *around([_num_bytes(args[0])], outputs)]


def _reduction(args: Sequence[Any], outputs: list[Moment]) -> list[Moment]:
    """What is summed up in another type (a mask is counted in whole numbers) is first copied in that."""
    result = outputs[0].output
    assert result is not None
    copied = 0 if args[0].dtype == result.dtype else _num_bytes(args[0], result.dtype)
    return [Moment(copied), *outputs, Moment(-copied)]


def _contiguous(args: Sequence[Any], outputs: list[Moment]) -> list[Moment]:
    copied = 0 if args[0].is_contiguous() else _num_bytes(args[0])
    return [Moment(copied), *outputs, Moment(-copied)]


def _bags(args: Sequence[Any], outputs: list[Moment]) -> list[Moment]:
    """Which bag each index is in, once more while it is summed up; sums have a way without (EmbeddingBag.cpp)."""
    is_sum = len(args) <= 4 or args[4] == 0
    return outputs if is_sum else [outputs[0], *around([_num_bytes(args[1])], outputs[1:2]), *outputs[2:]]


def _bags_backward(args: Sequence[Any], outputs: list[Moment]) -> list[Moment]:
    """Indices in order, where each was, and which bag it is in (EmbeddingBag.cpp); a maximum needs none of them."""
    is_max = args[8] == 2
    indices = _num_bytes(args[1])
    return outputs if is_max else around([indices] * (3 if args[3].numel() else 4), outputs)


def _likes_of(*, first: int = 0, copies: int) -> _Rule:
    """So many copies of the first argument that is full size, held beside the outputs."""

    def rule(args: Sequence[Any], outputs: list[Moment]) -> list[Moment]:
        return around([_num_bytes(args[first])] * copies, outputs)

    return rule


def _reduced(args: Sequence[Any], outputs: list[Moment]) -> list[Moment]:
    """Losses of single elements, before they are reduced (Loss.cpp)."""
    result = outputs[0].output
    assert result is not None
    return around([_num_bytes(args[0])], outputs) if result.numel() < args[0].numel() else outputs


def _loss_of_logits(args: Sequence[Any], outputs: list[Moment]) -> list[Moment]:
    """log_sigmoid and its buffer, the weight of positives, and the losses before they are summed up (Loss.cpp)."""
    num_bytes = args[0].numel() * args[0].element_size()
    is_weighted = len(args) > 3 and args[3] is not None
    is_summed = outputs[0].output is not None and outputs[0].output.numel() < args[0].numel()
    weighing = [Moment(num_bytes), Moment(-num_bytes)] if is_weighted else []
    losses = [Moment(num_bytes)] if is_summed else []
    return [
        *(Moment(num_bytes), Moment(num_bytes), Moment(-num_bytes)),
        *(*weighing, *losses, *outputs),
        *(Moment(-moment.num_bytes) for moment in losses),
        Moment(-num_bytes),
    ]


def _with_outputs(allocations: Sequence[int], outputs: Sequence[torch.Tensor]) -> list[Moment]:
    """Put each output where the kernel allocated as much and did not free it.

    One that no allocation equals (a workspace in pages, extended) takes the first that is left over.
    """
    kept = sorted(never_freed(allocations))
    waiting = list(outputs)
    placed: dict[int, torch.Tensor] = {}
    for position in kept:
        same = (i for i, t in enumerate(waiting) if t.untyped_storage().nbytes() == allocations[position])
        index = next(same, None)
        if index is not None:
            placed[position] = waiting.pop(index)
    for position in kept:
        if position not in placed and waiting:
            placed[position] = waiting.pop(0)
    moments = [
        Moment(output=placed[position]) if position in placed else Moment(num_bytes)
        for position, num_bytes in enumerate(allocations)
        if position in placed or position not in kept
    ]
    return moments + [Moment(output=tensor) for tensor in waiting]


def _grouped_mm(
    a: torch.Tensor, b: torch.Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    """The CPU kernel takes any floating type; the fake rule of torch 2.13 admits bfloat16 only."""
    dtype = out_dtype or a.dtype
    if a.dim() == 2 and b.dim() == 2:
        return a.new_empty((offs.shape[0], a.shape[0], b.shape[1]), dtype=dtype)
    rows = a.shape[:-1] if a.dim() == 3 or b.dim() == 3 else (a.shape[0],)
    return a.new_empty((*rows, b.shape[-1]), dtype=dtype)


def _in_storage_of_its_elements(func: Any, reduction: int) -> Callable[..., torch.Tensor]:
    """The result of a loss lies where the losses of the elements did, which goes on being held (Loss.cpp)."""

    def shape(*args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = func(*args, **kwargs)
        if kwargs.get("reduction", args[reduction] if len(args) > reduction else 1) == 0:
            return result
        elements = result.new_empty(torch.broadcast_shapes(args[0].shape, args[1].shape))
        return elements.as_strided((), ()) if elements.numel() else result

    return shape


def _col2im(columns: torch.Tensor, *args: Any) -> torch.Tensor:
    """The picture lies in what was as large as its columns (Col2Im.cpp)."""
    picture: torch.Tensor = _aten.col2im.default(columns, *args)
    if picture.numel() >= columns.numel():
        return picture
    return columns.new_empty(columns.numel()).as_strided(picture.shape, picture.stride())


_SUMS = [
    *(_aten.sum.default, _aten.sum.dim_IntList, _aten.nansum.default, _aten.mean.default, _aten.mean.dim),
    *(_aten.prod.default, _aten.prod.dim_int, _aten.cumsum.default, _aten.cumprod.default),
]
# Backwards that share a gradient among all elements that are as large; what they do that is as large as those.
_SPREADS = {"MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0"}
_IN_SPREADING = {_aten.sum.default, _aten.mul.Tensor}
# Where an elementwise operator takes a mask, which has a type of its own.
_MASK = {_aten.where.self: 0, _aten.masked_fill.Scalar: 1, _aten.masked_fill_.Scalar: 1}
_RULES: dict[Any, _Rule] = {
    **dict.fromkeys(_SUMS, _reduction),
    _aten.native_batch_norm_backward.default: _batch_norm_backward,
    _aten.binary_cross_entropy_with_logits.default: _loss_of_logits,
    _aten.masked_select.default: _masked_select,
    _aten.masked_scatter_backward.default: _masked_scatter_backward,
    # The table of paths from behind, as large as that from the front (LossCTC.cpp).
    _aten._ctc_loss_backward.Tensor: _likes_of(first=6, copies=1),
    _aten.embedding_dense_backward.default: _contiguous,
    _aten.im2col.default: _contiguous,
    _aten._embedding_bag.default: _bags,
    _aten._embedding_bag_backward.default: _bags_backward,
    # A copy to be put in order, and where each was (Sorting.cpp).
    _aten.kthvalue.default: lambda args, out: around([_num_bytes(args[0]), _num_bytes(args[0], torch.int64)], out),
    _aten.median.default: _likes_of(copies=1),
    _aten.mse_loss.default: _reduced,
    _aten.smooth_l1_loss.default: _reduced,
    _aten.huber_loss.default: _reduced,
    _aten.soft_margin_loss_backward.default: _likes_of(first=1, copies=2),
}
# Operators whose shapes we give ourselves, because the fake rule is missing, refuses what the CPU runs, or has the
# result in a storage of another size.
_SHAPE_RULES: dict[Any, Callable[..., Any]] = {
    _aten._grouped_mm.default: _grouped_mm,
    _aten.mkldnn_rnn_layer.default: layer_with_workspace,
    _aten.mkldnn_rnn_layer_backward.default: gradients_of_layer,
    _aten.col2im.default: _col2im,
    **{
        func: _in_storage_of_its_elements(func, reduction)
        for func, reduction in {
            _aten.mse_loss.default: 2,
            _aten.smooth_l1_loss.default: 2,
            _aten.soft_margin_loss.default: 2,
            _aten.binary_cross_entropy.default: 3,
        }.items()
    },
}
