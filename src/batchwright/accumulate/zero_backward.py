"""Backward passes through what counts nothing, run only so that this rank keeps step with the others.

The mean over no units is not a number, and so is its gradient: multiplying by 0 does not help. So zeros are put in
place of whatever leaves a node of the graph that only such a loss reaches. Hooks of DDP and FSDP2 run as ever.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def zero_backward(loss: torch.Tensor) -> None:
    """Run the backward pass of a loss and add zeros to every gradient.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> zero_backward((weight / 0).sum() * float("nan"))
    >>> weight.grad
    tensor([0., 0.])
    """
    with counting_nothing([loss], beside=None):
        loss.backward()


@contextmanager
def counting_nothing(losses: Sequence[torch.Tensor], *, beside: torch.Tensor | None) -> Iterator[None]:
    """Have these losses bring zeros to any backward pass in the block; what `beside` reaches on its own is left alone.

    >>> weight, other = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    >>> counted, empty = (2 * weight).sum(), (weight * other).sum() * float("nan")
    >>> with counting_nothing([empty], beside=counted):
    ...     (counted + empty).backward()
    >>> weight.grad, other.grad
    (tensor([2.]), tensor([0.]))
    """
    kept = set() if beside is None else set(_nodes([beside.grad_fn]))
    only_theirs = [node for node in _nodes([loss.grad_fn for loss in losses]) if node not in kept]
    # A leaf has nothing behind it to hand zeros to: what reaches it is replaced instead.
    handles = [
        node.register_prehook(_zeros) if hasattr(node, "variable") else node.register_hook(_zeros_behind)
        for node in only_theirs
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _zeros(gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if gradient is None else torch.zeros_like(gradient) for gradient in gradients)


def _zeros_behind(behind: tuple[torch.Tensor | None, ...], _: Any) -> tuple[torch.Tensor | None, ...]:
    return _zeros(behind)


def _nodes(roots: Sequence[Any]) -> Iterator[Any]:
    seen, waiting = set(), list(roots)
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [before for before, _ in node.next_functions]
