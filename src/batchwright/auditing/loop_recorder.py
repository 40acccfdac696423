"""Run a user's accumulation loop to its end, and record the gradient that it would step with and how it got there.

Promises:
- the optimizer never steps: a step only takes the gradient, and the loop goes on to its end;
- weights, learning rates and the optimizer's own `step` are afterwards what they were;
- a loop that clips is judged by the gradient before its clipping, which would hide the difference;
- clips, schedules and unscaling are judged by order: before the last backward of a step, after the step, or between;
- each weight is followed by itself, so that a loop with several losses or optimizers is not mistaken for a wrong one;
- `detailed`, what every backward added to each weight is kept, and what changed a gradient between two backwards.
"""

from __future__ import annotations

import types
import warnings
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from batchwright.accumulate.weights import remove_all, weights_held_by
from batchwright.auditing.gradients import Gradient, named_weights, to_fp64, zeros_of
from batchwright.auditing.overrides import listen_to_steps, without_clipping
from batchwright.device.step import checked_loss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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

    num_clips: int = 0
    clips_before_backward: int = 0
    """Weights times calls: clipped, and then added to by another backward before the step."""
    clips_after_step: int = 0
    clips_before_unscale: int = 0
    schedules_before_backward: int = 0
    left_over: frozenset[str] = frozenset()
    """Weights that held a gradient already when the window first added to them."""


class LoopWatch:
    """Follows one window of a loop by hooks that change nothing; what it saw is in `habits`, detailed in `trace`."""

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
            remove_all(handles)
            self.habits.left_over = frozenset(self._left_over)

    def clips(self, weights: list[Any]) -> None:
        """Note a call that clips."""
        self.habits.num_clips += 1
        for name in filter(None, (self._names.get(id(weight)) for weight in weights)):
            if name in self._stepped and name not in self._added_since_step:
                self.habits.clips_after_step += 1
            elif name in self._added_since_step:
                self._clipped.add(name)

    def unscales(self, scaler: Any, optimizer: Any) -> None:
        """Note that gradients are divided by the scale of a loss."""
        is_scaled = scaler.is_enabled() and scaler.get_scale() != 1
        if is_scaled and self._clipped & self._names_of(optimizer):
            self.habits.clips_before_unscale += 1

    def schedules(self, schedule: Any) -> None:
        """Note that a learning rate is stepped; a schedule that is being made sets its first by a step of its own."""
        if not schedule._is_initial:
            self._is_scheduled = bool(self._added_since_step)

    def steps(self, optimizer: Any) -> None:
        """Note that an optimizer steps."""
        names = self._names_of(optimizer)
        self._stepped |= names
        self._added_since_step -= names
        self._clipped -= names
        self._is_scheduled = False
        if self.trace is not None and self.trace.last is None:
            held, weights = self._held, self._weights
            self.trace.last = Gradient({n: held[n] if n in held else zeros_of(weight) for n, weight in weights.items()})

    def _names_of(self, optimizer: Any) -> set[str]:
        return {self._names[i] for i in _ids(optimizer) if i in self._names}

    def _comes(self, name: str, weight: torch.Tensor) -> Any:
        def before(_: torch.Tensor) -> None:
            if name not in self._seen and weight.grad is not None and bool(to_fp64(weight.grad).any()):
                self._left_over.add(name)
            if self._detailed:
                self._before[name] = zeros_of(weight) if weight.grad is None else to_fp64(weight.grad)

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
                before, value = self._before[name], to_fp64(weight.grad)
                self.trace.contributions[-1].by_name[name] = value - before
                held = self._held.get(name)
                if held is not None and not torch.equal(held, before):
                    self.trace.changes[-1].append(Change(name, held, before))
                self._held[name] = value

        return after

    def _begin_backward(self) -> None:
        self._in_backward = True
        if self._is_scheduled:
            self.habits.schedules_before_backward += 1
            self._is_scheduled = False
        if self.trace is not None and self.trace.last is None:
            zeros = {n: zeros_of(w) for n, w in self._weights.items()}
            self.trace.contributions.append(Gradient(zeros))
            self.trace.changes.append([])
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._in_backward = False


