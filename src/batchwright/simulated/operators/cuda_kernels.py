"""The kernels of a simulated card: layouts of what they make, and what they hold beyond the outputs that shapes show.

Promises:
- each rule is read off PyTorch 2.13's source; the file is named beside it;
- what cuBLAS keeps for each thread is taken when a thread multiplies for the first time, as on the card;
- an operator that CUDA runs as one kernel is not taken apart;
- attention takes the kernel that the card would choose, and keeps what that keeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.functional import pad

from batchwright.catalogue.cards import Card, cublas_workspace_bytes
from batchwright.device.device import Arguments, Moment, around
from batchwright.simulated.allocator.caching_allocator import CachingAllocator, SimulatedOutOfMemory
from batchwright.simulated.operators.convolutions import (
    CONVOLUTIONS,
    LAYOUT_RULES,
    convolution_moments,
    most_workspace,
)
from batchwright.simulated.operators.input_copies import copied_bytes
from batchwright.simulated.torch_patches.backend import card_device, is_on_card, simulated_device

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager


_aten = torch.ops.aten
_COPY = _aten._to_copy.default
_MULTIPLIES = {
    *(_aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default, _aten.addbmm.default),
    *(_aten.mv.default, _aten.addmv.default, _aten.dot.default, _aten._scaled_mm.default),
}


class CudaKernels:
    """How one card runs operators, from its first to its last."""

    def __init__(self, card: Card, allocator: CachingAllocator) -> None:
        self._card, self._allocator = card, allocator
        self._have_multiplied: set[tuple[str, int]] = set()
        self._most_allocated = 0

    def following(self) -> AbstractContextManager[Any]:
        """Have tensors tell their device as it is: to the user's code they say that they are on a GPU."""
        context: AbstractContextManager[Any] = torch._C.DisableTorchFunction()
        return context

    def take_arguments(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], mode: FakeTensorMode
    ) -> Arguments:
        """Return the arguments with the simulated card for a GPU, and with a fake tensor to copy from."""
        if func is _COPY:
            # A real tensor is taken for a fake one of its kind. Fake ones compute with small constants for real,
            # and on the card there is nothing to compute with.
            given = args[0] if isinstance(args[0], FakeTensor) else mode.from_tensor(args[0])
            given.constant = None
            args = (given, *args[1:])
        # A device that was not named in a call of torch's but handed on inside of one.
        return tuple(map(card_device, args)), {name: card_device(value) for name, value in kwargs.items()}

    def library_bytes(self, func: Callable[..., Any], phase: str) -> int:
        """Return the workspace that cuBLAS takes where a thread multiplies for the first time on a stream."""
        handle = ("backward" if phase == "backward" else "forward", self._allocator.stream)
        if func not in _MULTIPLIES or handle in self._have_multiplied:
            return 0
        self._have_multiplied.add(handle)
        return cublas_workspace_bytes(self._card)

    def shape_rule(self, func: Callable[..., Any]) -> Callable[..., Any] | None:
        """Return the rule of an operator's results, in cuDNN's layouts; None for updates of lists."""
        return None if _changes_a_list(func) else LAYOUT_RULES.get(func, func)

    def moments_of(
        self, func: Callable[..., Any], args: Sequence[Any], outputs: Sequence[torch.Tensor], _: Mapping[str, Any]
    ) -> list[Moment]:
        """Return what happens inside an operator on this card."""
        most = most_workspace(self._card, func, args, outputs)
        if most:
            output_bytes = sum(tensor.numel() * tensor.element_size() for tensor in outputs)
            now = self._allocator.stats.allocated.current
            self._most_allocated = max(self._most_allocated, now + output_bytes + most)
        if func in CONVOLUTIONS:
            return self._as_room_allows(convolution_moments(self._card, func, args, outputs))
        moments = [Moment(output=tensor) for tensor in outputs]
        held = copied_bytes(func, args) if outputs and is_on_card(outputs[0]) else []
        if rule := _WORKSPACES.get(func):
            held += [num_bytes for num_bytes in rule(self._card, args, outputs) if num_bytes > 0]
        return around(held, moments) if held else moments

    def _as_room_allows(self, moments: list[Moment]) -> list[Moment]:
        """Leave out workspaces that the card has no room for: PyTorch then takes the next plan, one that needs none.

        Conv_v8.cpp and Conv_v7.cpp catch the out-of-memory of a workspace; that of a result is the user's.
        """
        if not self._allocator.is_limited or not any(moment.num_bytes for moment in moments):
            return moments
        taken, held, kept = [], None, []
        try:
            for moment in moments:
                size = moment.num_bytes if moment.output is None else moment.output.untyped_storage().nbytes()
                if size < 0:
                    if held is not None:
                        self._allocator.free(held)
                        kept.append(moment)
                    held = None
                    continue
                try:
                    block = self._allocator.malloc(size)
                except SimulatedOutOfMemory:
                    if moment.output is not None:
                        return moments  # the run itself says so
                    continue
                kept.append(moment)
                if moment.output is None:
                    held = block
                else:
                    taken.append(block)
        finally:
            for block in reversed(taken):
                self._allocator.free(block)
        return kept

    @property
    def unsure_bytes(self) -> int:
        """By how much the peak would be higher if every convolution held the most that it may."""
        return max(self._most_allocated - self._allocator.stats.allocated.peak, 0)


