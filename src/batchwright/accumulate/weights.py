"""The weights that train: what an Accumulator refuses of them at first, what trains in each window, and 16-bit weights
whose gradients are added up in fp32.

Promises:
- a window clips, steps and zeroes the weights that the model and the optimizers hold when it begins, whatever was
  frozen, unfrozen, added or swapped before;
- a change in the middle of a window is an error that names the weights: no step is made with part of a gradient;
- of 16-bit weights only the sum is wide: forward and backward run as before, and the weights stay as they are;
- the share of a micro-batch is not rounded to 16 bits with its loss;
- an optimizer that can take fp32 gradients gets them; any other gets them rounded once, at the end.
"""

from __future__ import annotations

import math
import warnings
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import LBFGS
from torch.optim.lr_scheduler import ReduceLROnPlateau

from batchwright.device.step import needs_closure
from batchwright.errors import InvalidInputError
from batchwright.units import shortened

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from batchwright.accumulate.parallelism import Parallelism

    _Home = tuple[dict[str, nn.Parameter | None], str, str, nn.Parameter]


BATCH_NORM_NOTE = (
    "{names}: batch normalization takes its statistics from each micro-batch, not from the whole batch, and moves its "
    "running averages once per micro-batch. No accumulation can make that equal the big batch. GroupNorm or LayerNorm "
    "do not depend on the batch; frozen statistics (module.eval()) are exact as well."
)


class BatchNormWarning(UserWarning):
    """Batch normalization under accumulation is not that of the big batch."""


def remove_all(handles: Iterable[Any]) -> None:
    """Take hooks away."""
    for handle in handles:
        handle.remove()


def weights_held_by(optimizers: Iterable[Any]) -> list[nn.Parameter]:
    """Return every weight that optimizers hold, group by group."""
    return [weight for optimizer in optimizers for group in optimizer.param_groups for weight in group["params"]]


def batch_norms(model: nn.Module) -> list[str]:
    """Name the batch normalization layers that take statistics from their batch.

    >>> batch_norms(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    ['1']
    """
    kinds = nn.modules.batchnorm._BatchNorm
    return [name for name, module in model.named_modules() if isinstance(module, kinds) and module.training]


def check_construction(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    parallelism: Parallelism,
    *,
    schedulers: Sequence[Any],
    clip_norm: float | None,
    precise: bool,
    on_oom: str,
    is_single: bool,
) -> None:
    """Refuse what cannot work; warn of batch normalization where a window has more than one micro-batch."""
    if not optimizers:
        raise InvalidInputError("an accumulator needs an optimizer, or a list of them; received none.")
    for optimizer in optimizers:
        if not hasattr(optimizer, "param_groups"):
            raise InvalidInputError(f"an accumulator takes an optimizer of torch; received {shortened(optimizer)}.")
        if isinstance(optimizer, LBFGS):
            raise InvalidInputError(
                "LBFGS computes the loss again within its step, which accumulation cannot do.", remedy="SGD, AdamW, ..."
            )
        if needs_closure(optimizer):
            raise InvalidInputError(
                f"{type(optimizer).__name__} computes the loss again within its step, by a closure that accumulation "
                "does not have.",
                remedy="SGD, AdamW, ..., or a loop of your own around such an optimizer",
            )
    for scheduler in schedulers:
        if not callable(getattr(scheduler, "step", None)):
            raise InvalidInputError(f"a scheduler has a step(); received {shortened(scheduler)}.")
        if isinstance(scheduler, ReduceLROnPlateau):
            raise InvalidInputError(
                "ReduceLROnPlateau steps by a loss of your own choice.", remedy="leave it out, and step it yourself"
            )
    if clip_norm is not None and not (
        isinstance(clip_norm, int | float) and clip_norm > 0 and not math.isnan(clip_norm)
    ):
        raise InvalidInputError(f"clip_norm must be above 0; received {shortened(clip_norm)}.")
    if on_oom not in ("raise", "split"):
        raise InvalidInputError(f'on_oom is "raise" or "split"; received {shortened(on_oom)}.')
    parallelism.check_options(precise=precise, splits=on_oom == "split")
    check_same_weights(model, optimizers)
    if not is_single:
        warn_of_batch_norm(model, stacklevel=5)


