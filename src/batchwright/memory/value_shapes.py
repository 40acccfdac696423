"""Operators whose results have a shape that depends on values: answered where those values are known.

The values of a batch are known, so masks over labels, what is unique in them, lengths and counts have the very shapes
that they have in a run.

Promises:
- a position that is known to lie outside raises IndexError, as in a run;
- nothing is guessed: where a value is not known, the operator is left to fail by its name;
- the one exception is said: a CTC loss whose target lengths are unknown is given the longest that its targets allow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchwright.memory.known_values import KnownValues

_aten = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)
_TAKES_MASKS = {
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
    _aten._unsafe_index.Tensor,
    _aten._unsafe_index_put.default,
}
_TAKES_CLASSES = {_aten.nll_loss_forward.default, _aten.nll_loss2d_forward.default}
_ANSWERS_A_TRUTH = {_aten.equal.default}
_ALONG_A_DIMENSION = (
    *(_aten.index_select.default, _aten.gather.default),
    *(_aten.index_add.default, _aten.index_add_.default, _aten.index_copy.default, _aten.index_copy_.default),
    *(_aten.scatter.src, _aten.scatter.value, _aten.scatter_.src, _aten.scatter_.value),
    *(_aten.scatter_add.default, _aten.scatter_add_.default, _aten.scatter_reduce.two, _aten.scatter_reduce_.two),
)
# Operators that read or write at positions: where their dimension (None: a table's first) and their positions are told.
_TAKES_POSITIONS: dict[Any, tuple[int | None, int]] = {
    _aten.embedding.default: (None, 1),
    _aten._embedding_bag.default: (None, 1),
    _aten._embedding_bag_forward_only.default: (None, 1),
    **dict.fromkeys(_ALONG_A_DIMENSION, (1, 2)),
}
CTC_LOSS = _aten._ctc_loss.Tensor
CTC_LOSS_BACKWARD = _aten._ctc_loss_backward.Tensor
LONGEST_TARGETS = "the lengths of the CTC loss's targets are not known: each was taken as long as the targets allow"


def answer(
    values: KnownValues, func: Any, args: Sequence[Any], kwargs: dict[str, Any], note: Callable[[str], None]
) -> Any:
    """Answer an operator by the values it reads; None where it needs no such answer, or none can be given."""
    if func in _ANSWERS_A_TRUTH:
        return values.evaluate(func, args, kwargs)
    if func is CTC_LOSS:
        return _ctc_loss(values, *args, note=note)
    if func is CTC_LOSS_BACKWARD:
        return torch.empty_like(args[1])
    if func is _aten.masked_select.default:
        return _masked_select(values, *args)
    if func in _TAKES_MASKS:
        _check_indices(values, args[0].shape, args[1])
        indices = _without_masks(values, args[0], args[1])
        return None if indices is None else func(args[0], indices, *args[2:], **kwargs)
    if func in _TAKES_POSITIONS:
        dim, position = _TAKES_POSITIONS[func]
        _check_positions(values, args[0].shape, args[position], 0 if dim is None else args[dim])
        return None
    if func in _TAKES_CLASSES:
        _check_classes(values, *args)
        return None
    if torch.Tag.dynamic_output_shape not in func.tags:
        return None
    real = values.evaluate(func, args, kwargs)
    like = next((arg for arg in args if isinstance(arg, FakeTensor)), None)
    if real is None or like is None:
        return None

    def fake(result: Any) -> Any:
        if not isinstance(result, torch.Tensor):
            return result
        made = like.new_empty_strided(result.size(), result.stride(), dtype=result.dtype)
        values.learn_result(made, result)
        return made

    return tree_map(fake, real)


def _check_positions(values: KnownValues, shape: Sequence[int], positions: torch.Tensor, dim: int) -> None:
    """Likewise for positions that cannot be counted from the end."""
    bounds = _bounds(values, positions)
    if bounds is None or not shape:
        return
    size, (lowest, highest) = shape[dim], bounds
    if lowest < 0 or highest >= size:
        outside = highest if highest >= size else lowest
        raise IndexError(f"index {outside} is out of bounds for dimension {dim % len(shape)} with size {size}")


def _check_classes(
    values: KnownValues, scores: torch.Tensor, target: torch.Tensor, _: Any, __: int, ignored: int
) -> None:
    """Likewise for the labels of a loss, but for the one that it leaves out."""
    real, num_classes = values.real(target), scores.shape[min(1, scores.dim() - 1)]
    if real is None:
        return
    with unset_fake_temporarily():
        outside = real[((real < 0) | (real >= num_classes)) & (real != ignored)]
        if outside.numel():
            raise IndexError(f"target {int(outside.flatten()[0])} is out of bounds: there are {num_classes} classes")


def _bounds(values: KnownValues, positions: torch.Tensor) -> tuple[int, int] | None:
    """The lowest and the highest of positions, where they are known."""
    real = values.real(positions)
    if real is None or not real.numel():
        return None
    with unset_fake_temporarily():
        lowest, highest = real.aminmax()
        return int(lowest), int(highest)


def _check_indices(values: KnownValues, shape: Sequence[int], indices: Sequence[Any]) -> None:
    """Raise what the CPU raises where a position that is known lies outside; CUDA would end in an assertion."""
    dimension = 0
    for index in indices:
        is_mask = index is not None and index.dtype in _MASKS
        bounds = None if index is None or is_mask else _bounds(values, index)
        if bounds is not None and dimension < len(shape):
            size, (lowest, highest) = shape[dimension], bounds
            if lowest < -size or highest >= size:
                outside = highest if highest >= size else lowest
                raise IndexError(f"index {outside} is out of bounds for dimension {dimension} with size {size}")
        dimension += index.dim() if is_mask else 1


def _without_masks(values: KnownValues, indexed: torch.Tensor, indices: Sequence[Any]) -> list[Any] | None:
    """Return indices with the positions that each mask selects; None where there is no mask, or one is not known."""
    masks = [index for index in indices if index is not None and index.dtype in _MASKS]
    if not masks or not any(isinstance(tensor, FakeTensor) for tensor in (indexed, *masks)):
        return None
    shape = indexed.shape
    positions: list[Any] = []
    for index in indices:
        if not isinstance(index, torch.Tensor) or index.dtype not in _MASKS:
            positions.append(index)
            continue
        start = len(positions)  # each position and each plain index stands for one dimension
        if shape[start : start + index.dim()] != index.shape:
            raise IndexError(
                f"The shape of the mask {list(index.shape)} at index {start} does not match the shape of the indexed "
                f"tensor {list(shape)} at index {start}"
            )
        real = values.real(index)
        if real is None:
            return None
        with unset_fake_temporarily():
            selected = real.nonzero(as_tuple=True)
        is_fake = isinstance(index, FakeTensor)
        positions += [index.new_empty(one.shape, dtype=torch.int64) if is_fake else one for one in selected]
    return positions


def _masked_select(values: KnownValues, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor | None:
    real = values.real(mask)
    if real is None:
        return None
    with unset_fake_temporarily():
        count = int(real.expand(torch.broadcast_shapes(tensor.shape, mask.shape)).sum())
    return tensor.new_empty(count)


def _ctc_loss(
    values: KnownValues,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    _: torch.Tensor,
    target_lengths: torch.Tensor,
    *__: Any,
    note: Callable[[str], None],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each sample, and the table of its paths: as wide as twice the longest target (LossCTC.cpp)."""
    real = values.real(target_lengths)
    longest = targets.shape[-1]
    if real is None:
        note(LONGEST_TARGETS)
    else:
        with unset_fake_temporarily():
            longest = int(real.max()) if real.numel() else 0
    batch = target_lengths.shape[0]
    return log_probs.new_empty(batch), log_probs.new_empty((batch, log_probs.shape[0], 2 * longest + 1))