class _StepReached(BaseException):
    """Ends the loop where an optimizer would really step; no `except Exception` of the user's holds it up."""


@dataclass(frozen=True)
class RecordedWindow:
    """What a loop was about to step with, and what it did on its way there."""

    gradient: Gradient
    has_stepped: bool
    """Whether it came to an optimizer step at all; if not, the gradient is what it left behind."""
    has_clipped: bool
    steps: int = 1
    """Most steps of one optimizer."""
    steps_alike: bool = False
    """Whether every further step had the gradient of the first."""
    idle: tuple[str, ...] = ()
    """Optimizers that did not step, though another did and their weights have gradients."""
    other_optimizer: str | None = None
    """The kind of an optimizer of the loop's own that would have stepped the model."""
    has_changed_weights: bool = False
    is_followed: bool = False
    """Whether hooks followed the loop: `habits` and `trace` tell nothing otherwise."""
    habits: Habits = field(default_factory=Habits)
    trace: Trace | None = None


def record_window(
    window: Callable[..., Any],
    model: nn.Module,
    optimizers: Sequence[Any],
    micro_batches: Sequence[Any],
    *,
    detailed: bool = False,
) -> RecordedWindow:
    """Call `window(model, optimizer, micro_batches)` once, from no gradients; leave none."""
    return record_windows(window, model, optimizers, lambda: micro_batches, times=1, detailed=detailed)[0]


def record_windows(
    window: Callable[..., Any],
    model: nn.Module,
    optimizers: Sequence[Any],
    micro_batches: Callable[[], Sequence[Any]],
    *,
    times: int,
    detailed: bool = False,
) -> list[RecordedWindow]:
    """Run the loop so often in a row, with the same weights: what one window leaves behind the next one finds."""
    model.zero_grad(set_to_none=True)
    recorded: list[RecordedWindow] = []
    for _ in range(times):
        run = _Run(model, optimizers, detailed=detailed)
        recorded.append(run.window(window, micro_batches()))
        if run.was_ended:
            break
    model.zero_grad(set_to_none=True)
    return recorded