def warn_of_batch_norm(model: nn.Module, also: str = "", *, stacklevel: int) -> None:
    """Warn where a model takes statistics from each micro-batch; `also` is what else is to be said of them."""
    names = batch_norms(model)
    if names:
        warnings.warn(BATCH_NORM_NOTE.format(names=_listed(names)) + also, BatchNormWarning, stacklevel=stacklevel)


def check_same_weights(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse an optimizer that has none of the model's weights: made for another model, or before this one moved."""
    weights = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        if not any(id(parameter) in weights for parameter in weights_held_by([optimizer])):
            raise InvalidInputError(
                f"{type(optimizer).__name__} holds none of the model's weights: it would step on something else.",
                remedy="make the optimizer from model.parameters(), after the model is where it stays",
            )


_REMEDY = "freeze, unfreeze, add or swap weights between two windows: when backward has returned a Step"


class TrainedWeights:
    """The weights of a model and of its optimizers, as they are now.

    >>> from batchwright.accumulate.parallelism import Parallelism
    >>> layer = torch.nn.Linear(2, 1)
    >>> weights = TrainedWeights(layer, [torch.optim.SGD(layer.parameters(), lr=0.1)], Parallelism())
    >>> _ = layer.bias.requires_grad_(False)
    >>> weights.read(), len(weights.trainable), len(weights.held)
    (True, 1, 2)
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], parallelism: Parallelism) -> None:
        self._model, self._optimizers = model, list(optimizers)
        self._parallelism = parallelism
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
        held = weights_held_by(self._optimizers)
        if self._num_shards(homes) < self._num_shards(self._homes):
            homes = self._homes
        everything = list({id(weight): weight for weight in chain((weight for *_, weight in homes), held)}.values())
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
        are_homes_same = self._parallelism.is_sharded or all(
            name in home and home[name] is weight for home, name, _, weight in self._homes
        )
        is_same = (
            are_homes_same
            and [weight.requires_grad for weight in self._all] == [flag for _, flag, _ in self._state]
            and all(_ids(children.values()) == before for children, before in self._children)
            and _ids(weights_held_by(self._optimizers)) == _ids(self.held)
        )
        if not is_same:
            if not self._parallelism.is_sharded:
                check_same_weights(self._model, self._optimizers)
            raise InvalidInputError(
                f"the weights that train changed in the middle of a window ({self._changes()}): their gradient would "
                "be that of a part of it.",
                remedy=_REMEDY,
            )

    def _num_shards(self, homes: list[_Home]) -> int:
        return self._parallelism.num_shards(weight for *_, weight in homes)

    def _changes(self) -> str:
        names = {id(weight): name for name, weight in self._model.named_parameters(remove_duplicate=False)}
        before = {identity: flag for identity, flag, _ in self._state}
        held = {id(weight) for weight in self.held}
        frozen = [weight for weight in self._all if before[id(weight)] and not weight.requires_grad]
        unfrozen = [weight for weight in self._all if not before[id(weight)] and weight.requires_grad]
        added = [weight for weight in weights_held_by(self._optimizers) if id(weight) not in held]
        kept = {id(weight) for weight in self._model.parameters()}
        gone = [name for *_, name, weight in self._homes if not self._parallelism.is_sharded and id(weight) not in kept]
        parts = [
            f"{how} {_listed([names.get(id(weight), 'a weight outside the model') for weight in weights])}"
            for how, weights in (("frozen:", frozen), ("unfrozen:", unfrozen), ("added to the optimizer:", added))
            if weights
        ]
        parts += [f"swapped: {_listed(gone)}"] if gone else []
        return "; ".join(parts) or "modules or the optimizer's groups are others"


def _ids(things: Iterable[object]) -> list[int]:
    return list(map(id, things))


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


NARROW = (torch.bfloat16, torch.float16)


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
        remove_all(self._handles)
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
