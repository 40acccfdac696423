"""What a step asks of a card at any micro-batch, from traces at a few.

A step of another size asks in the same order for sizes that are affine in it: so many bytes, and so many for every
sample. Where two traces say so, and a third agrees, the sizes between need no trace.

Promises:
- requests agree where each differs by less than a block of the allocator, which hands out whole blocks anyway, and a
  thousandth (a kernel that sums ten rows at a time asks in steps);
- where the traces do not agree, nothing is told.
"""

from __future__ import annotations

from dataclasses import dataclass

_BLOCK = 512


@dataclass(frozen=True)
class ScaledRequests:
    """The requests of a step as a function of its micro-batch: lines through two runs."""

    small: int
    large: int
    at_small: tuple[int, ...]
    at_large: tuple[int, ...]

    @classmethod
    def through(cls, small: int, events: tuple[int, ...], large: int, others: tuple[int, ...]) -> ScaledRequests | None:
        """Draw lines through two runs; None where they are not the same run at two sizes.

        >>> ScaledRequests.through(2, (120, -1), 4, (140, -1)).at(8)
        (180, -1)
        >>> ScaledRequests.through(2, (120, 8, -1), 4, (140, -1)) is None
        True
        """
        if len(events) != len(others) or large <= small:
            return None
        is_same = all(one == other or min(one, other) >= 0 for one, other in zip(events, others, strict=True))
        return cls(small, large, events, others) if is_same else None

    def at(self, size: int) -> tuple[int, ...]:
        """Return the requests at another size."""
        step, further = self.large - self.small, size - self.small
        return tuple(
            one + (other - one) * further // step for one, other in zip(self.at_small, self.at_large, strict=True)
        )

    def agrees_with(self, size: int, events: tuple[int, ...]) -> bool:
        """Whether a run at another size asked for what the lines say.

        >>> lines = ScaledRequests.through(2, (120, -1), 4, (140, -1))
        >>> lines.agrees_with(8, (180, -1)), lines.agrees_with(8, (1180, -1)), lines.agrees_with(8, (180,))
        (True, False, False)
        """
        told = self.at(size)
        return len(told) == len(events) and all(
            one == other or (min(one, other) >= 0 and abs(one - other) < _BLOCK + other // 1024)
            for one, other in zip(told, events, strict=True)
        )
