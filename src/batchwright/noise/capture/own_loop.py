"""The gradients of a loop that is the user's own: forward, backward as often as it likes, then optimizer.step().

Promises:
- the mean gradient is read at the end of the last backward, after ranks are synchronised and before anything is
  unscaled or clipped, so that neither changes the answer;
- every micro-batch is taken to weigh the same; how the loop scales its loss does not matter, as long as it does not
  change. Micro-batches of another size are noticed, and their window is left out;
- one micro-batch per step is looked at example by example, or, where some module is not known, cut in two by a second
  backward; which, and why, is said;
- `torch.autograd.backward` is replaced only while somebody listens, and is as it was after the last has left; a
  listener cannot fail the user's backward, and passes within a pass are not listened to.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from batchwright.accumulate.parallelism import check_data_parallel, find_parallelism
from batchwright.accumulate.weights import remove_all
from batchwright.device.batches import possible_sizes, tensors_in
from batchwright.noise.capture.example_norms import ExampleNorms, UnknownModuleError
from batchwright.noise.capture.example_uses import mixes_samples
from batchwright.noise.capture.half_batches import Halves
from batchwright.noise.capture.watched_windows import (
    DROPPED,
    IN_PIECES,
    OTHER_SIZES,
    SINGLE,
    UNEXPECTED,
    UNPAIRED,
    WindowSums,
)
from batchwright.noise.capture.weight_hooks import LeafSquares, WeakHook, Weights

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from batchwright.noise.noise_scale import NoiseScale

    Listener = Callable[[Any, Any], None]


# Hooks on weights come too late to cut a batch: the graph behind them is gone. So listeners are called before a
# backward begins, by a replacement of `torch.autograd.backward`.

_lock = threading.Lock()
_listeners: list[Listening] = []
_original: Callable[..., Any] = torch.autograd.backward
_within = threading.local()


class Listening:
    """A listener, until it is removed."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener

    def remove(self) -> None:
        """Listen no more."""
        with _lock:
            if self in _listeners:
                _listeners.remove(self)
            if not _listeners and torch.autograd.backward is _backward:
                torch.autograd.backward = _original


def listen(listener: Listener) -> Listening:
    """Call `listener(tensors, their gradients)` before every backward of this process."""
    global _original
    mine = Listening(listener)
    with _lock:
        _listeners.append(mine)
        if torch.autograd.backward is not _backward:
            _original = torch.autograd.backward
            functools.update_wrapper(_backward, _original)
            torch.autograd.backward = _backward
    return mine


def _backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
    if getattr(_within, "is_on", False):
        return _original(tensors, grad_tensors, *args, **kwargs)
    _within.is_on = True
    try:
        for listening in tuple(_listeners):
            listening.listener(tensors, grad_tensors)
        return _original(tensors, grad_tensors, *args, **kwargs)
    finally:
        _within.is_on = False


