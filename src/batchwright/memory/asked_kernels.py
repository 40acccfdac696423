"""What a CPU convolution or LSTM allocates besides its result, asked of the kernel itself at small sizes.

oneDNN computes in layouts of its own and decides by shapes, strides, type and processor which copies it makes; other
convolutions go through im2col. No rule of ours would hold on the next processor. So the kernel is run on a few
samples (an LSTM: on a few steps in time), its allocations are recorded, and each of them is taken on to the real size
in a straight line: a copy of activations grows with the batch, a copy of weights does not.

Promises:
- what is small itself is asked as it is;
- two sizes are compared only where the kernel made the same allocations in the same order, else larger ones are
  asked, up to the real one;
- an operator is asked once per shape.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig
from torch._subclasses.fake_tensor import unset_fake_temporarily

from batchwright.memory.refusals import NotFollowedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_aten = torch.ops.aten
# So much of an activation is worth running for real: some ten milliseconds of a kernel.
CHEAP_BYTES = 2 * 2**20
_LSTM, _LSTM_BACKWARD = _aten.mkldnn_rnn_layer.default, _aten.mkldnn_rnn_layer_backward.default
# The arguments whose first dimension is the batch; of an LSTM, the time.
_SCALED: dict[Any, tuple[int, ...]] = {
    _aten.convolution.default: (0,),
    _aten.convolution_backward.default: (0, 1),
    _LSTM: (0,),
    _LSTM_BACKWARD: (0, 7, 10),
}
_WORKSPACE = 22  # the last argument of the backward of an LSTM: what its forward kept


def can_be_asked(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operator is one whose allocations follow from no shape rule."""
    return func in _SCALED and args[0].device.type == "cpu"


def allocations_of(func: Any, args: Sequence[Any]) -> tuple[int, ...]:
    """Bytes allocated (positive) and freed (negative) inside an operator, in order; what it returns is not freed."""
    size = args[0].shape[0]
    small = _small_size(args[0])
    while 2 * small < size:
        first, second = _asked(func, args, small), _asked(func, args, 2 * small)
        if [n > 0 for n in first] == [n > 0 for n in second]:
            steps = (size - small) / small
            return tuple(round(a + (b - a) * steps) for a, b in zip(first, second, strict=True))
        small *= 2
    return _asked(func, args, size)


def _small_size(scaled: torch.Tensor) -> int:
    """A size that costs little, yet gives each thread its share: kernels may keep a sum of weights for each."""
    small = max(2, torch.get_num_threads())
    sample_bytes = scaled.shape[1:].numel() * scaled.element_size()
    while 2 * small * sample_bytes <= CHEAP_BYTES:
        small *= 2
    return small


def _asked(func: Any, args: Sequence[Any], size: int) -> tuple[int, ...]:
    signatures = [_signature(arg, size if i in _SCALED[func] else None) for i, arg in enumerate(args)]
    if func is _LSTM_BACKWARD:
        signatures[_WORKSPACE] = None
    return _recorded(func, torch.is_grad_enabled(), *signatures)


def _signature(arg: Any, size: int | None) -> Any:
    if not isinstance(arg, torch.Tensor):
        return tuple(arg) if isinstance(arg, list) else arg
    if size is None:
        return arg.shape, arg.stride(), arg.dtype
    shape = torch.Size((size, *arg.shape[1:]))
    if arg.stride(0) in (0, max(arg.stride())):
        return shape, arg.stride(), arg.dtype
    return shape, _dense_strides(shape, arg.stride()), arg.dtype


def _dense_strides(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps, in the order of others: where what shrinks is not outermost, theirs no longer fit."""
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: like[dim]):
        strides[dim], step = step, step * shape[dim]
    return tuple(strides)


@lru_cache(maxsize=1024)
def _recorded(func: Any, with_gradients: bool, *signatures: Any) -> tuple[int, ...]:
    # An LSTM looks at the grad mode to decide what to keep.
    with unset_fake_temporarily(), torch.set_grad_enabled(with_gradients):
        args = [_example(signature) for signature in signatures]
        if func is _LSTM_BACKWARD:
            args[_WORKSPACE] = _workspace_for(args)
        return record_allocations(lambda: func(*args))


def _workspace_for(backward: Sequence[Any]) -> torch.Tensor:
    tensors, (reverse, mode, hidden, layers, biases, train, both, batch_sizes, batch_first) = (
        backward[:7],
        backward[13:_WORKSPACE],
    )
    with torch.enable_grad():  # without gradients the kernel keeps no workspace
        kept: torch.Tensor = _LSTM(
            *tensors, reverse, batch_sizes, mode, hidden, layers, biases, both, batch_first, train
        )[3]
    return kept


def _example(signature: Any) -> Any:
    if isinstance(signature, tuple) and signature and isinstance(signature[0], torch.Size):
        size, stride, dtype = signature
        return torch.empty_strided(size, stride, dtype=dtype).zero_()
    return list(signature) if isinstance(signature, tuple) else signature


def record_allocations(run: Callable[[], Any]) -> tuple[int, ...]:
    """Run something for real, and return what it allocated and freed while it ran."""
    autograd: Any = torch._C._autograd
    if autograd._profiler_enabled():
        raise NotFollowedError(
            "a convolution or LSTM", "its kernel cannot be asked what it allocates while a profiler runs"
        )
    # Not torch.profiler: that one takes longer than the kernels, and logs to the terminal.
    config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    autograd._enable_profiler_legacy(config)
    try:
        kept = run()
    finally:
        threads = autograd._disable_profiler_legacy()
    del kept
    return tuple(event.cpu_memory_usage() for events in threads for event in events if event.kind() == "memory_alloc")
