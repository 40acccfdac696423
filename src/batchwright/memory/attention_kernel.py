"""What the fused attention of the CPU holds while it runs: a tile per thread, and a gradient put into its own order.

Each thread works on a tile of queries by keys. Its size follows from the lengths and the type alone, so the bytes are
a formula; it was read off torch 2.13.0's allocations (tests/memory/test_attention_kernel.py compares them). Where
oneDNN multiplies the tiles, its scratch comes on top and the kernel is asked instead (`asked_kernels`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

_aten = torch.ops.aten
FORWARD = _aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default

_KEYS_PER_TILE = 512
_FLOAT = 4  # a tile accumulates in float whatever the type of the inputs


def held_while_running(func: Any, args: Sequence[Any]) -> tuple[int, ...]:
    """Bytes of what the kernel holds beside its inputs and outputs; none for any other operator."""
    if func is FORWARD:
        query, key = args[0], args[1]
        queries, keys = _tile(query, key)
        tiles = torch.get_num_threads() * queries * (keys + 2 + query.shape[-1]) * _FLOAT
        return (tiles, *_in_type(query, queries * keys))
    if func is BACKWARD:
        gradient, query, key = args[0], args[1], args[2]
        queries, keys = _tile(query, key)
        # The kernel wants (batch, length, heads, width); a gradient that lies otherwise is copied.
        in_order = gradient.transpose(1, 2).is_contiguous()
        copied = 0 if in_order else gradient.numel() * gradient.element_size()
        tiles = torch.get_num_threads() * 2 * queries * keys * _FLOAT
        return (copied, tiles, *_in_type(query, 2 * queries * keys))
    return ()


def _in_type(query: torch.Tensor, num_elements: int) -> tuple[int, ...]:
    """A 16-bit kernel keeps each tile in that type too, to multiply it."""
    if query.element_size() == _FLOAT or query.dtype is torch.float64:
        return ()
    return (torch.get_num_threads() * num_elements * query.element_size(),)


def _tile(query: torch.Tensor, key: torch.Tensor) -> tuple[int, int]:
    length = query.shape[-2]
    queries = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(queries, length), min(_KEYS_PER_TILE, key.shape[-2])
