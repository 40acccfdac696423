"""What an accumulation loop does to gradients, in which order, while it runs: hooks that look and change nothing.

Promises:
- clips, schedules and unscaling are judged by order: before the last backward of a step, after the step, or between;
- each weight is followed by itself, so that a loop with several losses or optimizers is not mistaken for a wrong one;
- `detailed`, what every backward added to each weight is kept, and what changed a gradient between two backwards.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from batchwright.accumulate.gradients import Gradient, as_value, named_weights, no_gradient

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn


@dataclass(frozen=True)
class Change:
    """What happened to one weight's gradient between two backwards."""

    name: str
    before: torch.Tensor
    after: torch.Tensor


@dataclass
class Trace:
    """Every backward of a window, weight by weight."""

    contributions: list[Gradient] = field(default_factory=list)
    """What each backward added."""
    changes: list[list[Change]] = field(default_factory=list)
    """What was changed before each backward, since the one before it."""
    last: Gradient | None = None
    """The gradient after the last backward before the step."""


@dataclass
class Habits:
    """What a loop did in one window, as far as order goes."""

    num_backwards: int = 0
    num_clips: int = 0
    clips_before_backward: int = 0
    """Weights times calls: clipped, and then added to by another backward before the step."""
    clips_after_step: int = 0
    clips_before_unscale: int = 0
    schedules_before_backward: int = 0
    backwards_after_step: int = 0
    left_over: frozenset[str] = frozenset()
    """Weights that held a gradient already when the window first added to them."""


class LoopWatch:
    """Follows one window of a loop; what it saw is in `habits`, and in `trace` where that was asked for."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Any], *, detailed: bool) -> None:
        self._weights = named_weights(model)
        self._names = {id(weight): name for name, weight in self._weights.items()}
        self._optimizers = optimizers
        self._detailed = detailed
        self.habits = Habits()
        self.trace = Trace() if detailed else None
        self._left_over: set[str] = set()
        self._seen: set[str] = set()
        self._in_backward = False
        self._held: dict[str, torch.Tensor] = {}
        """Each gradient as the last backward left it."""
        self._before: dict[str, torch.Tensor] = {}
        self._added_since_step: set[str] = set()
        self._clipped: set[str] = set()
        self._stepped: set[str] = set()
        self._is_scheduled = False

    @contextmanager
    def open(self) -> Iterator[None]:
        """Follow what happens inside of this."""
        handles = []
        for name, weight in self._weights.items():
            handles.append(weight.register_hook(self._comes(name, weight)))
            handles.append(weight.register_post_accumulate_grad_hook(self._added(name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.habits.left_over = frozenset(self._left_over)

    def clips(self, weights: list[Any]) -> None:
        """Note a call that clips."""
        self.habits.num_clips += 1
        for name in filter(None, (self._names.get(id(weight)) for weight in weights)):
            if name in self._stepped and name not in self._added_since_step:
                self.habits.clips_after_step += 1
            elif name in self._added_since_step:
                self._clipped.add(name)

    def unscales(self, optimizer: Any, scale: float) -> None:
        """Note that gradients are divided by the scale of a loss."""
        if scale != 1 and self._clipped & self._names_of(optimizer):
            self.habits.clips_before_unscale += 1

    def schedules(self, _: Any) -> None:
        """Note that a learning rate is stepped."""
        self._is_scheduled = bool(self._added_since_step)

    def steps(self, optimizer: Any) -> None:
        """Note that an optimizer steps."""
        names = self._names_of(optimizer)
        self._stepped |= names
        self._added_since_step -= names
        self._clipped -= names
        self._is_scheduled = False
        if self.trace is not None and self.trace.last is None:
            self.trace.last = Gradient({name: self._held_value(name) for name in self._weights})

    def _held_value(self, name: str) -> torch.Tensor:
        held = self._held.get(name)
        return no_gradient(self._weights[name]) if held is None else held

    def _names_of(self, optimizer: Any) -> set[str]:
        ids = [id(weight) for group in optimizer.param_groups for weight in group["params"]]
        return {self._names[i] for i in ids if i in self._names}

    def _comes(self, name: str, weight: torch.Tensor) -> Any:
        def before(_: torch.Tensor) -> None:
            if name not in self._seen and weight.grad is not None and bool(as_value(weight.grad).any()):
                self._left_over.add(name)
            if self._detailed:
                self._before[name] = no_gradient(weight) if weight.grad is None else as_value(weight.grad)

        return before

    def _added(self, name: str) -> Any:
        def after(weight: torch.Tensor) -> None:
            # Only here is it sure that something was added: autograd.grad() runs the other hook too.
            if not self._in_backward:
                self._begin_backward()
            if name in self._clipped:
                self.habits.clips_before_backward += 1
                self._clipped.discard(name)
            self._seen.add(name)
            self._added_since_step.add(name)
            if self.trace is not None and self.trace.last is None and weight.grad is not None:
                before, value = self._before[name], as_value(weight.grad)
                self.trace.contributions[-1].by_name[name] = value - before
                held = self._held.get(name)
                if held is not None and not torch.equal(held, before):
                    self.trace.changes[-1].append(Change(name, held, before))
                self._held[name] = value

        return after

    def _begin_backward(self) -> None:
        self._in_backward = True
        self.habits.num_backwards += 1
        if self._stepped:
            self.habits.backwards_after_step += 1
        if self._is_scheduled:
            self.habits.schedules_before_backward += 1
            self._is_scheduled = False
        if self.trace is not None and self.trace.last is None:
            zeros = {n: no_gradient(w) for n, w in self._weights.items()}
            self.trace.contributions.append(Gradient(zeros))
            self.trace.changes.append([])
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._in_backward = False
