"""`CachedLoss`: a loss over a whole batch whose samples go through the model a few at a time.

A contrastive loss compares each sample with all others, so no sum over micro-batches equals it. But its gradient with
respect to the embeddings is small, and can be kept (Gao et al. 2021, GradCache): encode in micro-batches without a
graph, take the gradient of the loss at the embeddings, then encode each micro-batch again and pass its part on.

Promises:
- the gradient is that of the whole batch, dropout included: random numbers and autocast are replayed, and random
  numbers and the flags that synchronise ranks are as before afterwards;
- memory grows with the micro-batch; of the whole batch only inputs, embeddings and what the loss makes of them stay;
- under DDP and FSDP2 only the last inner backward synchronises, and only where the flag was on outside.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from batchwright.accumulate.boundary import graph_nodes
from batchwright.accumulate.parallelism import SyncFlags
from batchwright.accumulate.weights import warn_of_batch_norm
from batchwright.device.batches import cut, num_samples
from batchwright.errors import InvalidInputError
from batchwright.state.process_state import random_sources
from batchwright.units import counted, shortened, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    Roots = list[tuple[torch.Tensor, torch.Tensor]]
    """Tensors to start a backward at, each with its gradient."""


class Replay:
    """The micro-batches of one call, encoded for the embeddings alone, and what it takes to run each of them again."""

    def __init__(
        self, encode: Callable[[Any, Any], Any], model: nn.Module, pieces: list[Any], sizes: list[int]
    ) -> None:
        self._encode = encode
        self._model = model
        self._pieces = pieces
        self._sizes = sizes
        self._random: list[list[Callable[[], object]]] = []
        self._devices = {p.device for p in model.parameters()} | {torch.device("cpu")}
        self._autocast = [_autocast_now(kind) for kind in sorted({device.type for device in self._devices})]
        self._sync_flags = SyncFlags(model)
        self._flags = self._sync_flags.read()
        self._joined: list[torch.Tensor] = []
        self.value: torch.Tensor | None = None

    def embeddings(self) -> Any:
        """Encode every micro-batch without a graph; return the embeddings of all, ready for a gradient."""
        rows: list[list[torch.Tensor]] = []
        form = None
        with torch.no_grad():
            for piece, size in zip(self._pieces, self._sizes, strict=True):
                self._random.append(self._random_now())
                leaves, this = flat_rows(self._encode(self._model, piece), size)
                if form is not None and this != form:
                    raise InvalidInputError(f"encode returned {form} for one micro-batch and {this} for another.")
                form = this
                rows.append(leaves)
            self._joined = [torch.cat(columns) for columns in zip(*rows, strict=True)]
        # Weights cast without a graph must not be found again by the passes that need one.
        torch.clear_autocast_cache()
        for tensor in self._joined:
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.requires_grad_(torch.is_grad_enabled())
        assert form is not None
        return tree_unflatten(list(self._joined), form)

    def run(self, upstream: torch.Tensor) -> None:
        """Add the gradient of the whole batch, times what comes from above."""
        if self.value is None:
            raise InvalidInputError("backward was called twice on one cached loss: its embeddings are gone.")
        value, self.value = self.value, None
        gradients, of_loss = self._gradients_of_loss(value, upstream)
        outside, flags = self._random_now(), self._sync_flags.read()
        parts = [[] if g is None else list(g.split(self._sizes)) for g in gradients]
        try:
            self._sync_flags.write_all(False)
            for index, piece in enumerate(self._pieces):
                is_last = index == len(self._pieces) - 1
                if is_last:
                    self._sync_flags.write(self._flags)
                for put_back in self._random[index]:
                    put_back()
                with torch.enable_grad(), contextlib.ExitStack() as stack:
                    for context in self._autocast:
                        stack.enter_context(context())
                    leaves, _ = flat_rows(self._encode(self._model, piece), self._sizes[index])
                roots = [(leaf, part[index]) for leaf, part in zip(leaves, parts, strict=True) if part]
                roots = [root for root in roots if root[0].requires_grad] + (of_loss if is_last else [])
                if roots:
                    torch.autograd.backward([tensor for tensor, _ in roots], [gradient for _, gradient in roots])
        finally:
            self._sync_flags.write(flags)
            for put_back in outside:
                put_back()
            self._pieces, self._joined = [], []

    def _gradients_of_loss(self, value: torch.Tensor, upstream: torch.Tensor) -> tuple[list[Any], Roots]:
        """Return the gradient at each of the embeddings, and those of the loss's own weights that must wait."""
        if not self._flags:
            torch.autograd.backward(value, upstream)
            return [tensor.grad for tensor in self._joined], []
        # A weight of a DDP module, say a temperature, must get its gradient in the backward that synchronises.
        joined = [tensor for tensor in self._joined if tensor.requires_grad]
        leaves = [node.variable for node in graph_nodes([value.grad_fn]) if hasattr(node, "variable")]
        own = [leaf for leaf in leaves if all(leaf is not tensor for tensor in joined)]
        grads = torch.autograd.grad(value, [*joined, *own], upstream, allow_unused=True)
        # A rank that only keeps step with others multiplies by 0, and 0 times infinity would reach all of them.
        grads = tuple(None if g is None else torch.where(upstream == 0, torch.zeros_like(g), g) for g in grads)
        of_joined = iter(grads[: len(joined)])
        gradients = [next(of_joined) if tensor.requires_grad else None for tensor in self._joined]
        return gradients, [(leaf, g) for leaf, g in zip(own, grads[len(joined) :], strict=True) if g is not None]

    def _random_now(self) -> list[Callable[[], object]]:
        return [put_back for device in self._devices for put_back in random_sources(device).values()]


def _autocast_now(kind: str) -> Callable[[], Any]:
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    cached = torch.is_autocast_cache_enabled()
    return lambda: torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=cached)


def flat_rows(embeddings: Any, size: int) -> tuple[list[torch.Tensor], Any]:
    """Return the tensors that encode gave for so many samples, and the form they came in."""
    leaves, form = tree_flatten(embeddings)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            raise InvalidInputError(
                f"encode returns a tensor, or a tuple or dict of tensors; received {shortened(leaf)} in it.",
            )
        if leaf.dim() == 0 or leaf.shape[0] != size:
            raise InvalidInputError(
                f"encode was given {counted(size, 'sample')} and returned a tensor of shape {tuple(leaf.shape)}: its "
                "first dimension must be the samples.",
                remedy="several rows per sample as (samples, rows, width)",
            )
    if not leaves:
        raise InvalidInputError("encode returned no tensor.")
    return leaves, form


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
        warn_of_batch_norm(model, " Here each micro-batch runs twice, and moves them twice.", stacklevel=3)
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
