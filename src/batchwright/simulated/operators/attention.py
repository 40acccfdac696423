"""`scaled_dot_product_attention` on the simulated card: the kernel that the card would choose, with what it keeps.

Left alone, torch takes the plain path for a device it does not know, and a step would seem to keep every attention map.
The choice between flash, memory-efficient and plain follows PyTorch 2.13's own conditions, read off
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp. cuDNN's kernel, which Hopper cards may prefer, keeps what flash
keeps, and is not told apart from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from batchwright.simulated.torch_patches.backend import simulated_device

if TYPE_CHECKING:
    from batchwright.catalogue.cards import Card


FLASH, EFFICIENT, MATH = "flash", "efficient", "math"

_AMPERE, _LARGEST_FLASH_HEAD = (8, 0), 256
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
        return 8 if card.capability >= (7, 0) else 1
    return 4 if card.capability >= _AMPERE else 1


def _heads_go(call: Attention, *, allows_groups: bool) -> bool:
    if call.query_heads == call.key_heads:
        return True
    return allows_groups and call.enable_gqa and call.query_heads % call.key_heads == 0


_aten = torch.ops.aten
_FLASH_ALIGNMENT, _MASK_ALIGNMENT = 8, 16


class CurrentCard:
    """The card that is simulated just now; attention asks for its generation."""

    card: Card | None = None


@cache
def register_attention() -> list[torch.library.Library]:
    """Take the place of torch's own choice for the simulated device, once per process: as long as these are held."""
    simulated_device()
    libraries = [torch.library.Library("aten", "IMPL", key) for key in ("AutogradPrivateUse1", "PrivateUse1")]
    for library in libraries:
        library.impl("scaled_dot_product_attention", _attend)
    return libraries


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
