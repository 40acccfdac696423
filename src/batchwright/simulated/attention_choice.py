"""Which attention kernel a card would choose: flash, memory-efficient or plain, by PyTorch 2.13's own conditions.

Read off aten/src/ATen/native/transformers/cuda/sdp_utils.cpp. cuDNN's kernel, which Hopper cards may prefer, keeps what
flash keeps, and is not told apart from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from batchwright.catalogue.gpus import Card

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


def choose_attention(card: Card, asked: Attention) -> str:
    """Return the kernel that runs.

    >>> from batchwright.catalogue.gpus import find_card
    >>> asked = Attention(torch.bfloat16, 64, 64, 12, 12)
    >>> choose_attention(find_card("a100-40gb"), asked), choose_attention(find_card("v100-16gb"), asked)
    ('flash', 'math')
    """
    backends = torch.backends.cuda
    # cuDNN's kernel alone, where somebody has switched the others off, keeps what flash keeps.
    fused = backends.flash_sdp_enabled() or (backends.cudnn_sdp_enabled() and not backends.math_sdp_enabled())
    if fused and _flash_can(card, asked):
        return FLASH
    if backends.mem_efficient_sdp_enabled() and _efficient_can(card, asked):
        return EFFICIENT
    if not backends.math_sdp_enabled():
        raise RuntimeError(f"No available kernel. Aborting execution. (attention on {card.product}, simulated)")
    return MATH


def _flash_can(card: Card, asked: Attention) -> bool:
    return (
        card.capability >= _AMPERE
        and asked.dtype in _HALF
        and not asked.has_mask
        and asked.is_dense
        and asked.head_dim == asked.value_head_dim <= _LARGEST_FLASH_HEAD
        and _heads_go(asked, allows_groups=True)
    )


def _efficient_can(card: Card, asked: Attention) -> bool:
    dtypes = (torch.float32, *_HALF) if card.capability >= _AMPERE else (torch.float32, torch.float16)
    alignment = _alignment(card, asked.dtype)
    return (
        asked.dtype in dtypes
        and not asked.mask_needs_grad
        and asked.is_dense
        and asked.head_dim % alignment == asked.value_head_dim % alignment == 0
        and _heads_go(asked, allows_groups=False)
    )


def _alignment(card: Card, dtype: torch.dtype) -> int:
    """Elements of a head that tensor cores read at once: 16 bytes of them, and any number without tensor cores."""
    if dtype in _HALF:
        return 8 if card.capability >= (7, 0) else 1
    return 4 if card.capability >= _AMPERE else 1


def _heads_go(asked: Attention, *, allows_groups: bool) -> bool:
    if asked.query_heads == asked.key_heads:
        return True
    return allows_groups and asked.enable_gqa and asked.query_heads % asked.key_heads == 0
