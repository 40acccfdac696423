"""A card that is simulated: torch answers for it, its allocator is replayed, and it runs out of memory where it would.

Promises:
- a run on it ends in `torch.OutOfMemoryError` at the very allocation where the real card would raise it, after the
  allocator has given back what it had cached.
"""

from __future__ import annotations

from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from batchwright.catalogue.cards import Card, context_of, cublas_workspace_bytes
from batchwright.simulated.allocator.caching_allocator import (
    CachingAllocator,
    History,
    Requests,
    SimulatedOutOfMemory,
    peaks_with_room,
    peaks_within,
)
from batchwright.simulated.allocator.settings import AllocatorSettings
from batchwright.simulated.operators.autocast import forget_casts, register_autocast
from batchwright.simulated.operators.cuda_kernels import CudaKernels, CurrentCard, register_kernels
from batchwright.simulated.operators.recurrent import register_recurrent
from batchwright.simulated.torch_patches.backend import errors_put_back, forget_taken, is_on_card, switched_on
from batchwright.simulated.torch_patches.patches import Patch, TorchPatches, applied, undone
from batchwright.simulated.torch_patches.redirected_calls import hooks_of_saved_tensors, modules_move_in_place
from batchwright.simulated.torch_patches.torch_cuda import answering_for
from batchwright.units import PeakBytes, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchwright.device.device import Owner
    from batchwright.simulated.allocator.segments import Block


def kernels_of(card: Card) -> tuple[object, ...]:
    """What of a card decides which kernels run and what they hold; cards that agree in it trace alike."""
    generation = sum(card.capability >= first for first in ((7, 0), (8, 0)))
    return (card.vendor, generation, cublas_workspace_bytes(card))


class SimulatedCard:
    """One card, from its context to its last block."""

    def __init__(
        self,
        card: Card,
        settings: AllocatorSettings | None = None,
        *,
        is_roomy: bool = False,
        history: History | None = None,
    ) -> None:
        self.card = card
        self._is_roomy = is_roomy
        self.context = context_of(card)
        settings = settings or AllocatorSettings()
        self.allocator = CachingAllocator(
            None if is_roomy else max(card.total_bytes - self.context.typical_bytes, 0),
            settings,
            None if is_roomy else settings.allowed_bytes(card.total_bytes),
            listener=None if history is None else history.listen,
        )
        self.history = history
        self.kernels = CudaKernels(card, self.allocator)
        self.requests = Requests()
        self.allocator.when_passed = self.requests.passed

    def twin(self) -> SimulatedCard:
        """Return such a card on which nothing has run: that of another rank."""
        history = None if self.history is None else History()
        return SimulatedCard(self.card, self.allocator.settings, is_roomy=self._is_roomy, history=history)

    def take_over(self, other: SimulatedCard) -> None:
        """Become another card of the same kind, with all that has run on it."""
        vars(self).update(vars(other))

    @contextmanager
    def running(self) -> Iterator[torch.device]:
        """Have torch take this card for real, and yield the device that stands for it."""
        # Dynamo makes a table of torch's functions, again after a reset, which must not be while others stand in.
        import_module("torch._dynamo.trace_rules").get_torch_obj_rule_map()
        register_autocast()
        register_kernels()
        register_recurrent()
        with (
            TorchPatches(),
            switched_on() as device,
            undone(forget_casts),
            undone(forget_taken),
            applied(answering_for(self.card, self.allocator), modules_move_in_place(), errors_put_back()),
            applied([Patch(CurrentCard, "card", self.card)], hooks_of_saved_tensors()),
        ):
            yield device

    def malloc(self, num_bytes: int, owner: Owner = ("", "", "")) -> Block:
        """Take memory, or run out of it as the card would; `owner` is who asked, for a history."""
        if self.history is not None:
            self.history.owner = owner
        try:
            block = self.allocator.malloc(num_bytes)
        except SimulatedOutOfMemory as error:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {format_bytes(error.requested)}. {self.card.product} "
                f"(simulated) has a total capacity of {format_bytes(self.card.total_bytes)} of which "
                f"{format_bytes(error.free)} is free; {format_bytes(error.allocated)} is allocated by PyTorch, and "
                f"{format_bytes(error.reserved - error.allocated)} is reserved by PyTorch but unallocated."
            ) from None
        self.requests.took(block, num_bytes)
        return block

    def free(self, block: Block) -> None:
        """Give memory back to the allocator."""
        self.requests.gave_back(block)
        self.allocator.free(block)

    def record_stream(self, block: Block, stream: int) -> None:
        """Note that another stream uses a block."""
        self.allocator.record_stream(block, stream)

    def launched(self) -> None:
        """Note that an operator was launched."""
        self.allocator.launched()

    def waited_for(self) -> None:
        """Note that the host waited for the card: all that was launched has passed."""
        self.allocator.passed()

    def snapshot(self) -> dict[str, Any]:
        """Return what `torch.cuda.memory._snapshot()` would, of a card with a history."""
        assert self.history is not None
        return self.history.snapshot(self.allocator)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on this card."""
        return is_on_card(tensor)

    @property
    def peak_bytes(self) -> PeakBytes:
        """The three peaks so far."""
        stats = self.allocator.stats
        reserved = stats.reserved.peak
        return PeakBytes(stats.allocated.peak, reserved, reserved + self.context.typical_bytes)

    def replay_within(self) -> PeakBytes | None:
        """Return the peaks of a roomy run's requests on the card as large as it is; None if they cannot be replayed.

        Near the limit the allocator gives back what it has cached. Peaks beyond the card are returned where that is not
        enough. What is no request, such as an emptied cache, shows in the peaks of a replay with room.
        """
        events, settings, peak = self.requests.events, self.allocator.settings, self.peak_bytes
        if peaks_with_room(events, settings) != (peak.allocated, peak.reserved):
            return None
        total = self.card.total_bytes
        capacity = max(total - self.context.typical_bytes, 0)
        within = peaks_within(events, capacity, settings, total)
        return peak if within is None else PeakBytes(*within, within[1] + self.context.typical_bytes)
