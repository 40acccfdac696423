"""Micro-batches that are encoded twice: first for the embeddings alone, then again with a graph, for the gradient.

Promises:
- the second pass of a micro-batch draws the random numbers of its first, under the same autocast;
- random numbers and the flags that synchronise ranks are afterwards as they were found.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_unflatten

from batchwright.errors import InvalidInputError
from batchwright.state.random_state import random_sources
from batchwright.units import counted, shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    Roots = list[tuple[torch.Tensor, torch.Tensor]]
    """Tensors to start a backward at, each with its gradient."""


class Replay:
    """The micro-batches of one call, and what it takes to run each of them again."""

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
        self._spread = _SynchronisingModules(model)
        self._flags = self._spread.flags()
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
        outside, flags = self._random_now(), self._spread.flags()
        parts = [[] if g is None else list(g.split(self._sizes)) for g in gradients]
        try:
            self._spread.set([False] * len(self._flags))
            for index, piece in enumerate(self._pieces):
                is_last = index == len(self._pieces) - 1
                if is_last:
                    self._spread.set(self._flags)
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
            self._spread.set(flags)
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
        own = [leaf for leaf in _leaves(value) if all(leaf is not tensor for tensor in joined)]
        found = torch.autograd.grad(value, [*joined, *own], upstream, allow_unused=True)
        # A rank that only keeps step with others multiplies by 0, and 0 times infinity would reach all of them.
        found = tuple(None if g is None else torch.where(upstream == 0, torch.zeros_like(g), g) for g in found)
        of_joined = iter(found[: len(joined)])
        gradients = [next(of_joined) if tensor.requires_grad else None for tensor in self._joined]
        return gradients, [(leaf, g) for leaf, g in zip(own, found[len(joined) :], strict=True) if g is not None]

    def _random_now(self) -> list[Callable[[], object]]:
        return [put_back for device in self._devices for put_back in random_sources(device).values()]


class _SynchronisingModules:
    """The flags by which DDP and FSDP2 leave out a synchronisation."""

    def __init__(self, model: nn.Module) -> None:
        self._replicated = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        self._sharded: list[Any] = [
            module for module in model.modules() if hasattr(module, "set_requires_gradient_sync")
        ]

    def flags(self) -> list[bool]:
        """What they are set to now, one per module."""
        return [module.require_backward_grad_sync for module in self._replicated] + [
            _reduces(module) for module in self._sharded
        ]

    def set(self, flags: list[bool]) -> None:
        """Set them, one per module."""
        for module, flag in zip(self._replicated, flags, strict=False):
            module.require_backward_grad_sync = flag
        for sharded, flag in zip(self._sharded, flags[len(self._replicated) :], strict=True):
            sharded.set_requires_gradient_sync(flag, recurse=False)


def _reduces(module: Any) -> bool:
    # There is no public way to ask; a module without weights of its own has no groups, and no say.
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return all(group.reduce_grads for group in groups if group is not None)


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


def _leaves(value: torch.Tensor) -> Iterator[torch.Tensor]:
    seen, waiting = set(), [value.grad_fn]
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting += [before for before, _ in node.next_functions]
