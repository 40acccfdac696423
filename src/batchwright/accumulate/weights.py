"""The weights that train, read anew for each window.

Promises:
- a window clips, steps and zeroes the weights that the model and the optimizers hold when it begins, whatever was
  frozen, unfrozen, added or swapped before;
- a change in the middle of a window is an error that names the weights: no step is made with part of a gradient.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from batchwright.accumulate.checks import check_same_weights
from batchwright.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from torch import nn

    _Home = tuple[dict[str, nn.Parameter | None], str, str, nn.Parameter]

_REMEDY = "freeze, unfreeze, add or swap weights between two windows: when backward has returned a Step"


class TrainedWeights:
    """The weights of a model and of its optimizers, as they are now.

    >>> import torch
    >>> layer = torch.nn.Linear(2, 1)
    >>> weights = TrainedWeights(layer, [torch.optim.SGD(layer.parameters(), lr=0.1)])
    >>> _ = layer.bias.requires_grad_(False)
    >>> weights.read(), len(weights.trainable), len(weights.held)
    (True, 1, 2)
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, gathers_in_forward: bool = False
    ) -> None:
        self._model, self._optimizers = model, list(optimizers)
        # While a forward of FSDP2 has its weights gathered, the model shows whole doubles in place of its shards.
        self._gathers = gathers_in_forward
        self.trainable: list[nn.Parameter] = []
        """Every weight that may get a gradient: the model's, and what else the optimizers hold."""
        self.held: list[nn.Parameter] = []
        """Everything the optimizers hold, frozen or not: they step whatever has a gradient."""
        self._homes: list[_Home] = []
        self._children: list[tuple[dict[str, nn.Module | None], list[int]]] = []
        self._all: list[nn.Parameter] = []
        self._state: list[tuple[int, bool, torch.dtype]] = []
        self.read()

    def read(self) -> bool:
        """Read what trains now; return whether that changed."""
        modules = list(self._model.named_modules())
        self._children = [(module._modules, _ids(module._modules.values())) for _, module in modules if module._modules]
        homes = [
            (module._parameters, name, f"{path}.{name}" if path else name, weight)
            for path, module in modules
            for name, weight in module._parameters.items()
            if weight is not None
        ]
        held = self._held_now()
        if self._gathers and _num_sharded(homes) < _num_sharded(self._homes):
            homes = self._homes
        found = {id(weight): weight for weight in chain((weight for *_, weight in homes), held)}
        everything = list(found.values())
        state = [(id(weight), weight.requires_grad, weight.dtype) for weight in everything]
        if state == self._state and _ids(held) == _ids(self.held):
            self._homes = homes
            return False
        trainable = [weight for weight in everything if weight.requires_grad]
        if not trainable:
            raise InvalidInputError(
                "the model has no weight that requires a gradient: there is nothing to accumulate.",
                remedy="unfreeze something, or hand in the module that trains",
            )
        if homes is not self._homes:
            check_same_weights(self._model, self._optimizers)
        self._homes, self._all, self._state = homes, everything, state
        self.trainable, self.held = trainable, held
        return True

    def check(self) -> None:
        """Refuse to go on where something changed since `read`."""
        is_same = (
            [weight.requires_grad for weight in self._all] == [flag for _, flag, _ in self._state]
            and (self._gathers or all(name in home and home[name] is weight for home, name, _, weight in self._homes))
            and all(_ids(children.values()) == before for children, before in self._children)
            and _ids(self._held_now()) == _ids(self.held)
        )
        if not is_same:
            if not self._gathers:
                check_same_weights(self._model, self._optimizers)
            raise InvalidInputError(
                f"the weights that train changed in the middle of a window ({self._changes()}): their gradient would "
                "be that of a part of it.",
                remedy=_REMEDY,
            )

    def _held_now(self) -> list[nn.Parameter]:
        return [weight for each in self._optimizers for group in each.param_groups for weight in group["params"]]

    def _changes(self) -> str:
        names = {id(weight): name for name, weight in self._model.named_parameters(remove_duplicate=False)}
        before = {identity: flag for identity, flag, _ in self._state}
        held = {id(weight) for weight in self.held}
        frozen = [weight for weight in self._all if before[id(weight)] and not weight.requires_grad]
        unfrozen = [weight for weight in self._all if not before[id(weight)] and weight.requires_grad]
        added = [weight for weight in self._held_now() if id(weight) not in held]
        there = {id(weight) for weight in self._model.parameters()}
        gone = [name for *_, name, weight in self._homes if not self._gathers and id(weight) not in there]
        parts = [
            f"{how} {_listed([names.get(id(weight), 'a weight outside the model') for weight in weights])}"
            for how, weights in (("frozen:", frozen), ("unfrozen:", unfrozen), ("added to the optimizer:", added))
            if weights
        ]
        parts += [f"swapped: {_listed(gone)}"] if gone else []
        return "; ".join(parts) or "modules or the optimizer's groups are others"


def _ids(things: Iterable[object]) -> list[int]:
    return list(map(id, things))


def _num_sharded(homes: list[_Home]) -> int:
    return sum(hasattr(weight, "device_mesh") for *_, weight in homes)


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
