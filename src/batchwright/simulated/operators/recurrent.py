"""nn.RNN, nn.LSTM and nn.GRU on the simulated card: one call of cuDNN, with the reserve it keeps for backward.

Left alone, torch runs a device it does not know through one cell after the other and keeps what each of them keeps.
How large cuDNN's reserve is, it tells only on a card. Counted is what its backward cannot do without: for every token,
layer and direction the gates, the state of the cell, and the output of all layers but the last; the gradients of the
gates are written over them. That is a formula, never compared with a card, and cuDNN's own workspace is not in it.
What torch makes around the calls is read off ATen's cudnn/RNN.cpp: copies of an input or a gradient that is not laid
out step by step, as with batch_first, while a call runs; and the gradient of the input whether it is asked for or not.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import groupby, pairwise
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from batchwright.simulated.operators.library_work import LibraryWork, report
from batchwright.simulated.torch_patches.backend import NAME, simulated_device
from batchwright.simulated.torch_patches.patches import Patch

# Packing and padding of sequences without memory, on the CPU and on the simulated card, where lengths are known. How
# much a packed batch holds is in the values of its lengths, and torch reads them by a pointer that a fake tensor has
# not got. Here they are read as numbers, which a trace answers for what follows from constants and batches. How many
# samples each step has is a real tensor in turn, as recurrent layers of the CPU read that by a pointer as well. The
# pieces are those of ATen's PackedSequence.cpp: packing copies each run of steps of one batch size, and then all runs
# into one tensor; padding writes each run into a filled tensor, and autograd follows that.


def packed_by_numbers() -> Iterator[Patch]:
    """Have the CPU pack and pad fake tensors in the same way."""
    for name, stands_in in (("_pack_padded_sequence", _pack), ("_pad_packed_sequence", _pad)):
        yield Patch(torch._VF, name, _for_fakes(stands_in, getattr(torch._VF, name)))


def _for_fakes(stands_in: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def call(data: torch.Tensor, *args: Any) -> Any:
        return (stands_in if isinstance(data, FakeTensor) else original)(data, *args)

    return call


def _pack(x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    known = _numbers(lengths, torch.ops.aten._pack_padded_sequence.default)
    if len(known) != x.shape[0 if batch_first else 1]:
        raise RuntimeError(f"there are {len(known)} lengths for a batch of shape {tuple(x.shape)}")
    if known[-1] <= 0 or any(later > earlier for earlier, later in pairwise(known)):
        raise RuntimeError("lengths must be positive, and in decreasing order unless enforce_sorted=False")
    sizes = _turned(known)
    data: torch.Tensor = _Packed.apply(x, tuple(_runs(sizes)), batch_first)  # type: ignore[no-untyped-call]
    with _disable_current_modes():
        return data, torch.tensor(sizes, dtype=torch.int64, device="cpu")


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, runs: tuple[tuple[int, int, int], ...], batch_first: bool) -> torch.Tensor:
        ctx.shape, ctx.batch_first = x.shape, batch_first
        steps = x.transpose(0, 1) if batch_first else x
        pieces = [steps[first:last, :size].contiguous().flatten(0, 1) for first, last, size in runs]
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if not ctx.batch_first:
            return gradient.new_zeros(ctx.shape), None, None
        batch, steps, *rest = ctx.shape
        return gradient.new_zeros((steps, batch, *rest)).transpose(0, 1), None, None


def _pad(
    data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = _numbers(batch_sizes, torch.ops.aten._pad_packed_sequence.default)
    padded = data.new_full((max(total_length, len(sizes)), sizes[0], *data.shape[1:]), padding_value)
    start = 0
    for first, last, size in _runs(sizes):
        end = start + (last - first) * size
        padded[first:last, :size].copy_(data[start:end].unflatten(0, (last - first, size)))
        start = end
    lengths = torch.tensor(_turned(sizes), dtype=torch.int64, device="cpu")
    return padded.transpose(0, 1) if batch_first else padded, lengths


def _turned(falling: list[int]) -> list[int]:
    """Lengths of samples to samples per step, and back: how many of the numbers are above 0, above 1 and so on."""
    rising = falling[::-1]
    return [len(rising) - bisect_right(rising, number) for number in range(rising[-1])]


def _runs(sizes: list[int]) -> Iterator[tuple[int, int, int]]:
    """Steps of one batch size: the first of them, the one after the last, and the size."""
    first = 0
    for size, steps in groupby(sizes):
        last = first + len(list(steps))
        yield first, last, size
        first = last


def _numbers(tensor: torch.Tensor, operator: Any) -> list[int]:
    try:
        return [int(number.item()) for number in tensor]
    except DataDependentOutputException as error:
        raise DynamicOutputShapeException(operator) from error


# nn.GRUCell runs by one kernel on CUDA, with a workspace that it keeps for backward; torch has a shape rule for that of
# nn.LSTMCell and none for this one. What they make is read off ATen's cuda/RNN.cu: forward the new state and five
# numbers for each unit of it; backward the gradients of both gates and of the state, and of both biases by sums.

_WORKSPACE_PER_UNIT, _GATES = 5, 3


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


# Gates, and the state that a cell carries beside its output. GRU keeps the product that its reset gate scales.
_KEPT_PER_UNIT = {"lstm": 4 + 1, "gru": 3 + 1, "rnn_tanh": 1, "rnn_relu": 1}


@cache
def register_recurrent() -> tuple[torch.library.Library, ...]:
    """Own recurrent layers, packing and padding on the simulated device, once per process: as long as these are held.

    And give torch the shape rules that it lacks.
    """
    simulated_device()
    shapes = torch.library.Library("aten", "IMPL", "Meta")
    shapes.impl("_thnn_fused_gru_cell", _gru_cell)
    shapes.impl("_thnn_fused_gru_cell_backward", _gru_cell_backward)
    library = torch.library.Library("aten", "IMPL", "AutogradPrivateUse1")
    library.impl("_pack_padded_sequence", _pack)
    library.impl("_pad_packed_sequence", _pad)
    for kind in _KEPT_PER_UNIT:
        library.impl(f"{kind}.input", partial(_run, kind))
        library.impl(f"{kind}.data", lambda data, batch_sizes, *rest, kind=kind: _run(kind, data, *rest))
    return shapes, library


def _run(
    kind: str,
    x: torch.Tensor,
    hx: Any,
    params: list[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
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


def _report(
    name: str, x: torch.Tensor, rows: int, params: Sequence[torch.Tensor], *, batch_first: bool, times: int = 1
) -> None:
    """Tell what cuDNN computes: each token meets every weight, and each step of a layer waits for the one before."""
    tokens = x.shape[:-1].numel()
    steps = x.shape[1 if batch_first else 0] if x.dim() == 3 else tokens
    weights = sum(weight.numel() for weight in params if weight.dim() == 2)
    num_bytes = times * weights * steps * x.element_size()
    report(LibraryWork(name, "recurrent", 2 * times * tokens * weights, num_bytes, 0, rows * steps, x.dtype))


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
        _report(f"cudnn.{kind}", x, rows, params, batch_first=batch_first)
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
        of_inputs = (of_input if ctx.needs_input_grad[5] else None, *of_states)
        if not any(ctx.needs_input_grad[6 + ctx.num_states :]):
            return (*[None] * 5, *of_inputs, *[None] * len(params))
        copied = _by_step(x, ctx.batch_first)
        _report("cudnn.backward", x, ctx.saved_tensors[3].shape[0], params, batch_first=ctx.batch_first, times=2)
        # The gradients of all weights are one piece, as the weights are; each parameter gets its part of it.
        flat = x.new_empty(sum(weight.numel() for weight in params))
        parts = flat.split([weight.numel() for weight in params])
        of_weights = [part.view(weight.shape) for part, weight in zip(parts, params, strict=True)]
        del copied, given
        return (*[None] * 5, *of_inputs, *of_weights)
