"""Gradients of 16-bit weights, added up in fp32.

Promises:
- only the sum is wide: forward and backward run as before, and the weights stay as they are;
- the share of a micro-batch is not rounded to 16 bits with its loss;
- an optimizer that can take fp32 gradients gets them; any other gets them rounded once, at the end.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from batchwright.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

NARROW = (torch.bfloat16, torch.float16)


def narrow_parameters(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters whose gradients would be added up in 16 bits."""
    return [parameter for parameter in parameters if parameter.dtype in NARROW]


def widen(parameters: Sequence[nn.Parameter]) -> None:
    """Have autograd add up the gradients of these parameters in fp32.

    >>> weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    >>> widen([weight])
    >>> for _ in range(300):
    ...     weight.sum().backward()
    >>> weight.grad
    tensor([300.])
    """
    for parameter in parameters:
        if not hasattr(parameter, "grad_dtype"):
            raise InvalidInputError(
                f"precise=True needs a torch that can keep wide gradients; this is {torch.__version__}.",
                remedy="torch 2.10 or newer",
            )
        parameter.grad_dtype = torch.float32


def put_back(parameters: Sequence[nn.Parameter]) -> None:
    """Have autograd add up the gradients of these parameters in their own type again."""
    for parameter in parameters:
        parameter.grad = None
        parameter.grad_dtype = parameter.dtype


class WideShares:
    """Multiplies gradients by the share of their micro-batch once they are wide.

    A loss in bf16 would round its share to 8 bits, and with it all gradients behind it: by 0.2 % at most, which was
    3e-3 of the sum of 64. So the loss gets a power of two, which no rounding touches, and the gradients the rest.

    >>> weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    >>> widen([weight])
    >>> shares = WideShares()
    >>> shares.attach([weight])
    >>> with shares.of(0.3) as rest:
    ...     (weight.sum() * (0.3 / rest)).backward()
    >>> rest, weight.grad
    (0.6, tensor([0.3000]))
    """

    def __init__(self) -> None:
        self._rest = 1.0
        self._handles: list[Any] = []

    def attach(self, parameters: Sequence[nn.Parameter]) -> None:
        """Multiply the gradients of these weights from now on, and of no others."""
        for handle in self._handles:
            handle.remove()
        self._handles = [parameter.register_hook(self._times_rest) for parameter in parameters]

    def of(self, share: float) -> WideShares:
        """Give the block that begins here what its gradients are multiplied by: `share` over a power of two, or 1."""
        self._rest = math.frexp(share)[0] if self._handles else 1.0
        return self

    def __enter__(self) -> float:
        return self._rest

    def __exit__(self, *_: object) -> None:
        self._rest = 1.0

    def _times_rest(self, gradient: torch.Tensor) -> torch.Tensor | None:
        if self._rest == 1.0:
            return None
        return gradient.to(torch.float32 if gradient.dtype in NARROW else gradient.dtype) * self._rest


def round_once(parameters: Sequence[nn.Parameter]) -> None:
    """Give the optimizer gradients in the type of their weights."""
    for parameter in parameters:
        if parameter.grad is not None:
            rounded = parameter.grad.to(parameter.dtype)
            parameter.grad = None
            parameter.grad_dtype = parameter.dtype
            parameter.grad = rounded


def takes_wide_gradients(optimizer: torch.optim.Optimizer, narrow: Sequence[nn.Parameter]) -> bool:
    """Try it on a weight of its own: two steps of the same kind of optimizer with an fp32 gradient.

    >>> weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    >>> [takes_wide_gradients(kind([weight]), [weight]) for kind in (torch.optim.SGD, torch.optim.AdamW)]
    [True, False]
    """
    if not narrow:
        return True
    twin = nn.Parameter(torch.ones_like(narrow[0].detach().flatten()[:2]))
    twin.grad_dtype = torch.float32
    try:
        trial = type(optimizer)([twin], **optimizer.defaults)
        for _ in range(2):
            twin.grad = torch.full_like(twin, 0.5, dtype=torch.float32)
            trial.step()
    except Exception:
        # It is no matter what it says: it does not take them.
        return False
    return bool(torch.isfinite(twin).all())