class OwnLoop:
    """Watches forward, backward and step of a loop through hooks, and hands on the squares of each window."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        micro_batch: int,
        batch_dim: int = 0,
        scaler: Any,
        every: int,
        sink: NoiseScale,
    ) -> None:
        self._batch_dim = batch_dim
        self._model, self._optimizers = model, list(optimizers)
        self._micro_batch, self._scaler, self._every = micro_batch, scaler, every
        # The sink holds this object, and must be free to go, and its hooks with it.
        self._sink: NoiseScale = weakref.proxy(sink)
        self._reason = ""
        check_data_parallel(model)
        self.parallelism = find_parallelism(model)
        self.leaves = LeafSquares(Weights.of(model, optimizers), self.parallelism, has_probes=True)
        self._on_first = WeakHook(self._backward_begins)
        self.num_windows = 0
        # The mean gradient is read from the backward on that was the last of the window before: most loops are even.
        self._num_before = 1
        self._sums: WindowSums | None = None
        self._of_mean: torch.Tensor | None = None
        self._num_forward = self._num_backward = 0
        self._examples = self._known_examples()
        self._halves = self._new_halves()
        self._is_by_example = False
        self._listening: Listening | None = None
        self._hooks_of_halves: list[Any] = []
        handles = [
            # One step of the first optimizer is one window; with a closure its last backwards are inside the step.
            self._optimizers[0].register_step_pre_hook(WeakHook(self._step_begins)),
            self._optimizers[0].register_step_post_hook(WeakHook(self._step_ended)),
        ]
        # A scripted module has no such hook: neither forwards nor the sizes of inputs are then seen.
        if not isinstance(model, torch.jit.ScriptModule):
            handles.append(model.register_forward_pre_hook(WeakHook(self._forward), with_kwargs=True))
        self.let_go = weakref.finalize(self, remove_all, handles)
        self._begin()

    def close(self) -> None:
        """Take every hook away."""
        self.leaves.let_go()
        self.let_go()
        self._look_at_parts(False)

    def _begin(self) -> None:
        self._of_mean = None
        self._num_forward = self._num_backward = 0
        self._sums = None
        is_measured = self.num_windows % self._every == 0
        if is_measured:
            weights = Weights.of(self._model, self._optimizers)
            if not weights.is_same_as(self.leaves.weights):
                self.leaves.let_go()
                self.leaves = LeafSquares(weights, self.parallelism, has_probes=True)
                self._look_at_parts(False)
                self._examples, self._halves = self._known_examples(), self._new_halves()
                self._sink.weights_changed(weights)
            self._sums = WindowSums(len(weights.names))
            self._wait()
        self._look_at_parts(is_measured and self._num_before * self.parallelism.size == 1)

    def _wait(self) -> None:
        """Be ready for the next backward, whenever it comes."""
        parts = self._examples if self._is_by_example else self._halves if self._listening else None
        self.leaves.start(on_first=self._on_first, of_examples=None if parts is None else parts.squares_of)

    def _backward_called(self, tensors: Any, gradients: Any) -> None:
        """Take half of the batch first, before the user's own backward."""
        if self._sums is None or self._halves is None or self._listening is None:
            return
        self.leaves.stop()
        is_taken = self._halves.take(tensors, gradients)
        if not is_taken and self._halves.failure:
            self._cannot_cut(self._halves.failure)
            self._sums.reason = self._sums.reason or SINGLE
        self._wait()

    def _forward(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        # Within a backward it is checkpointing that runs the model again.
        if self._sums is None or not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return
        if self._num_backward and not self.parallelism.is_sharded and not self._has_gradients():
            # They were thrown away without a step, as a scaler does that found an infinity.
            self._sink.skip(DROPPED)
            self._drop()
        self._num_forward += 1
        sizes = _sizes((*args, *kwargs.values()), self._batch_dim)
        if sizes and self._micro_batch not in sizes:
            self._sums.reason = self._sums.reason or OTHER_SIZES
        self._wait()

    def _backward_begins(self) -> None:
        # Callbacks that are queued now run before those of DDP and FSDP2; one that is queued by a callback, after.
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: engine.queue_callback(self._backward_ends))

    def _backward_ends(self) -> None:
        sums = self._sums
        if sums is None:
            return
        self._num_backward += 1
        if self.leaves.came_in_pieces:
            sums.reason = sums.reason or IN_PIECES
        scale = getattr(self._scaler, "_scale", None)
        sums.saw_scale(scale)
        factor = 1.0 if scale is None else scale
        sums.add_probe(self.leaves.probe())
        is_in_parts = self._is_by_example or self._listening is not None
        squares = self.leaves.squares_of_examples() if is_in_parts else None
        if squares is not None:
            sums.add_examples(squares, self._micro_batch, self._micro_batch, factor)
        elif self._is_by_example and self._examples is not None:
            sums.reason = sums.reason or SINGLE
            self._cannot_tell(self._examples.failure or "a weight has a gradient from outside of its module")
        elif is_in_parts:
            sums.reason = sums.reason or SINGLE
            if self._halves is not None and self._halves.failure:
                self._cannot_cut(self._halves.failure)
        else:
            sums.add(self.leaves.squares(), self._micro_batch, self._micro_batch, factor)
        self._of_mean = None
        if self._num_backward >= self._num_before:
            self._of_mean = self.leaves.squares_of_gradients() / (factor * factor)
            sums.final_probe = self.leaves.probe_of_gradients()
        self._wait()

    def _step_begins(self, _: Any, args: Any, kwargs: Any) -> None:
        if not _has_closure(args, kwargs):
            self._end_window()

    def _step_ended(self, _: Any, args: Any, kwargs: Any) -> None:
        if _has_closure(args, kwargs):
            self._end_window()

    def _end_window(self) -> None:
        sums, number = self._sums, self._num_backward
        if sums is not None and number:
            # Two towers are two forwards; more backwards than forwards are passes within a pass.
            if self._num_forward % number:
                sums.reason = sums.reason or UNPAIRED
            if self._of_mean is None:
                sums.reason = sums.reason or UNEXPECTED
            # What the loop steps with is taken for the mean over its micro-batches, so each is so many times larger.
            sums.multiply(number * number)
            of_mean = torch.zeros(len(self.leaves.weights.names)) if self._of_mean is None else self._of_mean
            rows = self.parallelism.gather(sums.for_ranks(of_mean).pack())
            self._num_before = number
            self._sink.learn(rows, 1.0, self.num_windows + 1)
        self.leaves.stop()
        if self._halves is not None:
            self._halves.computed_weights.clear()
        self.num_windows += 1
        self._begin()

    def _has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self.leaves.weights.parameters)

    def _drop(self) -> None:
        assert self._sums is not None
        self._sums = WindowSums(len(self.leaves.weights.names))
        self._num_forward = self._num_backward = 0
        self._of_mean = None

    def _known_examples(self) -> ExampleNorms | None:
        if self.parallelism.size > 1:
            return None
        if self._batch_dim:
            self._reason = f"samples lie along dimension {self._batch_dim}"
            return None
        try:
            examples = ExampleNorms(self._model, self.leaves.weights.parameters)
            weakref.finalize(self, examples.stop)
            return examples
        except UnknownModuleError as error:
            self._reason = error.reason
            return None

    def _new_halves(self) -> Halves | None:
        if self.parallelism.size > 1 or self.parallelism.is_sharded or any(map(mixes_samples, self._model.modules())):
            return None
        parameters = self.leaves.weights.parameters
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        return Halves(
            parameters,
            [names.get(id(weight), f"a weight of shape {tuple(weight.shape)}") for weight in parameters],
            samples=self._micro_batch,
            batch_dim=self._batch_dim,
        )

    def _cannot_tell(self, reason: str) -> None:
        self._look_at_parts(False)
        self._examples, self._reason = None, reason

    def _cannot_cut(self, reason: str) -> None:
        self._look_at_parts(False)
        self._halves, self._reason = None, reason
        # In the first window nothing tells yet that there will not be a second backward, which needs no parts.
        if self.num_windows:
            self._sink.note(_NO_PARTS.format(reason=reason))

    def _look_at_parts(self, wanted: bool) -> None:
        """Tell the examples of a micro-batch apart, or its halves, or neither."""
        by_example = wanted and self._examples is not None
        by_halves = wanted and not by_example and self._halves is not None
        if wanted and not by_example and self.num_windows:
            self._sink.note((_IN_HALVES if by_halves else _NO_PARTS).format(reason=self._reason))
        if self._examples is not None and self._is_by_example != by_example:
            self._examples.start() if by_example else self._examples.stop()
        self._is_by_example = by_example
        if by_halves and self._listening is None:
            assert self._halves is not None
            self._listening = listen(WeakHook(self._backward_called))
            self._hooks_of_halves = self._halves.follow_parametrizations(self._model)
            weakref.finalize(self, remove_all, [self._listening, *self._hooks_of_halves])
        elif not by_halves and self._listening is not None:
            remove_all([self._listening, *self._hooks_of_halves])
            self._listening = None
        if self._sums is not None:
            self._wait()


def _sizes(given: tuple[Any, ...], batch_dim: int) -> set[int]:
    """The numbers of samples that some inputs may have."""
    if batch_dim:
        return {tensor.shape[batch_dim] for tensor in tensors_in(given) if tensor.dim() > batch_dim}
    return set(possible_sizes(given))


def _has_closure(args: Any, kwargs: Any) -> bool:
    # The first argument is the optimizer itself.
    return (args[1] if len(args) > 1 else kwargs.get("closure")) is not None


_IN_HALVES = (
    "one micro-batch per step, and its examples cannot be told apart ({reason}): a second backward of half of the "
    "samples is taken in every step that is measured; every=10 takes it in one of ten"
)
_NO_PARTS = (
    "one micro-batch per step on one rank, and neither its examples nor its halves can be told apart ({reason}): "
    "accumulate two or more micro-batches, or hand NoiseScale an Accumulator, which cuts the batch in two"
)
