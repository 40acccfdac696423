"""What oneDNN's LSTM layer on a CPU returns, where torch's rules for fake tensors say something else.

The workspace that it keeps for its backward is the largest thing the layer keeps, and the fake rule gives it no bytes.
Its size is asked of the kernel itself at two short lengths, at the real batch and widths: it grows in proportion to the
length, up to rounding to pages.

The gradients of a bf16 layer are fp32, and those of a bias have a bias's shape; the fake rule of torch 2.10 has both
otherwise, that of 2.13 has them right. So types and shapes are asked of the kernel too, on one sample of length one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    reverse, mode, hidden, layers, biases, train, both, batch_sizes, batch_first = options
    with unset_fake_temporarily(), torch.enable_grad():
        tensors = [None if kind is None else torch.zeros(kind[0], dtype=kind[1]) for kind in signature]
        workspace = _LAYER(
            *tensors[:7], reverse, list(batch_sizes), mode, hidden, layers, biases, both, batch_first, train
        )[3]
        results = _LAYER_BACKWARD(
            *tensors, reverse, mode, hidden, layers, biases, train, both, list(batch_sizes), batch_first, workspace
        )
    return tuple((result.shape, result.dtype) for result in results)
