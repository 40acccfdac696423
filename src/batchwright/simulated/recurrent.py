"""nn.RNN, nn.LSTM and nn.GRU on the simulated card: one call of cuDNN, with the reserve it keeps for backward.

Left alone, torch runs a device it does not know through one cell after the other and keeps what each of them keeps.
How large cuDNN's reserve is, it tells only on a card. Counted is what its backward cannot do without: for every token,
layer and direction the gates, the state of the cell, and the output of all layers but the last; the gradients of the
gates are written over them. That is a formula, never compared with a card, and cuDNN's own workspace is not in it.
What torch makes around the calls is read off ATen's cudnn/RNN.cpp: copies of an input or a gradient that is not laid
out step by step, as with batch_first, while a call runs; and the gradient of the input whether it is asked for or not.
"""

from __future__ import annotations

from typing import Any

import torch

from batchwright.simulated.backend import NAME, simulated_device
from batchwright.simulated.packed_sequences import register_packed_sequences
from batchwright.simulated.recurrent_cells import register_recurrent_cells

# Gates, and the state that a cell carries beside its output. GRU keeps the product that its reset gate scales.
_KEPT_PER_UNIT = {"lstm": 4 + 1, "gru": 3 + 1, "rnn_tanh": 1, "rnn_relu": 1}
_registered: list[torch.library.Library] = []


def register_recurrent() -> None:
    """Take the place of torch's loop over cells for the simulated device, once per process."""
    if _registered:
        return
    simulated_device()
    register_recurrent_cells()
    register_packed_sequences()
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
        return _run(kind, x, hx, params, num_layers, train, batch_first)

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
        return _run(kind, data, hx, params, num_layers, train, batch_first=False)

    return run


def _run(
    kind: str, x: torch.Tensor, hx: Any, params: list[torch.Tensor], num_layers: int, train: bool, batch_first: bool
) -> tuple[torch.Tensor, ...]:
    states = tuple(hx) if isinstance(hx, list | tuple) else (hx,)
    if torch.is_autocast_enabled(NAME):  # cuDNN is given the weights in one piece, cast anew in every call
        dtype = torch.get_autocast_dtype(NAME)
        x, states = x.to(dtype), tuple(state.to(dtype) for state in states)
        params = [weight.to(dtype) for weight in params]
    out: tuple[torch.Tensor, ...] = _Recurrent.apply(  # type: ignore[no-untyped-call]
        kind, num_layers, train, batch_first, len(states), x, *states, *params
    )
    return out


def _by_step(tensor: torch.Tensor, batch_first: bool) -> torch.Tensor:
    """Return a tensor as cuDNN takes it, all samples of a step together: a copy where it lies otherwise."""
    return (tensor.transpose(0, 1) if batch_first else tensor).contiguous()


def _made_by_step(like: torch.Tensor, width: int, batch_first: bool) -> torch.Tensor:
    """Return what cuDNN writes step by step, in the order of dimensions of the input."""
    *outer, _ = like.shape
    if not batch_first:
        return like.new_empty((*outer, width))
    batch, steps = outer
    return like.new_empty_strided((batch, steps, width), (width, batch * width, 1))


class _Recurrent(torch.autograd.Function):
    """What cuDNN makes and keeps; nothing is computed."""

    @staticmethod
    def forward(
        ctx: Any,
        kind: str,
        num_layers: int,
        train: bool,
        batch_first: bool,
        num_states: int,
        x: torch.Tensor,
        *rest: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        states, params = rest[:num_states], rest[num_states:]
        width = states[0].shape[-1]  # of the output: what a projection leaves, where there is one
        hidden = states[-1].shape[-1]
        rows = states[0].shape[0]  # layers times directions
        copied = _by_step(x, batch_first)
        out = _made_by_step(x, rows // num_layers * width, batch_first)
        after = [state.new_empty(state.shape) for state in states]
        ctx.num_states, ctx.batch_first = num_states, batch_first
        ctx.set_materialize_grads(False)
        reserve = None
        if train:
            tokens = x.shape[:-1].numel()
            kept = tokens * (rows * hidden * _KEPT_PER_UNIT[kind] + (rows - rows // num_layers) * width)
            reserve = x.new_empty(kept)
        ctx.save_for_backward(x, out, reserve, *states, *params)
        del copied
        return (out, *after)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        x, out, reserve, *rest = ctx.saved_tensors
        if reserve is None:
            raise RuntimeError("cudnn RNN backward can only be called in training mode")
        states, params = rest[: ctx.num_states], rest[ctx.num_states :]
        # A gradient that nobody gave is made of zeros, and stays until all is done.
        given = [
            torch.zeros_like(like, memory_format=torch.contiguous_format) if grad is None else grad
            for grad, like in zip(grads, (out, *states), strict=True)
        ]
        copies = [_by_step(x, ctx.batch_first), _by_step(given[0], ctx.batch_first)]
        # Made whether it is asked for or not: cuDNN needs this pass for the one over the weights.
        of_input = _made_by_step(x, x.shape[-1], ctx.batch_first)
        of_states = [torch.empty_like(state) for state in states]
        del copies
        made = (of_input if ctx.needs_input_grad[5] else None, *of_states)
        if not any(ctx.needs_input_grad[6 + ctx.num_states :]):
            return (*[None] * 5, *made, *[None] * len(params))
        copied = _by_step(x, ctx.batch_first)
        # The gradients of all weights are one piece, as the weights are; each parameter gets its part of it.
        flat = x.new_empty(sum(weight.numel() for weight in params))
        parts = flat.split([weight.numel() for weight in params])
        of_weights = [part.view(weight.shape) for part, weight in zip(parts, params, strict=True)]
        del copied, given
        return (*[None] * 5, *made, *of_weights)
