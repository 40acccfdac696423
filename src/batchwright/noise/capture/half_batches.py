"""The gradient of half of a batch, whatever the model does: a second backward in which the other half is silenced.

The backward pass is linear in the gradients that enter it. With those of some samples set to zero, near the loss where
the samples still stand side by side, it gives the share of the others. So a batch is cut in two without its loop, and
no module has to be known: recurrent nets, attention, norms and weights of one's own, functions.

Promises:
- the user's own backward, its gradients and random numbers stay as they are; what fails here is a reason, no error;
- the halves are drawn at random, so that an order within the batch does not matter;
- samples that are tied together (batch normalization, losses over pairs), or that lie along another dimension than
  supposed, are noticed: the gradient of silenced samples must stay zero all the way down. Where it does not, there is a
  reason instead of an answer.

It takes as long as a backward, and the memory of one gradient. Hooks of the user's on tensors run twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.parametrize import ParametrizationList

from batchwright.accumulate.boundary import graph_nodes
from batchwright.accumulate.weights import remove_all
from batchwright.noise.capture.weight_hooks import WeakHook

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn
    from torch.autograd.graph import Node


# A layout that is wrong is so in every pass; a look at a few, then now and then, finds it.
FIRST_CHECKS, CHECK_EVERY = 3, 16
_ATTEMPTS = 3
# Of what is left of silenced samples, relative to the others; zeros stay zeros exactly.
_SPILL = 1e-5
# Functions of weights alone have the weights' own dimensions, which may be as long as the batch. Those of a
# parametrization are known by its hook, whatever they are.
_OF_WEIGHTS = {
    f"{name}Backward{number}"
    for name in (
        *("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze", "Slice", "Select"),
        *(
            "Add",
            "Sub",
            "Mul",
            "Div",
            "Neg",
            "Pow",
            "Exp",
            "Log",
            "Abs",
            "Sqrt",
            "Tanh",
            "Sigmoid",
            "Softplus",
            "Clone",
        ),
        *("Sum", "Mean", "Norm", "LinalgVectorNorm", "Mm", "Cat", "Stack", "ToCopy", "Softmax", "WeightNormInterface"),
    )
    for number in (0, 1)
}
_SUMS = {"AddBackward0", "SubBackward0", "MulBackward0", "DivBackward0", "SumBackward0", "StackBackward0"}


class _TiedError(Exception):
    """What the silenced samples got, they should not have."""


class Halves:
    """Takes the share of a random half of the samples of each backward.

    >>> x, weight = torch.tensor([[1.0], [2.0], [4.0], [8.0]]), torch.nn.Parameter(torch.ones(1))
    >>> halves = Halves([weight], ["weight"], samples=4)
    >>> loss = (x * weight).sum()
    >>> halves.take(loss)
    True
    >>> both = halves.squares_of(weight, torch.tensor([15.0])).sqrt()
    >>> float(both.sum())
    15.0
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], names: Sequence[str], *, samples: int, batch_dim: int = 0
    ) -> None:
        self._parameters, self._names = list(parameters), dict(zip(map(id, parameters), names, strict=True))
        self._samples, self._batch_dim = samples, batch_dim
        self._shares: dict[int, torch.Tensor | None] = {}
        self._sizes = (samples // 2, samples - samples // 2)
        self._attempt = self._num_passes = 0
        # Its own, so that the random numbers of the training stay as they are.
        self._generator = torch.Generator().manual_seed(0)
        self.is_mine = torch.zeros(samples, dtype=torch.bool)
        """Which samples the half of the last pass has."""
        self.computed_weights: list[Node] = []
        """Graphs of weights that parametrizations computed from weights; to be cleared after a window."""
        self.failure: str | None = None

    def follow_parametrizations(self, model: nn.Module) -> list[Any]:
        """Note the weights that parametrizations compute from weights; returns the hooks."""
        computing = [module for module in model.modules() if isinstance(module, ParametrizationList)]
        return [module.register_forward_hook(WeakHook(self._weight_computed)) for module in computing]

    def _weight_computed(self, _: nn.Module, __: Any, weight: torch.Tensor) -> None:
        if weight.grad_fn is not None:
            self.computed_weights.append(weight.grad_fn)

    def take(self, tensors: Any, gradients: Any = None) -> bool:
        """Take the share of one half, before the backward of `tensors`; False if it does not concern the weights."""
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        given = [gradients] * len(roots) if not isinstance(gradients, list | tuple) else list(gradients)
        pairs = [(r, g) for r, g in zip(roots, given, strict=True) if r.grad_fn is not None]
        self._shares = {}
        self.failure = "one sample cannot be cut in two" if self._samples < 2 else None
        if not pairs or self.failure:
            return False
        self._num_passes += 1
        self.is_mine = torch.zeros(self._samples, dtype=torch.bool)
        self.is_mine[torch.randperm(self._samples, generator=self._generator)[: self._sizes[0]]] = True
        is_checked = self._num_passes <= FIRST_CHECKS or self._num_passes % CHECK_EVERY == 0
        reason = ""
        for attempt in range(self._attempt, _ATTEMPTS):
            graph = _Graph(
                [r.grad_fn for r, _ in pairs],
                self._parameters,
                self._samples,
                self._batch_dim,
                attempt,
                computed=self.computed_weights,
            )
            if not graph.concerns_weights:
                return False
            if graph.uncovered is not None:
                name = self._names[id(graph.uncovered)]
                reason = reason or (
                    f"{name}: no tensor between it and the loss has a dimension of {self._samples} samples"
                )
                continue
            try:
                shares = self._run(pairs, graph, is_checked=is_checked)
            except _TiedError:
                reason = (
                    "samples are tied together (batch normalization, a loss over pairs), or lie along another "
                    f"dimension than batch_dim={self._batch_dim}"
                )
                continue
            except Exception as error:
                reason = f"a second backward pass fails: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
                break
            self._attempt = attempt
            self._shares = dict(zip(map(id, self._parameters), shares, strict=True))
            return True
        self.failure = reason
        return False

    @torch.no_grad()
    def squares_of(self, parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return the squared shares of both halves of a gradient that just arrived, as those of equal halves."""
        if id(parameter) not in self._shares:
            return None
        share, wide = self._shares.pop(id(parameter)), torch.promote_types(gradient.dtype, torch.float32)
        if share is None:
            self.failure = (
                f"{self._names[id(parameter)]}: a gradient that does not come through the graph of the loss, as under "
                "checkpointing with use_reentrant=True"
            )
            return None
        whole = (gradient.to_dense() if gradient.is_sparse else gradient).to(wide)
        mine = share.to(wide)
        long = torch.float32 if whole.device.type == "mps" else torch.float64
        squares = [part.to(long).square().sum() for part in (mine, whole - mine)]
        # The mean of a part is N/n times its share; two equal parts have 2 there.
        return torch.stack(
            [square * (self._samples / size / 2) for square, size in zip(squares, self._sizes, strict=True)]
        )

    def _run(self, pairs: list[tuple[Any, Any]], graph: _Graph, *, is_checked: bool) -> list[torch.Tensor | None]:
        verified: list[bool] = []
        hooks = [node.register_prehook(self._silence(layouts)) for node, layouts in graph.places.items()]
        hooks += [node.register_prehook(self._shrink) for node in graph.common]
        if is_checked or graph.needs_check:
            below = graph.below_places()
            hooks += [node.register_prehook(self._check(verified)) for node in below]
        given = [g for _, g in pairs]
        try:
            shares = torch.autograd.grad(
                [r for r, _ in pairs],
                self._parameters,
                None if all(g is None for g in given) else given,
                retain_graph=True,
                allow_unused=True,
            )
        finally:
            remove_all(hooks)
        if graph.needs_check and not any(verified):
            raise _TiedError
        return [None if s is None else s.detach().to_dense() if s.is_sparse else s.detach() for s in shares]

    def _silence(self, layouts: list[_Layout | None]) -> Callable[[Any], Any]:
        def hook(gradients: tuple[torch.Tensor | None, ...]) -> Any:
            silenced: list[torch.Tensor | None] = []
            for gradient, layout in zip(gradients, layouts, strict=False):
                if gradient is None:
                    silenced.append(None)
                    continue
                if layout is None:
                    raise _TiedError
                mask = layout.mask(self.is_mine, gradient)
                # Not a product: infinity times zero is no number.
                silenced.append(torch.where(mask, gradient, torch.zeros_like(gradient)))
            return tuple(silenced)

        return hook

    def _shrink(self, gradients: tuple[torch.Tensor | None, ...]) -> Any:
        """What does not depend on samples belongs to each of them alike."""
        share = self._sizes[0] / self._samples
        return tuple(None if gradient is None else gradient * share for gradient in gradients)

    def _check(self, verified: list[bool]) -> Callable[[Any], None]:
        def hook(gradients: tuple[torch.Tensor | None, ...]) -> None:
            for gradient in gradients:
                if gradient is None or gradient.is_sparse:
                    continue
                layouts = _layouts(tuple(gradient.shape), self._samples)
                if not layouts:
                    continue
                squares = gradient.detach().to(torch.float32).square()
                total = float(squares.sum())
                if not 0 < total < float("inf"):
                    continue
                masks = [layout.mask(self.is_mine, squares) for layout in layouts]
                spills = [float(torch.where(mask, 0.0, squares).sum()) for mask in masks]
                if min(spills) > _SPILL**2 * total:
                    raise _TiedError
                # Only a dimension of the samples alone proves anything; a flat one follows whatever was supposed.
                best = layouts[spills.index(min(spills))]
                verified.append(best.is_exact)

        return hook


class _Layout:
    """Where the samples are in a tensor: along a dimension, which may hold several positions of each."""

    def __init__(self, dim: int, size: int, samples: int, *, is_minor: bool = False) -> None:
        self.dim, self.is_exact = dim, size == samples
        places = torch.arange(size)
        self._sample = places % samples if is_minor else places // (size // samples)

    def mask(self, is_mine: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        shape = [1] * like.dim()
        shape[self.dim] = -1
        return is_mine[self._sample].to(like.device).view(shape)


def _layouts(shape: tuple[int, ...], samples: int) -> list[_Layout]:
    """Every way in which a tensor may hold the samples, those with a dimension of their own first."""
    exact = [_Layout(dim, size, samples) for dim, size in enumerate(shape) if size == samples]
    flat = [
        _Layout(dim, size, samples, is_minor=is_minor)
        for dim, size in enumerate(shape)
        if size > samples and size % samples == 0
        for is_minor in (False, True)
    ]
    return exact + flat


class _Graph:
    """Where to silence samples on the way from the loss to the weights."""

    def __init__(
        self,
        roots: list[Any],
        parameters: Sequence[nn.Parameter],
        samples: int,
        batch_dim: int,
        attempt: int,
        *,
        computed: Sequence[Node] = (),
    ) -> None:
        self._wanted = {id(parameter): parameter for parameter in parameters}
        self._samples, self._batch_dim, self._attempt = samples, batch_dim, attempt
        self._of_weights = {node: True for node in graph_nodes(computed) if not hasattr(node, "variable")}
        self.places: dict[Node, list[_Layout | None]] = {}
        self.common: set[Node] = set()
        self.needs_check = False
        self.concerns_weights = False
        self.uncovered: nn.Parameter | None = None
        self._find_common(roots)
        for root in roots:
            open_leaf = self._cover(root)
            self.uncovered = self.uncovered if open_leaf is None else open_leaf

    def below_places(self) -> list[Node]:
        """The nodes behind the places whose gradients have to stay silent where they were silenced."""
        seen = set(self.places) | self.common
        ahead = [child for node in self.places for child, _ in node.next_functions if child is not None]
        below = []
        while ahead:
            node = ahead.pop()
            if node in seen or hasattr(node, "variable") or self._is_of_weights(node):
                continue
            seen.add(node)
            below.append(node)
            ahead.extend(child for child, _ in node.next_functions if child is not None)
        return below

    def _find_common(self, roots: list[Any]) -> None:
        """Find terms of the loss that are functions of weights alone, such as a penalty on their size."""
        ahead = list(roots)
        while ahead:
            node = ahead.pop()
            if node.name() in _SUMS and _shapes(node) in ([()], [(1,)]):
                children = [child for child, _ in node.next_functions if child is not None]
                is_sum = node.name() not in ("MulBackward0", "DivBackward0") or len(children) == 1
                for child in children if is_sum else []:
                    # A weight itself collects what comes to it from elsewhere as well.
                    if self._is_of_weights(child) and not hasattr(child, "variable"):
                        self.common.add(child)
                        self.concerns_weights = True
                    elif not hasattr(child, "variable"):
                        ahead.append(child)

    def _cover(self, root: Node) -> nn.Parameter | None:
        """Choose places so that every way to a weight meets one; return a weight that has none."""
        open_leaf: dict[Node, nn.Parameter | None] = {}
        stack = [(root, False)]
        while stack:
            node, is_done = stack.pop()
            if node in open_leaf and not is_done:
                continue
            children = [child for child, _ in node.next_functions if child is not None]
            if is_done:
                leaf = next((open_leaf[child] for child in children if open_leaf.get(child) is not None), None)
                if leaf is not None and (flat := self._flat(node)) is not None:
                    self.places[node], self.needs_check, leaf = flat, True, None
                open_leaf[node] = leaf
                continue
            open_leaf[node] = None
            if node in self.common:
                continue
            variable = getattr(node, "variable", None)
            if variable is not None:
                if id(variable) in self._wanted:
                    self.concerns_weights = True
                    open_leaf[node] = variable
                continue
            layouts = None if self._is_of_weights(node) else self._exact(node)
            if layouts is not None:
                self.places[node] = layouts
                self.concerns_weights = True
                continue
            stack.append((node, True))
            stack.extend((child, False) for child in children)
        return open_leaf[root]

    def _exact(self, node: Node) -> list[_Layout | None] | None:
        """The layouts of the outputs of a node whose samples have a dimension of their own; None if one has not."""
        layouts: list[_Layout | None] = []
        for shape in _shapes(node):
            dims = [dim for dim, size in enumerate(shape) if size == self._samples]
            supposed = [dim for dim in dims if dim == self._batch_dim]
            # The last state of a recurrent net has lost the time, and its samples come first.
            supposed += [0] if self._batch_dim and 0 in dims else []
            others = [dim for dim in dims if dim not in supposed]
            order = (
                supposed
                if self._attempt == 0
                else others + supposed
                if self._attempt == 1
                else list(reversed(supposed + others))
            )
            layouts.append(_Layout(order[0], self._samples, self._samples) if order else None)
        if not any(layouts) or not all(
            layout or not shape or 0 in shape for layout, shape in zip(layouts, _shapes(node), strict=True)
        ):
            return None
        return layouts

    def _flat(self, node: Node) -> list[_Layout | None] | None:
        shapes = _shapes(node)
        if len(shapes) != 1:
            return None
        flat = [layout for layout in _layouts(shapes[0], self._samples) if not layout.is_exact]
        # Positions of one sample follow one another where samples come first.
        return [flat[min((self._attempt + bool(self._batch_dim)) % 2, len(flat) - 1)]] if flat else None

    def _is_of_weights(self, node: Node) -> bool:
        """Whether a node computes with weights alone."""
        known = self._of_weights
        stack = [node]
        while stack:
            now = stack[-1]
            if now in known:
                stack.pop()
                continue
            if hasattr(now, "variable"):
                known[now] = id(now.variable) in self._wanted
                continue
            children = [child for child, _ in now.next_functions if child is not None]
            if now.name() not in _OF_WEIGHTS or len(children) < len(now.next_functions) or not children:
                known[now] = False
                continue
            if any(known.get(child) is False for child in children):
                known[now] = False
                continue
            left = [child for child in children if child not in known]
            if left:
                stack.extend(left[:1])
            else:
                known[now] = True
        return known[node]


def _shapes(node: Node) -> list[tuple[int, ...]]:
    """Return the shapes of the outputs of a node."""
    return [tuple(output.shape) for output in node._input_metadata]
