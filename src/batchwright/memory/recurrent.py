"""The workspace that oneDNN keeps for the backward of an LSTM layer on a CPU.

The fake rule of torch 2.13 gives it no bytes; for real it is the largest thing the layer keeps. Its size is asked
of the kernel itself at two short lengths, at the real batch and widths: it grows in proportion to the length, up
to rounding to pages.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

if TYPE_CHECKING:
    from collections.abc import Sequence

_LAYER = torch.ops.aten.mkldnn_rnn_layer.default
_LSTM = 2  # ATen's number for this kind of cell
_SHORT, _LONGER = 16, 32


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
