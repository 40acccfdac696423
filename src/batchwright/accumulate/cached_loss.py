"""`CachedLoss`: a loss over a whole batch whose samples go through the model a few at a time.

A contrastive loss compares each sample with all others, so no sum over micro-batches equals it. But its gradient with
respect to the embeddings is small, and can be kept (Gao et al. 2021, GradCache): encode in micro-batches without a
graph, take the gradient of the loss at the embeddings, then encode each micro-batch again and pass its part on.

Promises:
- the gradient is that of the whole batch, dropout included: random numbers and autocast are replayed;
- memory grows with the micro-batch; of the whole batch only inputs, embeddings and what the loss makes of them stay;
- under DDP and FSDP2 only the last inner backward synchronises, and only where the flag was on outside.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_unflatten

from batchwright.accumulate.checks import BATCH_NORM_NOTE, BatchNormWarning, batch_norms
from batchwright.accumulate.replay import Replay, flat_rows
from batchwright.device.cutting import cut, num_samples
from batchwright.errors import InvalidInputError
from batchwright.units import shortened, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


_REMEDY = "samples=lambda batch: ... counts them, split=lambda batch, sizes: [...] cuts the batch"


class CachedLoss:
    """A loss over all embeddings of a batch, with the memory of a micro-batch.

    >>> model = torch.nn.Linear(4, 3)
    >>> cached = CachedLoss(
    ...     lambda model, batch: (model(batch["query"]), model(batch["document"])),
    ...     lambda query, document: torch.nn.functional.cross_entropy(query @ document.T, torch.arange(len(query))),
    ...     micro_batch=2,
    ... )
    >>> cached(model, {"query": torch.ones(5, 4), "document": torch.ones(5, 4)}).backward()
    >>> model.weight.grad.shape
    torch.Size([3, 4])

    `encode(model, micro_batch)` returns a tensor, or a tuple or dict of tensors, each with one row per sample; labels
    may be among them. `loss` is called with these joined over the batch: a tuple as arguments, a dict as keywords.
    `split(batch, sizes)` cuts a batch of your own form, and `samples(batch)` counts it.

    Only `.backward()` reaches the weights, not `torch.autograd.grad`. Layers that change state in a forward pass do so
    twice.
    """

    def __init__(
        self,
        encode: Callable[[Any, Any], Any],
        loss: Callable[..., torch.Tensor],
        *,
        micro_batch: int,
        split: Callable[..., Any] | None = None,
        samples: Callable[[Any], int | None] | None = None,
    ) -> None:
        self.micro_batch = whole_number(micro_batch, "micro_batch")
        self._encode = encode
        self._loss = loss
        self._split = split
        self._samples = partial(num_samples, remedy=_REMEDY) if samples is None else samples

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the loss of a batch; its `.backward()` leaves the gradient of the whole batch."""
        pieces, sizes = self._pieces(batch)
        if len(pieces) == 1:  # nothing to keep: the plain loss costs one pass less
            leaves, form = flat_rows(self._encode(model, pieces[0]), sizes[0])
            return self._called(tree_unflatten(leaves, form))
        _warn_of_batch_norm(model)
        replay = Replay(self._encode, model, pieces, sizes)
        value = self._called(replay.embeddings())
        if not torch.is_grad_enabled():
            return value
        if not value.requires_grad:
            raise InvalidInputError(
                "the loss has no gradient: it does not depend on the embeddings, or detaches them.",
                remedy="loss must be computed from its arguments by differentiable operations",
            )
        replay.value = value
        # The way into the graph: something that requires a gradient and gets none.
        anchor = torch.zeros((), device=value.device, requires_grad=True)
        result: torch.Tensor = _Backward.apply(anchor, replay)  # type: ignore[no-untyped-call]
        # One more node: whoever hooks the last one, as `zero_backward` does, then reaches what ours is given.
        return result.clone()

    def _pieces(self, batch: Any) -> tuple[list[Any], list[int]]:
        total = self._samples(batch)
        if not total:
            raise InvalidInputError(
                f"nothing tells how many samples the batch holds: {shortened(batch)}.",
                remedy=_REMEDY,
            )
        full, rest = divmod(total, self.micro_batch)
        sizes = [self.micro_batch] * full + ([rest] if rest else [])
        return cut(batch, sizes, self._split), sizes

    def _called(self, embeddings: Any) -> torch.Tensor:
        if isinstance(embeddings, dict):
            value = self._loss(**embeddings)
        else:
            value = self._loss(*embeddings) if isinstance(embeddings, tuple | list) else self._loss(embeddings)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            received = tuple(value.shape) if isinstance(value, torch.Tensor) else shortened(value)
            raise InvalidInputError(
                f"loss must return a scalar over the whole batch; received {received}.",
                remedy="loss.mean() for a mean over the samples",
            )
        return value.reshape(())


class _Backward(torch.autograd.Function):
    """The node whose backward runs the second passes."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, replay: Replay) -> torch.Tensor:
        ctx.replay = replay
        assert replay.value is not None
        return replay.value.detach()

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[None, None]:
        ctx.replay.run(upstream[0])
        return None, None


def _warn_of_batch_norm(model: nn.Module) -> None:
    names = batch_norms(model)
    if names:
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        note = BATCH_NORM_NOTE.format(names=shown) + " Here each micro-batch runs twice, and moves them twice."
        warnings.warn(note, BatchNormWarning, stacklevel=3)
