"""The storages of a traced run: born, resized, dead; each in the log, and on the simulated card where there is one."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from batchwright.memory.blocks import Block, Log
from batchwright.memory.refusals import local_part, storage_of
from batchwright.simulated.backend import is_on_card
from batchwright.simulated.torch_patches import Patch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batchwright.memory.running_modules import RunningModules
    from batchwright.simulated.simulated_card import SimulatedCard


class FollowedStorages:
    """Knows which block every living storage is."""

    def __init__(
        self,
        log: Log,
        modules: RunningModules,
        card: SimulatedCard | None,
        note: Callable[[str], None],
        forget: Callable[[int], None],
    ) -> None:
        self.log = log
        self.mode: Any = None
        """The mode of the run's own fake tensors."""
        self._modules, self._card, self._note, self._forget = modules, card, note, forget
        self._alive: dict[int, Block] = {}
        # Not weakref.finalize: its registry is the process's, and would hold the trace as long as any storage lives,
        # while the trace holds the storages.
        self._deaths: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """Return the block a tensor lies in, if it is followed."""
        return self._alive.get(local_part(tensor).untyped_storage()._cdata)

    def see(self, tensor: torch.Tensor, operator: str) -> bool:
        """Note the storage of a tensor, if it has another size or is new; say whether it is new."""
        if isinstance(tensor, FakeTensor) and self.mode is not None and tensor.fake_mode is not self.mode:
            return False  # somebody else's thought: sharded tensors find out their shapes on fake ones of full size
        storage = storage_of(tensor, operator)
        key, num_bytes = storage._cdata, storage.nbytes()
        if self._card is not None and not is_on_card(local_part(tensor)):
            # The host's memory is another question; but its values may be known, and must be forgotten in time.
            self._await_death(storage, key)
            return False
        block = self._alive.get(key)
        if block is not None:
            self._resized(block, num_bytes, operator)
            return False
        if not isinstance(local_part(tensor), FakeTensor) and tensor.device.type != "meta":
            self._note("some tensors are real: what they hold was counted, but was also allocated")
        self._alive[key] = self.born(num_bytes, operator, shape=tuple(tensor.shape))
        self._await_death(storage, key)
        return True

    def _await_death(self, storage: torch.UntypedStorage, key: int) -> None:
        if key not in self._deaths:
            self._deaths[key] = weakref.ref(storage, lambda _: self._storage_died(key))

    def let_go(self) -> None:
        """Follow nothing any more: the run is over."""
        self._deaths.clear()
        self._alive.clear()

    def _resized(self, block: Block, num_bytes: int, operator: str) -> None:
        if num_bytes == block.num_bytes:
            return
        self.log.changes.append((block, num_bytes - block.num_bytes))
        block.num_bytes = num_bytes
        if self._card is not None:
            owner = (operator, block.module, self.log.phase)
            before, block.handle = block.handle, self._card.malloc(num_bytes, owner)
            self._card.free(before)

    def seeing_resizes(self) -> Iterator[Patch]:
        """Storages are resized past every dispatcher: so FSDP2 lets go of gathered weights, and takes them again."""
        resize: Any = torch.UntypedStorage.resize_

        def resize_and_note(storage: torch.UntypedStorage, size: int) -> Any:
            found = resize(storage, size)
            block = self._alive.get(storage._cdata)
            if block is not None:
                self._resized(block, storage.nbytes(), "resize_")
            return found

        yield Patch(torch.UntypedStorage, "resize_", resize_and_note)

    def born(self, num_bytes: int, operator: str, *, part: str | None = None, shape: tuple[int, ...] = ()) -> Block:
        """Note a block, and take it from the card."""
        phase = self.log.phase
        in_backward = phase == "backward"
        module = self._modules.now(in_backward=in_backward)
        block = Block(
            num_bytes, phase, module, operator, shape, part, is_recomputed=in_backward and self._modules.are_running
        )
        if self._card is not None:
            block.handle = self._card.malloc(num_bytes, (operator, module, phase))
        self.log.changes.append((block, num_bytes))
        return block

    def died(self, block: Block) -> None:
        """Note a block's end, and give it back to the card."""
        block.died_in = self.log.phase
        self.log.changes.append((block, -block.num_bytes))
        if self._card is not None:
            self._card.free(block.handle)

    def _storage_died(self, key: int) -> None:
        self._deaths.pop(key, None)
        block = self._alive.pop(key, None)
        if block is not None:
            self.died(block)
        self._forget(key)
