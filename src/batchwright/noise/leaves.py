"""Hooks on the weights of a model, which see what each backward pass adds before it is added.

Promises:
- no gradient is copied, kept or changed; what is kept of a backward is a number per weight, on its device;
- ranks do not matter: the hook sees this rank's own gradient, before DDP or FSDP2 reduce it;
- a weight whose gradient came in several pieces within one pass is noticed: the squares of pieces do not add up.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from batchwright.noise.gradient_squares import add_by_group, square

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import nn


@dataclass
class Weights:
    """What is measured: weights that require a gradient, each with the number of its group."""

    parameters: list[nn.Parameter]
    groups: list[int]
    names: list[str]
    """Of the groups."""

    @property
    def device(self) -> torch.device:
        """Where sums are kept."""
        return self.parameters[0].device

    @staticmethod
    def of(model: nn.Module, optimizers: Sequence[Any]) -> Weights:
        """Take the weights that optimizers hold, group by group, and those of the model that none holds."""
        found: dict[int, tuple[nn.Parameter, int]] = {}
        names: list[str] = []
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.requires_grad:
                        found.setdefault(id(parameter), (parameter, len(names)))
                names.append(str(group.get("name", f"group {len(names)}")))
        rest = [p for p in model.parameters() if p.requires_grad and id(p) not in found]
        if rest:
            found.update({id(parameter): (parameter, len(names)) for parameter in rest})
            names.append("in no optimizer")
        return Weights([p for p, _ in found.values()], [group for _, group in found.values()], names or ["group 0"])

    def is_same_as(self, other: Weights) -> bool:
        """Whether nothing was frozen, thawed, added or taken away."""
        return len(self.parameters) == len(other.parameters) and all(
            mine is theirs for mine, theirs in zip(self.parameters, other.parameters, strict=True)
        )


@dataclass
class _Seen:
    """What the hooks write to; they must not keep their owner alive."""

    is_on: bool = False
    squares: dict[int, torch.Tensor] = field(default_factory=dict)
    examples: dict[int, torch.Tensor] = field(default_factory=dict)
    num_pieces: int = 0
    on_first: Callable[[], None] | None = None
    of_examples: Callable[[nn.Parameter, torch.Tensor], torch.Tensor | None] | None = None


class LeafSquares:
    """The squared norm of what a backward pass adds to each weight."""

    def __init__(self, model: nn.Module, weights: Weights) -> None:
        self.weights = weights
        self._seen = _Seen()
        handles = [
            leaf.register_hook(_hook(self._seen, index, weights.parameters[index]))
            for index, leaf in enumerate(_leaves(model, weights.parameters))
        ]
        self.let_go = weakref.finalize(self, _remove, handles)

    def start(
        self,
        *,
        on_first: Callable[[], None] | None = None,
        of_examples: Callable[[nn.Parameter, torch.Tensor], torch.Tensor | None] | None = None,
    ) -> None:
        """Look at the next backward pass; `on_first` is called within it, `of_examples` for every weight."""
        self._seen.squares.clear()
        self._seen.examples.clear()
        self._seen.num_pieces = 0
        self._seen.on_first, self._seen.of_examples = on_first, of_examples
        self._seen.is_on = True

    def stop(self) -> None:
        """Look away."""
        self._seen.is_on = False
        self._seen.on_first = self._seen.of_examples = None

    @property
    def came_in_pieces(self) -> bool:
        """Whether some weight got its gradient in more than one piece."""
        return self._seen.num_pieces > len(self._seen.squares)

    def squares(self) -> torch.Tensor:
        """The squares of the pass, by group."""
        return self._by_group(self._seen.squares)

    def squares_of_examples(self) -> torch.Tensor | None:
        """The squares of each example, by group: groups x examples; None where some weight has none."""
        if self._seen.examples.keys() != self._seen.squares.keys() or not self._seen.examples:
            return None
        return self._by_group(self._seen.examples)

    def _by_group(self, found: dict[int, torch.Tensor]) -> torch.Tensor:
        weights = self.weights
        groups = [weights.groups[index] for index in found]
        return add_by_group(list(found.values()), groups, len(weights.names), weights.device)


def _hook(seen: _Seen, index: int, parameter: nn.Parameter) -> Callable[[torch.Tensor], None]:
    def see(gradient: torch.Tensor) -> None:
        if not seen.is_on:
            return
        if seen.on_first is not None:
            first, seen.on_first = seen.on_first, None
            first()
        seen.num_pieces += 1
        seen.squares[index] = square(gradient.detach())
        if seen.of_examples is not None:
            examples = seen.of_examples(parameter, gradient.detach())
            if examples is not None:
                seen.examples[index] = examples

    return see


def _leaves(model: nn.Module, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Return what autograd hands each weight's gradient to: the weight, or under FSDP2 its unsharded double."""
    sharded: list[Any] = [module for module in model.modules() if hasattr(module, "set_requires_gradient_sync")]
    if not sharded:
        return list(parameters)
    # Hooks on the shards never fire. The doubles are made once and stay; only their memory comes and goes.
    names = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
    for module in sharded:
        module.unshard()
    try:
        whole = dict(model.named_parameters(remove_duplicate=False))
        return [whole[names[id(p)]] if id(p) in names else p for p in parameters]
    finally:
        for module in sharded:
            module.reshard()


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