class _Run:
    def __init__(self, model: nn.Module, optimizers: Sequence[Any], *, detailed: bool) -> None:
        self._model = model
        self._optimizers = list(optimizers)
        # Also those that are frozen now: the loop may unfreeze them.
        self._weights = named_weights(model, frozen=True)
        self._watch = LoopWatch(model, optimizers, detailed=detailed)
        self._steps: list[list[dict[str, torch.Tensor]]] = [[] for _ in self._optimizers]
        self._other: str | None = None
        self.was_ended = False

    def window(self, window: Callable[..., Any], micro_batches: Sequence[Any]) -> RecordedWindow:
        handed = self._optimizers[0] if len(self._optimizers) == 1 else tuple(self._optimizers)
        watch = self._watch
        with ExitStack() as stack:
            before = stack.enter_context(self._kept())
            stack.enter_context(self._steps_taken_aside())
            stack.enter_context(without_clipping(watch.clips))
            stack.enter_context(listen_to_steps(watch.unscales, watch.schedules, self._really_steps))
            stack.enter_context(watch.open())
            stack.enter_context(warnings.catch_warnings())
            # A schedule that belongs to another optimizer than this copy's misses the steps of that one.
            warnings.filterwarnings("ignore", message=r".*lr_scheduler\.step\(\).*before.*optimizer\.step")
            try:
                window(self._model, handed, micro_batches)
            except _StepReached:
                self.was_ended = True
            has_changed = any(not torch.equal(weight.detach(), before[n]) for n, weight in self._weights.items())
        longest = max(self._steps, key=len)
        return RecordedWindow(
            gradient=self._gradient(),
            has_stepped=bool(longest),
            has_clipped=watch.habits.num_clips > 0,
            steps=max(len(longest), 1),
            steps_alike=all(_are_equal(longest[0], later) for later in longest[1:]),
            idle=self._idle(),
            other_optimizer=self._other,
            has_changed_weights=has_changed,
            is_followed=True,
            habits=watch.habits,
            trace=watch.trace,
        )

    def _gradient(self) -> Gradient:
        """Each weight's gradient at the first step of its own optimizer; what is left behind where none has it."""
        taken = Gradient.of(self._model).by_name
        first_of_all = next((steps[0] for steps in self._steps if steps), None)
        if first_of_all is not None:
            taken |= first_of_all
        for optimizer, steps in zip(reversed(self._optimizers), reversed(self._steps), strict=True):
            if steps:
                own = _ids(optimizer)
                taken |= {n: value for n, value in steps[0].items() if id(self._weights[n]) in own}
        return Gradient(taken)

    def _idle(self) -> tuple[str, ...]:
        taken = next((steps[0] for steps in self._steps if steps), {})
        has_gradient = {id(self._weights[name]) for name, value in taken.items() if bool(value.any())}
        return tuple(
            f"{type(optimizer).__name__}, number {number} of {len(self._optimizers)}"
            for number, (optimizer, steps) in enumerate(zip(self._optimizers, self._steps, strict=True), 1)
            if not steps and _ids(optimizer) & has_gradient
        )

    def _step(self, index: int, optimizer: Any) -> None:
        scale = getattr(optimizer, "grad_scale", None)
        if float(getattr(optimizer, "found_inf", None) or 0):
            return
        gradient = Gradient.of(self._model)
        # A fused optimizer divides by the scale itself.
        self._steps[index].append((gradient if scale is None else gradient.times(1 / float(scale))).by_name)
        self._watch.steps(optimizer)

    @contextmanager
    def _steps_taken_aside(self) -> Iterator[None]:
        """Have `step` of each optimizer run its closure and take the gradient, and change nothing."""
        own = [vars(optimizer).get("step") for optimizer in self._optimizers]
        for index, optimizer in enumerate(self._optimizers):
            # A method: schedules look for the function behind it.
            optimizer.step = types.MethodType(self._substitute(index), optimizer)
        try:
            yield
        finally:
            for optimizer, step in zip(self._optimizers, own, strict=True):
                vars(optimizer).pop("step", None)
                if step is not None:
                    optimizer.step = step

    def _substitute(self, index: int) -> Callable[..., Any]:
        def step(optimizer: Any, closure: Any = None) -> Any:
            loss = None
            _call_hooks(optimizer, "_optimizer_step_pre_hooks")
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._step(index, optimizer)
            # They may zero gradients.
            _call_hooks(optimizer, "_optimizer_step_post_hooks")
            return loss

        return step

    def _really_steps(self, optimizer: Any) -> None:
        """End the loop before a step that would move the model's weights."""
        for index, mine in enumerate(self._optimizers):
            if optimizer is mine:
                self._step(index, optimizer)
                raise _StepReached
        if _ids(optimizer) & {id(weight) for weight in self._weights.values()}:
            self._other = type(optimizer).__name__
            raise _StepReached

    @contextmanager
    def _kept(self) -> Iterator[dict[str, torch.Tensor]]:
        weights = {name: weight.detach().clone() for name, weight in self._weights.items()}
        groups = [
            [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
            for optimizer in self._optimizers
        ]
        try:
            yield weights
        finally:
            with torch.no_grad():
                for name, weight in self._weights.items():
                    weight.copy_(weights[name])
            for optimizer, settings in zip(self._optimizers, groups, strict=True):
                for group, setting in zip(optimizer.param_groups, settings, strict=False):
                    group.update(setting)


def _call_hooks(optimizer: Any, name: str) -> None:
    # An optimizer that is none of torch's has no hooks.
    for hook in list(getattr(optimizer, name, {}).values()):
        hook(optimizer, (optimizer,), {})


def _ids(optimizer: Any) -> set[int]:
    return {id(weight) for weight in weights_held_by([optimizer])}


def _are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def plain_window(loss: Callable[..., torch.Tensor]) -> Callable[..., None]:
    """Return the loop that every tutorial shows: each loss divided by the count, added up, stepped."""

    def window(model: nn.Module, optimizer: Any, micro_batches: Sequence[Any]) -> None:
        optimizers = optimizer if isinstance(optimizer, tuple) else (optimizer,)
        for micro_batch in micro_batches:
            (checked_loss(loss(model, micro_batch)) / len(micro_batches)).backward()
        for stepped in optimizers:
            stepped.step()
        for stepped in optimizers:
            stepped.zero_grad()

    return window
