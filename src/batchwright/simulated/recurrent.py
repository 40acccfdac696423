"""nn.RNN, nn.LSTM and nn.GRU on the simulated card: one call of cuDNN, with the reserve it keeps for backward.

Left alone, torch runs a device it does not know through one cell after the other and keeps what each of them keeps.
How large cuDNN's reserve is, it tells only on a card. Counted is what its backward cannot do without: for every token,
layer and direction the gates, the state of the cell, and the output of all layers but the last; the gradients of the
gates are written over them. That is a formula, never compared with a card.
"""

from __future__ import annotations

from typing import Any

import torch

from batchwright.simulated.backend import NAME, simulated_device

# Gates, and the state that a cell carries beside its output. GRU keeps the product that its reset gate scales.
_KEPT_PER_UNIT = {"lstm": 4 + 1, "gru": 3 + 1, "rnn_tanh": 1, "rnn_relu": 1}
_registered: list[torch.library.Library] = []


def register_recurrent() -> None:
    """Take the place of torch's loop over cells for the simulated device, once per process."""
    if _registered:
        return
    simulated_device()
    library = torch.library.Library("aten", "IMPL", "AutogradPrivateUse1")
    for kind in _KEPT_PER_UNIT:
        library.impl(f"{kind}.input", _padded(kind))
        library.impl(f"{kind}.data", _packed(kind))
    _registered.append(library)


def _padded(kind: str) -> Any:
    def run(
        x: torch.Tensor,
        hx: Any,
        params: list[torch.Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[torch.Tensor, ...]:
        return _run(kind, x, hx, params, num_layers, train)

    return run


def _packed(kind: str) -> Any:
    def run(
        data: torch.Tensor,
        batch_sizes: torch.Tensor,
        hx: Any,
        params: list[torch.Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ) -> tuple[torch.Tensor, ...]:
        return _run(kind, data, hx, params, num_layers, train)

    return run


def _run(
    kind: str, x: torch.Tensor, hx: Any, params: list[torch.Tensor], num_layers: int, train: bool
) -> tuple[torch.Tensor, ...]:
    states = tuple(hx) if isinstance(hx, list | tuple) else (hx,)
    if torch.is_autocast_enabled(NAME):  # cuDNN is given the weights in one piece, cast anew in every call
        dtype = torch.get_autocast_dtype(NAME)
        x, states = x.to(dtype), tuple(state.to(dtype) for state in states)
        params = [weight.to(dtype) for weight in params]
    out: tuple[torch.Tensor, ...] = _Recurrent.apply(kind, num_layers, train, len(states), x, *states, *params)  # type: ignore[no-untyped-call]
    return out


class _Recurrent(torch.autograd.Function):
    """What cuDNN makes and keeps; nothing is computed."""

    @staticmethod
    def forward(
        ctx: Any, kind: str, num_layers: int, train: bool, num_states: int, x: torch.Tensor, *rest: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        states, params = rest[:num_states], rest[num_states:]
        width = states[0].shape[-1]  # of the output: what a projection leaves, where there is one
        hidden = states[-1].shape[-1]
        rows = states[0].shape[0]  # layers times directions
        out = x.new_empty((*x.shape[:-1], rows // num_layers * width))
        ctx.num_states = num_states
        ctx.set_materialize_grads(False)
        if train:
            tokens = x.shape[:-1].numel()
            kept = tokens * (rows * hidden * _KEPT_PER_UNIT[kind] + (rows - rows // num_layers) * width)
            ctx.save_for_backward(x, out, x.new_empty(kept), *states, *params)
        else:
            ctx.save_for_backward(x, out, None, *states, *params)
        return (out, *(state.new_empty(state.shape) for state in states))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, _, reserve, *rest = ctx.saved_tensors
        if reserve is None:
            raise RuntimeError("cudnn RNN backward can only be called in training mode")
        states, params = rest[: ctx.num_states], rest[ctx.num_states :]
        # The gradients of all weights are one piece, as the weights are; each parameter gets its part of it.
        flat = x.new_empty(sum(weight.numel() for weight in params))
        parts = flat.split([weight.numel() for weight in params])
        of_weights = (part.view(weight.shape) for part, weight in zip(parts, params, strict=True))
        made = (x.new_empty(x.shape) if ctx.needs_input_grad[4] else None, *map(torch.empty_like, states), *of_weights)
        return (None, None, None, None, *made)
