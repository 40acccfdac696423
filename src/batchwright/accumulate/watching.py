"""What may look at the windows of an Accumulator while they run: the noise of gradients is measured so.

Promises:
- a watcher sees every backward, and every finished window before its gradients are clipped; it changes none;
- what it has to tell goes with the one exchange between ranks that a window makes anyhow.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from batchwright.accumulate.loss_terms import Totals


class WindowWatcher(Protocol):
    """Looks at windows; all ranks have one, or none has."""

    def expect(self, num_parts: int) -> None:
        """Be told, before its first forward, how many micro-batches on all ranks the next window has."""

    def pieces(self) -> int:
        """Say what the next window is to be cut into where it is one micro-batch; asked once `tell` was called."""
        ...

    def around(self, shares: Sequence[float], counts: Totals) -> AbstractContextManager[None]:
        """Look at the backward of one micro-batch, whose terms are multiplied by these shares."""
        ...

    def tell(self) -> Sequence[Any]:
        """Return numbers for all ranks, now that gradients are synchronised and unscaled; as many on each rank."""
        ...

    def learn(self, rows: list[Sequence[Any]], factor: float) -> None:
        """Take what the ranks told; the gradient is still to be multiplied by `factor`, 0 where nothing was used."""


class _Nobody:
    """Watches nothing."""

    def expect(self, num_parts: int) -> None:
        pass

    def pieces(self) -> int:
        return 1

    def around(self, shares: Sequence[float], counts: Totals) -> AbstractContextManager[None]:
        return nullcontext()

    def tell(self) -> Sequence[Any]:
        return ()

    def learn(self, rows: list[Sequence[Any]], factor: float) -> None:
        pass


NOBODY: WindowWatcher = _Nobody()
