"""What CPU kernels do to memory that the shape rules of fake tensors do not show.

Copies that live only inside an operator are part of the peak all the same: in a conv net, in a recurrent one, in
whatever multiplies 16-bit matrices. Those that oneDNN makes are asked of the kernel (`asked_kernels`); those of a few
others are given here, read off torch 2.13.0's source.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from batchwright.device.moments import Moment, around
from batchwright.memory.asked_kernels import allocations_of, can_be_asked, never_freed
from batchwright.memory.attention_kernel import held_while_running
from batchwright.memory.recurrent import gradients_of_layer, layer_with_workspace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_aten = torch.ops.aten
_SUMS = {_aten.sum.default, _aten.sum.dim_IntList}


def moments_of(
    func: Callable[..., Any],
    args: Sequence[Any],
    outputs: Sequence[torch.Tensor],
    kwargs: Mapping[str, Any] | None = None,
) -> list[Moment]:
    """What happens inside an operator, in order: each of its outputs once, and the copies around them."""
    if can_be_asked(func, args):
        return _with_outputs(allocations_of(func, args, kwargs), outputs)
    made = [Moment(output=tensor) for tensor in outputs]
    held = held_while_running(func, args)
    if held:
        return around(list(held), made)
    if func is _aten.native_batch_norm_backward.default and _is_cpu_float(args[0]):
        # The CPU kernel normalises the input once more before it forms the gradient.
        normalised = args[1].numel() * args[1].element_size()
        return [Moment(normalised), *made[:1], Moment(-normalised), *made[1:]]
    if func is _aten.binary_cross_entropy_with_logits.default:
        return _loss_of_logits(args, made)
    if func is _aten.masked_select.default and args[0].device.type == "cpu":
        # The mask as whole numbers, and their running sums (TensorAdvancedIndexing.cpp).
        numbers = torch.broadcast_shapes(args[0].shape, args[1].shape).numel() * torch.int64.itemsize
        return around([numbers, numbers], made)
    if func is _aten._ctc_loss_backward.Tensor:
        # The table of paths from behind, as large as that from the front (LossCTC.cpp).
        return around([args[6].numel() * args[6].element_size()], made)
    if func in _SUMS and args[0].device.type == "cpu" and made and args[0].dtype != outputs[0].dtype:
        # A mask is counted in whole numbers, and the CPU first makes a copy of it in those.
        copied = args[0].numel() * outputs[0].element_size()
        return [Moment(copied), *made, Moment(-copied)]
    if func is _aten.embedding_dense_backward.default and not args[0].is_contiguous():
        copied = args[0].numel() * args[0].element_size()
        return [Moment(copied), *made, Moment(-copied)]
    return made


def _loss_of_logits(args: Sequence[Any], made: list[Moment]) -> list[Moment]:
    """log_sigmoid and its buffer, the weight of positives, and the losses before they are summed up (Loss.cpp)."""
    num_bytes = args[0].numel() * args[0].element_size()
    is_weighted = len(args) > 3 and args[3] is not None
    is_summed = made[0].output is not None and made[0].output.numel() < args[0].numel()
    weighing = [Moment(num_bytes), Moment(-num_bytes)] if is_weighted else []
    losses = [Moment(num_bytes)] if is_summed else []
    return [
        *(Moment(num_bytes), Moment(num_bytes), Moment(-num_bytes)),
        *(*weighing, *losses, *made),
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


def _is_cpu_float(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_floating_point() and tensor.dim() >= 3


def _grouped_mm(
    a: torch.Tensor, b: torch.Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    """The CPU kernel takes any floating type; the fake rule of torch 2.13 admits bfloat16 only."""
    dtype = out_dtype or a.dtype
    if a.dim() == 2 and b.dim() == 2:
        return a.new_empty((offs.shape[0], a.shape[0], b.shape[1]), dtype=dtype)
    rows = a.shape[:-1] if a.dim() == 3 or b.dim() == 3 else (a.shape[0],)
    return a.new_empty((*rows, b.shape[-1]), dtype=dtype)


# Operators whose shapes we give ourselves, because the fake rule is missing or refuses what the CPU runs.
SHAPE_RULES: dict[Any, Callable[..., Any]] = {
    _aten._grouped_mm.default: _grouped_mm,
    _aten.mkldnn_rnn_layer.default: layer_with_workspace,
    _aten.mkldnn_rnn_layer_backward.default: gradients_of_layer,
}
