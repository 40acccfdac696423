"""What happens inside one operator: copies that live only there, and its outputs, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Moment(NamedTuple):
    """One thing that happens inside an operator: a copy is made or dropped, or an output is made."""

    num_bytes: int = 0
    output: torch.Tensor | None = None


def around(copies: list[int], outputs: list[Moment]) -> list[Moment]:
    """Copies that are made after the outputs, and dropped when the operator ends."""
    return [*outputs, *map(Moment, copies), *(Moment(-num_bytes) for num_bytes in reversed(copies))]
