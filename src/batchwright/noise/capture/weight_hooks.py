"""Squared norms of gradients, taken by hooks on the weights, which see what each backward adds before it is added.

Promises:
- squares are exact enough to be subtracted from each other;
- no gradient is copied, kept or changed; what is kept of a backward is a number per weight, on its device;
- ranks do not matter: the hook sees this rank's own gradient, before DDP or FSDP2 reduce it;
- a weight whose gradient came in several pieces within one pass is noticed: the squares of pieces do not add up.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import torch
from torch.nn.parameter import is_lazy

from batchwright.accumulate.weights import remove_all
from batchwright.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from batchwright.accumulate.parallelism import Parallelism


class WeakHook:
    """A hook that calls a method as long as its object lives; pickled or copied with a model it calls nothing.

    >>> import copy
    >>> class Counter:
    ...     number = 0
    ...     def count(self, *_):
    ...         self.number += 1
    >>> counter = Counter()
    >>> hook = WeakHook(counter.count)
    >>> hook(), copy.deepcopy(hook)(), counter.number
    (None, None, 1)
    """

    def __init__(self, method: Callable[..., Any] | None = None) -> None:
        self._method = None if method is None else WeakMethod(method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method, if there is one still."""
        method = None if self._method is None else self._method()
        return None if method is None else method(*args, **kwargs)

    def __reduce__(self) -> tuple[type[WeakHook], tuple[()]]:
        return WeakHook, ()


# A plain fp32 reduction over a million entries is off by up to 1e-4 of itself, and T is a small difference of large
# squares. So a gradient is reduced to the norms of its rows, one operation; they are squared and added up in fp64,
# those of all weights together, since the cost of many small operations is what shows in a step.

# Longer rows are cut where they can be: fp32 keeps 1e-7 over about so many entries.
_LONGEST_ROW, _ROW = 4096, 1024


def row_norms(gradient: torch.Tensor) -> torch.Tensor:
    """Return the norms of the rows of a gradient, one dimension, on its device.

    >>> row_norms(torch.full((2, 4), 1.0)), row_norms(torch.tensor([3.0, 4.0]))
    (tensor([2., 2.]), tensor([5.]))
    """
    dense = gradient.coalesce().values() if gradient.is_sparse else gradient
    if dense.dim() == 2 and not dense.is_contiguous():
        dense = dense.t()  # sums along strides are slower, and rounded more
    exact = torch.float32 if dense.dtype.itemsize < 4 else None
    rows = dense.reshape(1, -1) if dense.dim() < 2 else dense.flatten(1) if dense.dim() > 2 else dense
    if rows.shape[1] > _LONGEST_ROW and rows.is_contiguous() and rows.numel() % _ROW == 0:
        rows = rows.view(-1, _ROW)
    elif rows.shape[1] > _LONGEST_ROW and exact is None and rows.device.type != "mps":
        exact = torch.float64
    norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=exact)
    return norms


def add_squares(
    norms: Sequence[torch.Tensor], groups: Sequence[int], num_groups: int, device: torch.device
) -> torch.Tensor:
    """Square the norms of rows and add them up by group; no host waits for a device.

    >>> add_squares([torch.tensor([1.0, 2.0]), torch.tensor([3.0])], [0, 1], 2, torch.device("cpu"))
    tensor([5., 9.], dtype=torch.float64)
    """
    wide = torch.float32 if device.type == "mps" else torch.float64
    totals = []
    for group in range(num_groups):
        mine = [rows for rows, its_group in zip(norms, groups, strict=True) if its_group == group]
        alike = [rows if rows.dtype == mine[0].dtype else rows.to(mine[0].dtype) for rows in mine]
        joined = torch.cat([rows.to(device) for rows in alike]) if mine else torch.zeros(1, device=device)
        totals.append(joined.to(wide).square_().sum())
    return torch.stack(totals)


def square(gradient: torch.Tensor) -> torch.Tensor:
    """Return the squared norm of one gradient, as a tensor of no dimensions.

    >>> round(square(torch.full((3, 1000), 2.0)).item(), 2)
    12000.0
    """
    return add_squares([row_norms(gradient)], [0], 1, gradient.device)[0]


_NUM_PROBES = 2


@dataclass
class Weights:
    """What is measured: weights that require a gradient, each with the number of its group."""

    parameters: list[nn.Parameter]
    groups: list[int]
    names: list[str]
    """Of the groups."""
    num_others: int = 0
    """Weights that get gradients and are in no optimizer: they do not train, and are left out."""

    @property
    def device(self) -> torch.device:
        """Where sums are kept."""
        return self.parameters[0].device

    @property
    def itemsize(self) -> int:
        """Bytes of a number of the coarsest weight."""
        return min(parameter.dtype.itemsize for parameter in self.parameters)

    @staticmethod
    def of(model: nn.Module, optimizers: Sequence[Any]) -> Weights:
        """Take the weights that optimizers hold, group by group."""
        held: dict[int, tuple[nn.Parameter, int]] = {}
        names: list[str] = []
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.requires_grad:
                        held.setdefault(id(parameter), (parameter, len(names)))
                names.append(str(group.get("name", f"group {len(names)}")))
        if any(is_lazy(parameter) for parameter, _ in held.values()):
            raise InvalidInputError(
                "the model has lazy parameters, whose shapes are not known before its first forward.",
                remedy="run one forward before NoiseScale is made",
            )
        others = sum(p.requires_grad and id(p) not in held for p in model.parameters())
        return Weights([p for p, _ in held.values()], [group for _, group in held.values()], names, others)

    def is_same_as(self, other: Weights) -> bool:
        """Whether nothing was frozen, thawed, added or taken away."""
        return len(self.parameters) == len(other.parameters) and all(
            mine is theirs for mine, theirs in zip(self.parameters, other.parameters, strict=True)
        )


