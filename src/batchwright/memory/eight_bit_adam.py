"""Adam with 8-bit state, as far as memory goes: the layout of bitsandbytes' block-wise optimizers.

Two bytes per parameter (one per moment) and, for every block of 256, one float per moment; a tensor of fewer than
4,096 elements keeps float moments (Dettmers et al. 2022; bitsandbytes' `min_8bit_size`). The update itself is one
fused kernel without temporaries. The numbers it computes are not Adam's: it is here to be traced, not to train.
"""

from __future__ import annotations

from typing import Any

import torch

BLOCK = 256
SMALLEST_8_BIT = 4096


class EightBitAdam(torch.optim.Optimizer):
    """Holds the state that 8-bit Adam would hold."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make the state where it is missing, and touch the weights."""
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[parameter]
            if not state:
                for moment in ("first", "second"):
                    state.update(_moment(parameter, moment))
            parameter.add_(parameter.grad, alpha=0.0)


def _moment(parameter: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
    if parameter.numel() < SMALLEST_8_BIT:
        return {name: torch.zeros_like(parameter, dtype=torch.float32)}
    blocks = -(-parameter.numel() // BLOCK)
    return {
        name: torch.zeros_like(parameter, dtype=torch.uint8),
        f"{name}_scale": torch.zeros(blocks, dtype=torch.float32, device=parameter.device),
    }
