"""nn.GRUCell on the simulated card: the one kernel that CUDA runs it by, with the workspace it keeps for backward.

torch has a shape rule for the kernel of nn.LSTMCell and none for this one. What they make is read off ATen's
cuda/RNN.cu: forward the new state and five numbers for each unit of it; backward the gradients of both gates and of the
state, and of both biases by sums.
"""

from __future__ import annotations

import torch

_WORKSPACE_PER_UNIT, _GATES = 5, 3
_registered: list[torch.library.Library] = []


def register_recurrent_cells() -> None:
    """Give torch the shape rules that it lacks, once per process."""
    if _registered:
        return
    library = torch.library.Library("aten", "IMPL", "Meta")
    library.impl("_thnn_fused_gru_cell", _gru_cell)
    library.impl("_thnn_fused_gru_cell_backward", _gru_cell_backward)
    _registered.append(library)


def _gru_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    hx: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    workspace = hx.new_empty((hx.shape[0], hx.shape[1] * _WORKSPACE_PER_UNIT))
    return torch.empty_like(hx, memory_format=torch.contiguous_format), workspace


def _gru_cell_backward(
    grad_hy: torch.Tensor, workspace: torch.Tensor, has_bias: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    gates = workspace.shape[1] // _WORKSPACE_PER_UNIT * _GATES
    of_input, of_hidden = (workspace.new_empty((workspace.shape[0], gates)) for _ in range(2))
    of_biases = [workspace.new_empty(gates) if has_bias else None for _ in range(2)]
    of_state = torch.empty_like(grad_hy, memory_format=torch.contiguous_format)
    return of_input, of_hidden, of_state, of_biases[0], of_biases[1]
