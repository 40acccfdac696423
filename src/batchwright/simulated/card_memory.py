"""The memory of a card behind cudaMalloc and cuMemCreate: how much is left, and at which address the next piece lies.

Promises:
- a piece takes whole granules of 2 MiB, and none is handed out past the capacity;
- addresses only rise and none is used twice: which of two equal blocks is taken depends on their addresses, and a
  driver's choice is not known, so this one is at least the same in every run.
"""

from __future__ import annotations

from batchwright.simulated.allocation_sizes import whole_granules

_FIRST_ADDRESS = 0x7F00_0000_0000
UNLIMITED = 1 << 46
"""64 TiB stand for a card without a limit: more than any trace asks for, and addresses stay exact in a browser."""


class CardMemory:
    """What is left of a card.

    >>> card = CardMemory(6 << 20)
    >>> hex(card.allocate(3 << 20)), card.free >> 20
    ('0x7f0000000000', 2)
    >>> card.allocate(3 << 20) is None
    True
    """

    __slots__ = ("_next_address", "_taken", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._taken = 0
        self._next_address = _FIRST_ADDRESS

    @property
    def free(self) -> int:
        """Bytes that can still be handed out."""
        return self.capacity - self._taken

    def take(self, size: int) -> bool:
        """Take memory without an address, as cuMemCreate does; False where it is not there."""
        size = whole_granules(size)
        if self._taken + size > self.capacity:
            return False
        self._taken += size
        return True

    def give_back(self, size: int) -> None:
        """Take back what `take` or `allocate` handed out."""
        self._taken -= whole_granules(size)

    def allocate(self, size: int) -> int | None:
        """Return the address of new memory, as cudaMalloc does; None where it is not there."""
        return self.reserve_addresses(size) if self.take(size) else None

    def reserve_addresses(self, size: int) -> int:
        """Return the first of `size` addresses without memory behind them, as cuMemAddressReserve does."""
        address = self._next_address
        self._next_address += whole_granules(size)
        return address
