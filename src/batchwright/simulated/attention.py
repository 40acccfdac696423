"""`scaled_dot_product_attention` on the simulated card: the kernel that the card would choose, with what it keeps.

Left alone, torch takes the plain path for a device it does not know, and a step would seem to keep every attention map.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from batchwright.simulated.attention_choice import EFFICIENT, FLASH, Attention, choose_attention
from batchwright.simulated.backend import simulated_device

if TYPE_CHECKING:
    from batchwright.catalogue.gpus import Card

_aten = torch.ops.aten
_FLASH_ALIGNMENT, _MASK_ALIGNMENT = 8, 16
_registered: list[torch.library.Library] = []


class CurrentCard:
    """The card that is simulated just now; attention asks for its generation."""

    card: Card | None = None


def register_attention() -> None:
    """Take the place of torch's own choice for the simulated device, once per process."""
    if _registered:
        return
    simulated_device()
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        library = torch.library.Library("aten", "IMPL", key)
        library.impl("scaled_dot_product_attention", _attend)
        _registered.append(library)


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
    asked = Attention(
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
    chosen = choose_attention(CurrentCard.card, asked) if query.dim() == 4 else "math"
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
    found = _first(_aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale))
    return found[..., :head_dim] if missing else found


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


def _first(found: Any) -> torch.Tensor:
    first: torch.Tensor = found[0]
    return first