@cache
def _changes_a_list(func: Any) -> bool:
    """Whether an operator updates a list of tensors in place: it makes nothing, and asking it takes its time."""
    name: str = func._schema.name
    return name.startswith("aten::_foreach_") and name.endswith("_")


# Operators that CUDA runs as one kernel, and that torch takes apart on a device it does not know. Taken apart, their
# temporaries would be counted: the backward of SiLU alone would hold four more tensors of its size. torch's own table
# (native_functions.yaml) tells which they are: a kernel for CUDA beside one result of operators that autograd follows.
_FUSED_ON_CUDA = ("silu_backward", "mish_backward", "_fused_rms_norm")


@cache
def register_kernels() -> list[torch.library.Library]:
    """Have the simulated device own these operators and attention, once per process: as long as these are held."""
    simulated_device()
    libraries = [torch.library.Library("aten", "IMPL", key) for key in ("AutogradPrivateUse1", "PrivateUse1")]
    for library in libraries:
        library.impl("scaled_dot_product_attention", _attend)
    for name in _FUSED_ON_CUDA:
        libraries[-1].impl(name, _computes_nothing)
    return libraries


def _computes_nothing(*args: Any, **options: Any) -> NoReturn:
    raise AssertionError("a fake tensor answers before any kernel of the simulated device is asked")


_FLOAT = 4
_LONG = 8
# embedding backward: rows of one thread in its first pass (native/cuda/EmbeddingBackwardKernel.cu).
_ROWS_PER_THREAD = 10


def _flash_backward(_: Card, args: Sequence[Any], outputs: Sequence[torch.Tensor]) -> list[int]:
    """Row sums, the gradient of the queries in float32, and where heads are grouped those of keys and values apart.

    native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd.
    """
    query, key = args[1], args[2]
    batch, heads, length, head_dim = query.shape
    rows = _up_to(length, 128)
    rounded = _up_to(head_dim, 32) if head_dim <= 128 else _up_to(head_dim, 64)
    held = [batch * heads * rows * _FLOAT, batch * rows * heads * rounded * _FLOAT]
    if key.shape[1] != heads:
        held += [batch * key.shape[2] * heads * head_dim * key.element_size()] * 2
    return held


def _efficient_backward(_: Card, args: Sequence[Any], outputs: Sequence[torch.Tensor]) -> list[int]:
    """Row sums, and in 16 bits the gradient of the queries in float32.

    native/transformers/cuda/attention_backward.cu.
    """
    query = args[1]
    batch, heads, length, head_dim = query.shape
    held = [batch * heads * length * _FLOAT]
    if query.element_size() < _FLOAT:
        held.append(batch * heads * _up_to(length, 64) * _up_to(head_dim, 64) * _FLOAT)
    return held


def _embedding_backward(_: Card, args: Sequence[Any], outputs: Sequence[torch.Tensor]) -> list[int]:
    """Indices sorted beside their places, and sums of parts in float32 (native/cuda/EmbeddingBackwardKernel.cu)."""
    gradient, indices, num_weights = args[0], args[1], int(args[2])
    number = indices.numel()
    if number <= 3072:  # few indices are added up without sorting
        return []
    parts = number // _ROWS_PER_THREAD + min(number, num_weights)
    return [number * _LONG, number * _LONG, parts * gradient.shape[-1] * _FLOAT]


def _loss_of_logits(_: Card, args: Sequence[Any], outputs: Sequence[torch.Tensor]) -> list[int]:
    """log_sigmoid, and the losses before they are summed up (native/Loss.cpp)."""
    return [args[0].nbytes] * (2 if outputs[0].numel() < args[0].numel() else 1)


