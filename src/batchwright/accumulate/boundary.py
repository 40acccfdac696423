"""The end of a window, once and in this order: unscale, clip, step, scheduler, zero.

Promises:
- the gradient is corrected and clipped in one pass, in place, without a look at its values from the host;
- an optimizer whose step is skipped by the scaler takes its scheduler with it.
"""

from __future__ import annotations

import math
import weakref
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from batchwright.accumulate.weights import (
    NARROW,
    TrainedWeights,
    WideShares,
    put_back,
    remove_all,
    round_once,
    takes_wide_gradients,
    weights_held_by,
    widen,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from batchwright.accumulate.parallelism import Parallelism


CLIP_LISTENER: ContextVar[Callable[[list[Any]], None] | None] = ContextVar("CLIP_LISTENER", default=None)
"""Set by an audit, which judges gradients before they are clipped: called with the weights instead of clipping."""

# A loss that counts nothing is run only so that this rank keeps step with the others. The mean over no units is not a
# number, and so is its gradient: multiplying by 0 does not help. So zeros are put in place of whatever leaves a node of
# the graph that only such a loss reaches. Hooks of DDP and FSDP2 run as ever.


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
    kept = set() if beside is None else set(graph_nodes([beside.grad_fn]))
    only_theirs = [node for node in graph_nodes([loss.grad_fn for loss in losses]) if node not in kept]
    # A leaf has nothing behind it to hand zeros to: what reaches it is replaced instead.
    handles = [
        node.register_prehook(_zeros)
        if hasattr(node, "variable")
        else node.register_hook(lambda behind, _: _zeros(behind))
        for node in only_theirs
    ]
    try:
        yield
    finally:
        remove_all(handles)


def _zeros(gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if gradient is None else torch.zeros_like(gradient) for gradient in gradients)


def graph_nodes(roots: Sequence[Any]) -> Iterator[Any]:
    """Yield every node of an autograd graph behind some of its nodes, themselves included, each once."""
    seen, waiting = set(), list(roots)
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [before for before, _ in node.next_functions]


class Boundary:
    """What happens to gradients, weights and schedule when a window is full."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        weights: TrainedWeights,
        parallelism: Parallelism,
        *,
        clip_norm: float | None,
        scaler: Any,
        schedulers: Sequence[Any],
        precise: bool,
    ) -> None:
        self.optimizers = list(optimizers)
        self.weights = weights
        self._parallelism = parallelism
        self._clip_norm = clip_norm
        self._scaler = scaler
        self._schedulers = schedulers
        self._is_precise = precise
        self._narrow: list[nn.Parameter] = []
        self._wide_shares = WideShares()
        self._takes_wide = True
        self._prepare_wide()
        # The hooks must not keep this object alive, and go with it.
        self._stepped = [0]
        self._handles = self._watch_steps()
        weakref.finalize(self, _let_go, self._handles, self._wide_shares, self._narrow)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The weights of the window at hand that get gradients."""
        return self.weights.trainable

    def replace_optimizers(self, optimizers: Sequence[torch.optim.Optimizer], weights: TrainedWeights) -> None:
        """Step others from now on."""
        remove_all(self._handles)
        self.optimizers, self.weights = list(optimizers), weights
        self._prepare_wide()
        self._handles[:] = self._watch_steps()

    def begin(self) -> None:
        """Begin a window: read which weights train now, and forget what somebody's backward left behind."""
        if self.weights.read():
            self._prepare_wide()
        self.zero()

    def _prepare_wide(self) -> None:
        """Have the 16-bit weights that train now add up in fp32, and no others."""
        if not self._is_precise:
            return
        narrow = [parameter for parameter in self.parameters if parameter.dtype in NARROW]
        kept = set(map(id, narrow))
        put_back([weight for weight in self._narrow if id(weight) not in kept])
        self._narrow[:] = narrow
        widen(self._narrow)
        self._wide_shares.attach(self.parameters if narrow else [])
        self._takes_wide = all(takes_wide_gradients(optimizer, self._narrow) for optimizer in self.optimizers)

    def _watch_steps(self) -> list[Any]:
        stepped = self._stepped

        def count(*_: Any) -> None:
            stepped[0] += 1

        return [optimizer.register_step_post_hook(count) for optimizer in self.optimizers]

    def backward(self, losses: Sequence[torch.Tensor], shares: Sequence[float], *, keeps_step: bool) -> None:
        """Add the gradient of each loss times its share; with `keeps_step` those of share 0 run too, and add zeros."""
        pairs = list(zip(losses, shares, strict=True))
        empty = [loss for loss, share in pairs if not share] if keeps_step else []
        if not any(shares):
            if empty:
                zero_backward(_sum(empty))
            return
        with self._wide_shares.of(next(filter(None, shares))) as rest:
            loss = _sum([loss * (share / rest) for loss, share in pairs if share])
            if empty:
                with counting_nothing(empty, beside=loss):
                    self._scaled(_sum([loss, *empty])).backward()
            else:
                self._scaled(loss).backward()

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        if self._scaler is None:
            return loss
        scaled: torch.Tensor = self._scaler.scale(loss)
        return scaled

    @property
    def gradients(self) -> list[torch.Tensor]:
        """The gradients to change in place: of sharded weights this rank's piece, of sparse ones their rows."""
        piece_of = self._parallelism.piece_of
        return [piece_of(_rows(parameter)).values for parameter in self.parameters if parameter.grad is not None]

    @property
    def has_gradients(self) -> bool:
        """Whether anything has been added up."""
        # The first mostly has one, and then a generator is not worth its making.
        first = self.parameters[0].grad is not None
        return first or any(parameter.grad is not None for parameter in self.parameters)

    @property
    def needs_norm(self) -> bool:
        """Whether a step depends on the norm: to clip by it, or to see an infinity that not every scaler sees."""
        is_partial = self._parallelism.is_sharded or len(self.optimizers) > 1
        return self._clip_norm is not None or (self._scaler is not None and is_partial)

    def unscale(self) -> None:
        """Take the scaler's factor out of the gradients."""
        if self._scaler is not None:
            # A rank that had nothing to scale, and so far never did, would not know the factor.
            self._scaler.scale(torch.zeros((), device=self.parameters[0].device))
            for optimizer in self.optimizers:
                self._scaler.unscale_(optimizer)

    def square_of_norm(self) -> torch.Tensor:
        """The sum of squares of this rank's gradients, each element of the model's counted once over ranks."""
        alike: dict[tuple[float, torch.device, torch.dtype], list[torch.Tensor]] = {}
        for parameter in self.parameters:
            if parameter.grad is not None:
                values, num_copies = self._parallelism.piece_of(_rows(parameter))
                alike.setdefault((num_copies, values.device, values.dtype), []).append(values)
        squares = []
        for (copies, device, _), gradients in alike.items():
            norms = torch.stack(torch._foreach_norm(gradients, 2))
            wide = torch.float32 if device.type == "mps" else torch.float64
            squares.append(norms.to(wide).square().sum() / copies)
        return _sum([square.to(squares[0].device) for square in squares]) if squares else torch.zeros(())

    def step(self, factor: float, norm: torch.Tensor | float | None) -> str | None:
        """Correct and clip the gradients, step, and return why not if the optimizers did not."""
        self._scale(factor, norm)
        if self._scaler is not None and norm is not None and not math.isfinite(float(norm)):
            # Have it skip every optimizer: there is an infinity in another's gradients, or in another rank's.
            for optimizer in self.optimizers:
                for flag in self._scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
                    flag.fill_(1.0)
        if not self._takes_wide:
            round_once(self._narrow)
        before = self._stepped[0]
        for optimizer in self.optimizers:
            if self._scaler is None:
                optimizer.step()
            elif any(weight.grad is not None for weight in weights_held_by([optimizer])):
                self._scaler.step(optimizer)
        if self._scaler is not None:
            self._scaler.update()
        has_stepped = self._stepped[0] > before
        if has_stepped:
            for scheduler in self._schedulers:
                scheduler.step()
        return None if has_stepped else "the scaler found an infinite or undefined gradient"

    def drop(self) -> None:
        """End a window without a step; the scaler forgets what it unscaled."""
        if self._scaler is not None:
            self._scaler._per_optimizer_states.clear()

    def zero(self) -> None:
        """Forget the gradients, also those of weights that no optimizer has."""
        for parameter in self.parameters:
            parameter.grad = None
        for parameter in self.weights.held:  # a gradient that a frozen one kept would be stepped with
            parameter.grad = None
        if not self._takes_wide:
            widen(self._narrow)

    def _may_clip(self) -> bool:
        listener = CLIP_LISTENER.get()
        if listener is not None:
            listener([])
        return listener is None

    def _scale(self, factor: float, norm: torch.Tensor | float | None) -> None:
        coefficient: torch.Tensor | float = factor
        if self._clip_norm is not None and norm is not None and self._may_clip():
            room = self._clip_norm / (norm + 1e-6)
            # A norm that is not a number must stay one.
            coefficient = factor * (
                torch.clamp(room, max=1.0) if isinstance(room, torch.Tensor) else 1.0 if room > 1 else room
            )
        if isinstance(coefficient, float) and (coefficient == 1.0 or not math.isfinite(coefficient)):
            return
        gradients = self.gradients
        if isinstance(coefficient, torch.Tensor):
            for device in {gradient.device for gradient in gradients}:
                here = [gradient for gradient in gradients if gradient.device == device]
                torch._foreach_mul_(here, coefficient.to(device))
        else:
            torch._foreach_mul_(gradients, coefficient)


def _rows(parameter: nn.Parameter) -> torch.Tensor:
    """Return a gradient, or of a sparse one the values of its rows: each row once, in the gradient's own memory."""
    assert parameter.grad is not None
    if not parameter.grad.is_sparse:
        return parameter.grad
    if not parameter.grad.is_coalesced():
        parameter.grad = parameter.grad.coalesce()
    return parameter.grad.values()


def _sum(scalars: list[torch.Tensor]) -> torch.Tensor:
    return scalars[0] if len(scalars) == 1 else torch.stack([scalar.reshape(()) for scalar in scalars]).sum()


def _let_go(handles: list[Any], wide_shares: WideShares, narrow: list[nn.Parameter]) -> None:
    """Take back what was changed on weights and optimizers, once nobody accumulates any more."""
    remove_all(handles)
    wide_shares.attach([])
    put_back(narrow)
