"""Packing and padding of sequences without memory, on the CPU and on the simulated card, where lengths are known.

How much a packed batch holds is in the values of its lengths, and torch reads them by a pointer that a fake tensor has
not got. Here they are read as numbers, which a trace answers for what follows from constants and batches. How many
samples each step has is a real tensor in turn, as recurrent layers of the CPU read that by a pointer as well.

The pieces are those of ATen's PackedSequence.cpp: packing copies each run of steps of one batch size, and then all runs
into one tensor; padding writes each run into a filled tensor, and autograd follows that.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from batchwright.simulated.torch_patches import Patch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_registered: list[torch.library.Library] = []


def register_packed_sequences() -> None:
    """Take the place of torch's packing and padding for the simulated device, once per process."""
    if _registered:
        return
    library = torch.library.Library("aten", "IMPL", "AutogradPrivateUse1")
    library.impl("_pack_padded_sequence", _pack)
    library.impl("_pad_packed_sequence", _pad)
    _registered.append(library)


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