@dataclass
class _Seen:
    """What the hooks write to; they must not keep their owner alive."""

    is_on: bool = False
    norms: dict[int, torch.Tensor] = field(default_factory=dict)
    fired: set[int] = field(default_factory=set)
    examples: dict[int, torch.Tensor] = field(default_factory=dict)
    num_pieces: int = 0
    probes: list[torch.Tensor] = field(default_factory=list)
    on_first: Callable[[], None] | None = None
    of_examples: Callable[[nn.Parameter, torch.Tensor], torch.Tensor | None] | None = None


class LeafSquares:
    """The squared norm of what a backward pass adds to each weight."""

    def __init__(self, weights: Weights, parallelism: Parallelism, *, has_probes: bool = False) -> None:
        self.weights = weights
        self._parallelism = parallelism
        self._seen = _Seen()
        # Of shards the sum of what micro-batches brought is on another rank.
        self._signs = _signs(weights.parameters) if has_probes and not parallelism.is_sharded else {}
        handles = [
            leaf.register_hook(_hook(self._seen, index, weights.parameters[index], self._signs.get(index)))
            for index, leaf in enumerate(parallelism.autograd_leaves(weights.parameters))
        ]
        self.let_go = weakref.finalize(self, remove_all, handles)

    def start(
        self,
        *,
        on_first: Callable[[], None] | None = None,
        of_examples: Callable[[nn.Parameter, torch.Tensor], torch.Tensor | None] | None = None,
    ) -> None:
        """Look at the next backward pass; `on_first` is called within it, `of_examples` for every weight."""
        self._seen.norms.clear()
        self._seen.fired.clear()
        self._seen.examples.clear()
        self._seen.probes.clear()
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
        return self._seen.num_pieces > len(self._seen.fired)

    def squares(self) -> torch.Tensor:
        """The squares of the pass, by group; not taken where examples were told apart."""
        weights, norms = self.weights, self._seen.norms
        groups = [weights.groups[index] for index in norms]
        return add_squares(list(norms.values()), groups, len(weights.names), weights.device)

    def squares_of_gradients(self) -> torch.Tensor:
        """The squares of the gradients that the weights hold now, by group; of shards this rank's."""
        norms, groups = [], []
        for parameter, group in zip(self.weights.parameters, self.weights.groups, strict=True):
            if parameter.grad is not None:
                values, num_copies = self._parallelism.piece_of(parameter.grad)
                norms.append(row_norms(values) if num_copies == 1 else row_norms(values) / num_copies**0.5)
                groups.append(group)
        return add_squares(norms, groups, len(self.weights.names), self.weights.device)

    def squares_of_examples(self) -> torch.Tensor | None:
        """The squares of each example, by group: groups x examples; None if some weight has none."""
        weights, by_weight = self.weights, self._seen.examples
        if by_weight.keys() != self._seen.fired or not by_weight:
            return None
        stacked = torch.stack([squares.to(weights.device) for squares in by_weight.values()])
        index = torch.tensor([weights.groups[index] for index in by_weight], device=weights.device)
        return stacked.new_zeros(len(weights.names), stacked.shape[1]).index_add_(0, index, stacked)

    def probe(self) -> torch.Tensor | float:
        """A few random combinations of what the pass added: they must add up to those of the gradient in the end."""
        return _total(self._seen.probes, self.weights.device)

    def probe_of_gradients(self) -> torch.Tensor | float:
        """The same of the gradients that are there now."""
        pairs = [(self.weights.parameters[index].grad, signs) for index, signs in self._signs.items()]
        probes = [_probe(grad, signs) for grad, signs in pairs if grad is not None and not grad.is_sparse]
        return _total(probes, self.weights.device)


def _hook(
    seen: _Seen, index: int, parameter: nn.Parameter, signs: torch.Tensor | None
) -> Callable[[torch.Tensor], None]:
    def see(gradient: torch.Tensor) -> None:
        if not seen.is_on:
            return
        if seen.on_first is not None:
            first, seen.on_first = seen.on_first, None
            first()
        seen.num_pieces += 1
        seen.fired.add(index)
        if signs is not None and not gradient.is_sparse:
            seen.probes.append(_probe(gradient.detach(), signs))
        if seen.of_examples is None:
            seen.norms[index] = row_norms(gradient.detach())
            return
        examples = seen.of_examples(parameter, gradient.detach())
        if examples is not None:
            seen.examples[index] = examples

    return see


def _signs(parameters: Sequence[nn.Parameter]) -> dict[int, torch.Tensor]:
    """Random signs for the few smallest weights: to look at those costs nothing."""
    smallest = sorted(range(len(parameters)), key=lambda index: parameters[index].numel())[:_NUM_PROBES]
    generator = torch.Generator().manual_seed(0)
    draw = {i: torch.randint(0, 2, (parameters[i].numel(),), generator=generator) * 2.0 - 1.0 for i in smallest}
    return {index: signs.to(parameters[index].device, torch.float64) for index, signs in draw.items()}


def _probe(gradient: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    return torch.dot(gradient.reshape(-1).to(signs.dtype), signs)


def _total(values: list[torch.Tensor], device: torch.device) -> torch.Tensor | float:
    return torch.stack([value.to(device) for value in values]).sum() if values else 0.0
