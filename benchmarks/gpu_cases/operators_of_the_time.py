"""Operators as the torch of a source's day ran them, where today's keep something else for backward.

Until torch 1.11 softmax and log_softmax kept their input beside their output, though backward needs the output only:
pytorch issues 49600 and 64000, mended by pull request 65242.
"""

from __future__ import annotations

from typing import Any

import torch


class _KeepingItsInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, is_log: bool) -> torch.Tensor:
        out = (torch._log_softmax if is_log else torch._softmax)(x, dim, False)
        ctx.dim, ctx.is_log = dim, is_log
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        x, out = ctx.saved_tensors
        run = torch._log_softmax_backward_data if ctx.is_log else torch._softmax_backward_data
        return run(grad, out, ctx.dim, x.dtype), None, None


def softmax_before_1_11(x: torch.Tensor, dim: int = -1, *, is_log: bool = False) -> torch.Tensor:
    """Return the softmax; input and output are kept until backward. Under autocast it runs in fp32, as then."""
    if torch.is_autocast_enabled("cuda"):
        x = x.float()
    out: torch.Tensor = _KeepingItsInput.apply(x, dim, is_log)  # type: ignore[no-untyped-call]
    return out