def _up_to(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


_WORKSPACES: dict[Any, Callable[[Card, Sequence[Any], Sequence[torch.Tensor]], list[int]]] = {
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    _aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    _aten.embedding_dense_backward.default: _embedding_backward,
    _aten.binary_cross_entropy_with_logits.default: _loss_of_logits,
}


# `scaled_dot_product_attention`: the kernel that the card would choose, with what it keeps. Left alone, torch takes the
# plain path for a device it does not know, and a step would seem to keep every attention map. The choice between flash,
# memory-efficient and plain follows PyTorch's own conditions (native/transformers/cuda/sdp_utils.cpp). cuDNN's kernel,
# which Hopper cards may prefer, keeps what flash keeps, and is not told apart from it.

_VOLTA, _AMPERE = (7, 0), (8, 0)  # the first with tensor cores, and the first whose tensor cores take bf16
FLASH, EFFICIENT, MATH = "flash", "efficient", "math"

_LARGEST_FLASH_HEAD = 256
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Attention:
    """What the choice depends on."""

    dtype: torch.dtype
    head_dim: int
    value_head_dim: int
    query_heads: int
    key_heads: int
    has_mask: bool = False
    mask_needs_grad: bool = False
    enable_gqa: bool = False
    is_dense: bool = True
    """Whether the last dimension of all three is contiguous."""


def choose_attention(card: Card, call: Attention) -> str:
    """Return the kernel that runs.

    >>> from batchwright.catalogue.cards import find_card
    >>> call = Attention(torch.bfloat16, 64, 64, 12, 12)
    >>> choose_attention(find_card("a100-40gb"), call), choose_attention(find_card("v100-16gb"), call)
    ('flash', 'math')
    """
    backends = torch.backends.cuda
    # cuDNN's kernel alone, where somebody has switched the others off, keeps what flash keeps.
    fused = backends.flash_sdp_enabled() or (backends.cudnn_sdp_enabled() and not backends.math_sdp_enabled())
    if fused and _flash_can(card, call):
        return FLASH
    if backends.mem_efficient_sdp_enabled() and _efficient_can(card, call):
        return EFFICIENT
    if not backends.math_sdp_enabled():
        raise RuntimeError(f"No available kernel. Aborting execution. (attention on {card.product}, simulated)")
    return MATH


def _flash_can(card: Card, call: Attention) -> bool:
    return (
        card.capability >= _AMPERE
        and call.dtype in _HALF
        and not call.has_mask
        and call.is_dense
        and call.head_dim == call.value_head_dim <= _LARGEST_FLASH_HEAD
        and _heads_go(call, allows_groups=True)
    )


def _efficient_can(card: Card, call: Attention) -> bool:
    dtypes = (torch.float32, *_HALF) if card.capability >= _AMPERE else (torch.float32, torch.float16)
    alignment = _alignment(card, call.dtype)
    return (
        call.dtype in dtypes
        and not call.mask_needs_grad
        and call.is_dense
        and call.head_dim % alignment == call.value_head_dim % alignment == 0
        and _heads_go(call, allows_groups=False)
    )


def _alignment(card: Card, dtype: torch.dtype) -> int:
    """Elements of a head that tensor cores read at once: 16 bytes of them, and any number without tensor cores."""
    if dtype in _HALF:
        return 8 if card.capability >= _VOLTA else 1
    return 4 if card.capability >= _AMPERE else 1


def _heads_go(call: Attention, *, allows_groups: bool) -> bool:
    if call.query_heads == call.key_heads:
        return True
    return allows_groups and call.enable_gqa and call.query_heads % call.key_heads == 0


_FLASH_ALIGNMENT, _MASK_ALIGNMENT = 8, 16


class CurrentCard:
    """The card that is simulated just now; attention asks for its generation."""

    card: Card | None = None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    assert CurrentCard.card is not None, "attention on the simulated card runs only while one is simulated"
    call = Attention(
        query.dtype,
        query.shape[-1],
        value.shape[-1],
        query.shape[-3] if query.dim() > 2 else 1,
        key.shape[-3] if key.dim() > 2 else 1,
        has_mask=attn_mask is not None,
        mask_needs_grad=attn_mask is not None and attn_mask.requires_grad,
        enable_gqa=enable_gqa,
        is_dense=all(t.stride(-1) == 1 for t in (query, key, value)),
    )
    chosen = choose_attention(CurrentCard.card, call) if query.dim() == 4 else "math"
    if chosen == FLASH:
        return _flash(query, key, value, dropout_p, is_causal, scale)
    mask = _additive(attn_mask, query.dtype)
    if chosen == EFFICIENT:
        needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        return _first(
            _aten._scaled_dot_product_efficient_attention(
                query, key, value, _expanded(mask, query, key), needs_grad, dropout_p, is_causal, scale=scale
            )
        )
    return _first(
        _aten._scaled_dot_product_attention_math(
            query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )
    )


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float, is_causal: bool, scale: float | None
) -> torch.Tensor:
    head_dim = query.shape[-1]
    missing = -head_dim % _FLASH_ALIGNMENT
    if missing:
        scale = head_dim**-0.5 if scale is None else scale
        query, key, value = (pad(t, (0, missing)) for t in (query, key, value))
    out = _first(_aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale))
    return out[..., :head_dim] if missing else out


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A mask of truths becomes one that is added: zeros, and minus infinity where it is false."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))


def _expanded(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """Rows of a mask are aligned for the kernel, by a copy where they are not."""
    if mask is None:
        return None
    missing = -mask.shape[-1] % _MASK_ALIGNMENT
    if missing:
        mask = pad(mask, (0, missing))[..., : mask.shape[-1]]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _first(results: Any) -> torch.Tensor:
    first: torch.Tensor = results[0]
    return first
