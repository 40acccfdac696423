"""A card that is simulated: torch answers for it, its allocator is replayed, and it runs out of memory where it would.

Promises:
- a run on it ends in `torch.OutOfMemoryError` at the very allocation where the real card would raise it, after the
  allocator has given back what it had cached;
- what cuBLAS keeps for each thread is taken when a thread multiplies for the first time, as on the card.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from batchwright.catalogue.gpus import Card, context_of, cublas_workspace_bytes
from batchwright.device.peak_bytes import PeakBytes
from batchwright.simulated.attention import CurrentCard, register_attention
from batchwright.simulated.autocast import register_autocast
from batchwright.simulated.backend import switched_on
from batchwright.simulated.caching_allocator import CachingAllocator, SimulatedOutOfMemory
from batchwright.simulated.cuda_kernels import moments_on_card
from batchwright.simulated.torch_cuda import answering_for
from batchwright.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from batchwright.device.moments import Moment
    from batchwright.simulated.allocator_settings import AllocatorSettings
    from batchwright.simulated.cached_blocks import Block

_aten = torch.ops.aten
_MULTIPLIES = {
    _aten.mm.default,
    _aten.bmm.default,
    _aten.addmm.default,
    _aten.baddbmm.default,
    _aten.addbmm.default,
    _aten.mv.default,
    _aten.addmv.default,
    _aten.dot.default,
}


class SimulatedCard:
    """One card, from its context to its last block."""

    def __init__(self, card: Card, settings: AllocatorSettings | None = None) -> None:
        self.card = card
        self.context = context_of(card)
        capacity = card.total_bytes - self.context.typical_bytes
        self.allocator = CachingAllocator(capacity) if settings is None else CachingAllocator(capacity, settings)
        self._workspaces: dict[str, Block] = {}

    @contextmanager
    def running(self) -> Iterator[torch.device]:
        """Have torch take this card for real, and yield the device that stands for it."""
        register_autocast()
        register_attention()
        with ExitStack() as stack:
            device = stack.enter_context(switched_on())
            stack.enter_context(patch.object(CurrentCard, "card", self.card))
            stack.enter_context(answering_for(self.card, self.allocator))
            yield device

    def malloc(self, num_bytes: int) -> Block:
        """Take memory, or run out of it as the card would."""
        try:
            return self.allocator.malloc(num_bytes)
        except SimulatedOutOfMemory as error:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {format_bytes(error.requested)}. {self.card.product} "
                f"(simulated) has a total capacity of {format_bytes(self.card.total_bytes)} of which "
                f"{format_bytes(error.free)} is free; {format_bytes(error.allocated)} is allocated by PyTorch, and "
                f"{format_bytes(error.reserved - error.allocated)} is reserved by PyTorch but unallocated."
            ) from None

    def free(self, block: Block) -> None:
        """Give memory back to the allocator."""
        self.allocator.free(block)

    def workspaces_for(self, func: Callable[..., Any], phase: str) -> int:
        """Return the bytes that a library takes for itself as it runs for the first time in a thread, and keeps."""
        thread = "backward" if phase == "backward" else "forward"
        if func not in _MULTIPLIES or thread in self._workspaces:
            return 0
        num_bytes = cublas_workspace_bytes(self.card)
        self._workspaces[thread] = self.malloc(num_bytes)
        return num_bytes

    def moments_of(
        self, func: Callable[..., Any], args: Sequence[Any], outputs: Sequence[torch.Tensor]
    ) -> list[Moment]:
        """What happens inside an operator on this card."""
        return moments_on_card(self.card, func, args, outputs)

    @property
    def peak_bytes(self) -> PeakBytes:
        """The three peaks so far."""
        stats = self.allocator.stats
        reserved = stats.reserved.peak
        return PeakBytes(stats.allocated.peak, reserved, reserved + self.context.typical_bytes)
