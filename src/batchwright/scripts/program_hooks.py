"""Watches a program from the inside: steps, backwards, forwards, loaders and options, by hooks that change nothing.

Promises:
- a run is cut after so many windows: steps of every optimizer that steps, one that begins a few steps after the others
  (a generator, an actor) included; zeroed gradients, if weights are updated by hand; forwards and calls of `generate`,
  if the program makes no optimizer and computes without gradients;
- the last window has a batch as large as any before: a pass that ends in what is left of the data is not the last;
- forwards are those of top-level modules: what a module, `generate` or a backward calls inside is not counted;
- the program is ended by `finish`, from within the hook: frameworks catch every exception.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import islice, pairwise
from multiprocessing.process import BaseProcess
from typing import Any, Protocol
from unittest.mock import patch

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_iter
from torch.utils.data import DataLoader
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from batchwright.scripts.longest_batches import LongestBatches
from batchwright.scripts.option_parsers import seeing_options
from batchwright.scripts.script_run import ScriptRun
from batchwright.units import counted

# A program that updates its weights by hand zeroes gradients once before its first window.
_WINDOWS_BEFORE_ZEROED = 1
# So many steps more are waited for an optimizer that has not stepped: a critic is often ahead by five, as of WGAN.
_STEPS_AHEAD = 4
# So many steps more are waited for a whole batch, if the last one was what was left of the data.
_STEPS_FOR_A_WHOLE_BATCH = 2
# On a simulated card the last window of many micro-batches is cut after so many: the others are like them.
_ENOUGH_MICRO_BATCHES = 3
_PARTS_OF_A_MODEL = 4
_MOST_SHAPES = 512
_MOST_OPTIONS = 64


class Measure(Protocol):
    """What else is measured while a program trains."""

    def seed(self) -> None:
        """Prepare the process, before the program begins."""

    def forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A top-level module is about to be called with gradients."""

    def about_to_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""

    def stepped(self, optimizer: torch.optim.Optimizer, run: ScriptRun) -> None:
        """An optimizer has stepped; `run` is what was seen so far."""

    def result(self) -> dict[str, Any]:
        """Return plain data and tensors."""


class Watch:
    """What a program does, as far as hooks see it."""

    def __init__(
        self,
        num_windows: int,
        measure: Measure | None = None,
        loader_sizes: tuple[int, int] | None = None,
        *,
        expects_training: bool = False,
    ) -> None:
        self._wanted = num_windows
        # Then what it evaluates before it makes an optimizer does not end it.
        self._expects_training = expects_training
        self._loader_sizes = loader_sizes
        self._measure = measure
        self._start = time.perf_counter()
        self._steps: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._num_backwards, self._backwards_at, self._seconds_at = 0, [0], [self._start]
        self._is_in_backward = False
        self._zeroed_at: list[int] = []
        # Of forwards with gradients, and of those without: a training's samples are not those it evaluates.
        self._shapes: list[tuple[int, ...]] = []
        self._evaluated_shapes: list[tuple[int, ...]] = []
        self._num_forwards, self._num_evaluated, self._depth = 0, 0, 0
        # Samples in the largest batch: of all, and since the last step.
        self._largest_batch, self._largest_of_window = 0, 0
        self._has_optimizer = False
        self._made: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        # By loader: the size of its batches, and which data they are from.
        self._loaders: dict[int, tuple[int, int]] = {}
        self._begun: set[int] = set()
        self._options: dict[str, int] = {}
        self._num_trained = 0
        self._learning_rate: float | None = None
        self._num_samples: int | None = None
        self._trained_loader: tuple[int, int] | None = None
        self.notes: dict[str, None] = {}
        self.num_made_up, self.is_replayed = 0, False
        # Whether a window that repeats the one before it is cut short: where it shows nothing new.
        self.cuts_repeats = False
        self.enter_phase: Callable[[str], object] = lambda _: None
        self.finish: Callable[[], object] = lambda: None
        self.longest: LongestBatches | None = None
        self.saw_model: Callable[[nn.Module], object] = lambda _: None
        self.saw_optimizer: Callable[[torch.optim.Optimizer], object] = lambda _: None
        self.parts: Callable[[], tuple[dict[str, int], dict[str, int]]] = lambda: ({}, {})
        self.run_forward: Callable[..., Any] = lambda call, module, args, kwargs: call(module, *args, **kwargs)

    @property
    def num_steps(self) -> int:
        """Steps of the optimizer that made the fewest, of those that made any."""
        return min(self._steps.values(), default=0)

    @property
    def updates_per_step(self) -> int:
        """Updates by all optimizers for one of that optimizer: two where a generator and a discriminator take turns."""
        return sum(self._steps.values()) // max(self.num_steps, 1) or 1

    def report(self) -> ScriptRun:
        """Return what was seen so far."""
        if self._steps:
            windows, count, ends = "optimizer steps", self.num_steps, self._backwards_at
        elif self._zeroed_at:
            windows, count, ends = "zeroed gradients", len(self._zeroed_at), [0, *self._zeroed_at]
        else:
            windows, count, ends = "forwards", self._num_evaluated, [0]
        parts, phases = self.parts()
        return ScriptRun(
            parts=parts,
            phase_bytes=phases,
            windows=windows,
            num_windows=count,
            optimizers=tuple(sorted(set(self._names.values()))),
            backwards_per_window=tuple(after - before for before, after in pairwise(ends)),
            input_shapes=tuple(self._shapes or self._evaluated_shapes),
            loader_batch_sizes=tuple(size for size, _ in self._loaders.values()),
            num_trained=self._num_trained or None,
            learning_rate=self._learning_rate,
            num_samples=self._num_samples,
            trained_loader=self._trained_loader,
            options=dict(self._options),
            window_seconds=tuple(b - a for a, b in pairwise(self._seconds_at)),
            seconds=time.perf_counter() - self._start,
            made_up_reads=self.num_made_up,
            is_replayed=self.is_replayed,
            notes=(*self.notes, *self._not_reached()),
        )

    def _not_reached(self) -> list[str]:
        """Name the loaders that the program made and did not come to: an evaluation, most often."""
        data = {of for key, (_, of) in self._loaders.items() if key in self._begun}
        sizes = sorted({size for size, of in self._loaders.values() if of not in data})
        if not self._begun or not sizes:
            return []
        return [
            f"not probed: what the program does with its {counted(len(sizes), 'other loader')} "
            f"(batches of {', '.join(map(str, sizes))}), which it did not come to"
        ]

    @contextmanager
    def on(self) -> Iterator[Watch]:
        """Watch until this ends."""
        with ExitStack() as stack:
            for handle in (
                register_optimizer_step_pre_hook(self._about_to_step),
                register_optimizer_step_post_hook(self._stepped),
            ):
                stack.callback(handle.remove)
            for place, name, replacement in self._replacements():
                stack.enter_context(patch.object(place, name, replacement))
            yield self

    def _about_to_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._measure is not None:
            self._measure.about_to_step(optimizer)
        self.enter_phase("optimizer")

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        key = id(optimizer)
        self._steps[key] = self._steps.get(key, 0) + 1
        if key not in self._names:
            self._names[key] = type(optimizer).__name__
            self._look_at(optimizer)
            self.saw_optimizer(optimizer)
        self._backwards_at.append(self._num_backwards)
        self._seconds_at.append(time.perf_counter())
        self.enter_phase("batch")
        if self._measure is not None:
            self._measure.stepped(optimizer, self.report())
        batch, num_samples = self._trained_loader or (1, 0)
        has_begun_anew = len(self._shapes) > num_samples // batch > 0
        is_whole = self._largest_of_window >= self._largest_batch or not has_begun_anew
        self._largest_of_window = 0
        if not is_whole and self._measure is None and self.num_steps < self._wanted + _STEPS_FOR_A_WHOLE_BATCH:
            return
        if self.num_steps >= self._wanted and (
            max(self._steps.values()) >= self._wanted + _STEPS_AHEAD or not self._is_one_to_come()
        ):
            self.finish()

    def _cut_repeats(self) -> None:
        """End the last window if it has gone on like the one before: weights, states and gradients are all there."""
        if len(self._steps) != 1 or self.num_steps != self._wanted - 1 or self._is_one_to_come():
            return
        seen, whole = self._num_backwards - self._backwards_at[-1], self._backwards_at[-1] - self._backwards_at[-2]
        if whole > seen >= _ENOUGH_MICRO_BATCHES and self._largest_of_window >= self._largest_batch:
            text = f"the last optimizer step was cut after {seen} of its {whole} backwards: those before were like them"
            self.notes[text] = None
            self.finish()

    def _is_one_to_come(self) -> bool:
        """Whether an optimizer has not stepped yet whose weights no other one updates."""
        begun = [optimizer for optimizer in self._made if id(optimizer) in self._steps]
        updated = {id(weight) for optimizer in begun for weight in _weights(optimizer)}
        return any(
            updated.isdisjoint(map(id, _weights(optimizer))) for optimizer in self._made if optimizer not in begun
        )

    def _look_at(self, optimizer: torch.optim.Optimizer) -> None:
        count = sum(weight.numel() for weight in _weights(optimizer))
        if count > self._num_trained:
            rates = {group.get("initial_lr", group.get("lr")) for group in optimizer.param_groups}
            rate = rates.pop() if len(rates) == 1 else None
            self._num_trained, self._learning_rate = count, float(rate) if isinstance(rate, int | float) else None

    @contextmanager
    def _call(self, values: Any, *, is_evaluation: bool) -> Iterator[None]:
        """Look on while the program calls a model, or has one generate."""
        self._depth += 1
        if self._depth == 1:
            self.enter_phase("forward")
            self._num_forwards += 1
            shape = _shape_of(values)
            shapes = self._evaluated_shapes if is_evaluation else self._shapes
            if shape is not None:
                if len(shapes) == _MOST_SHAPES:
                    del shapes[
                        _MOST_SHAPES // 2
                    ]  # the first ones stay, and the last: a player acts long before it learns
                shapes.append(shape)
            if shape is not None and not is_evaluation:
                self._largest_batch = max(self._largest_batch, shape[0])
                self._largest_of_window = max(self._largest_of_window, shape[0])
        try:
            yield
        finally:
            self._depth -= 1
        if self._depth == 0 and is_evaluation and not (self._has_optimizer or self._num_backwards):
            self._num_evaluated += 1
            self._seconds_at.append(time.perf_counter())
            if self._num_evaluated >= self._wanted and not self._expects_training:
                self.finish()

    def _zeroed(self) -> None:
        """A window of a program that updates its weights by hand ends where gradients are zeroed."""
        if self._steps or not self._num_backwards or self._num_backwards in self._zeroed_at:
            return
        self._zeroed_at.append(self._num_backwards)
        self._seconds_at.append(time.perf_counter())
        if len(self._zeroed_at) > self._wanted + _WINDOWS_BEFORE_ZEROED:
            self.notes["no optimizer of torch stepped: windows end where gradients are zeroed"] = None
            self.finish()

    def _replacements(self) -> Iterator[tuple[Any, str, Any]]:
        backward, derive, zero_grad = torch.autograd.backward, torch.autograd.grad, nn.Module.zero_grad
        make_loader, iterate = DataLoader.__init__, DataLoader.__iter__
        call: Any = nn.Module.__call__
        make_optimizer = torch.optim.Optimizer.__init__

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._depth or self._is_in_backward or next(module.parameters(), None) is None:
                if self._depth != 1 or torch.is_grad_enabled() or self._is_in_backward or not _is_large(module):
                    return call(module, *args, **kwargs)
                self._depth += 1
                try:
                    return self.run_forward(call, module, args, kwargs)
                finally:
                    self._depth -= 1
            if torch.is_grad_enabled():
                self.saw_model(module)
                if self._measure is not None:
                    self._measure.forward(module, args, kwargs)
            with self._call((args, kwargs), is_evaluation=not torch.is_grad_enabled()):
                return self.run_forward(call, module, args, kwargs)

        def create(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self._has_optimizer = True
            make_optimizer(optimizer, *args, **kwargs)
            self._made.add(optimizer)

        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._is_in_backward:  # torch's own way through function modes, or a checkpoint's recomputation
                return backward(*args, **kwargs)
            self._num_backwards += 1
            self._is_in_backward = True
            self.enter_phase("backward")
            try:
                return backward(*args, **kwargs)
            finally:
                self._is_in_backward = False
                self.enter_phase("batch")
                if self.cuts_repeats and self._measure is None:
                    self._cut_repeats()

        def derived(*args: Any, **kwargs: Any) -> Any:
            was, self._is_in_backward = self._is_in_backward, True
            try:
                return derive(*args, **kwargs)
            finally:
                self._is_in_backward = was

        def zeroed(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            self._zeroed()
            zero_grad(module, *args, **kwargs)

        def built(loader: Any, *args: Any, **kwargs: Any) -> None:
            if self._loader_sizes is not None:
                typed, wanted = self._loader_sizes
                if len(args) > 1 and args[1] == typed:
                    args = (args[0], wanted, *args[2:])
                elif kwargs.get("batch_size") == typed:
                    kwargs["batch_size"] = wanted
            make_loader(loader, *args, **kwargs)
            if LongestBatches.is_own(loader):
                return
            self._begun.discard(id(loader))  # of one that is gone, at the same address
            if isinstance(loader.batch_size, int) and len(self._loaders) < _MOST_OPTIONS:
                self._loaders[id(loader)] = loader.batch_size, id(loader.dataset)
            if self._num_samples is None and hasattr(loader.dataset, "__len__"):
                self._num_samples = len(loader.dataset)

        def begun(loader: Any) -> Any:
            if LongestBatches.is_own(loader):
                return iterate(loader)
            self._begun.add(id(loader))
            self._note_few(loader)
            if not self._num_backwards:
                self._trained_loader = _batch_and_samples(loader)
            if self.longest is not None:
                self.longest.lead(loader)
            return iterate(loader)

        # Not by hooks: a module under hooks leaves fast paths, and global ones do not see named arguments.
        yield nn.Module, "__call__", called
        yield torch.optim.Optimizer, "__init__", create
        yield from self._generating()
        yield torch.autograd, "backward", counted
        yield torch.autograd, "grad", derived
        yield nn.Module, "zero_grad", zeroed
        yield BaseProcess, "start", self._noting_processes()
        if hasattr(os, "fork"):
            yield os, "fork", self._noting_forks(os.fork)
        yield from seeing_options(self._note_option)
        yield DataLoader, "__init__", built
        yield DataLoader, "__iter__", begun
        if self.longest is not None:
            fetch, longest = _MapDatasetFetcher.fetch, self.longest
            yield _MapDatasetFetcher, "fetch", lambda fetcher, indices: longest.fetch(fetch, fetcher, indices)

    def _note_few(self, loader: Any) -> None:
        size, data = loader.batch_size, loader.dataset
        if isinstance(size, int) and hasattr(data, "__len__") and len(data) < size:
            few = f"a loader has {counted(len(data), 'sample')}, fewer than its batch of {size:,}"
            self.notes[f"{few}: what was probed with it is no whole batch"] = None

    def _noting_processes(self) -> Callable[[Any], None]:
        start = BaseProcess.start

        def started(process: Any) -> None:
            target = getattr(process, "_target", None)
            if not getattr(target, "__module__", "").startswith("torch.utils.data"):
                self.notes["it started processes of its own, and what they do is not seen: run it as one process"] = (
                    None
                )
            start(process)

        return started

    def _noting_forks(self, fork: Callable[[], int]) -> Callable[[], int]:
        def forked() -> int:
            if not sys._getframe(1).f_globals.get("__name__", "").startswith("multiprocessing"):
                self.notes["it forked, and what goes on in the fork is not seen: run it as one process"] = None
            return fork()

        return forked

    def _generating(self) -> Iterator[tuple[Any, str, Any]]:
        """Count a call of transformers' `generate` as one forward, with all that its cache grows to."""
        mixin = getattr(sys.modules.get("transformers.generation.utils"), "GenerationMixin", None)
        if mixin is None:
            return
        generate = mixin.generate

        def generated(model: Any, *args: Any, **kwargs: Any) -> Any:
            with self._call((args, kwargs), is_evaluation=True):
                return generate(model, *args, **kwargs)

        yield mixin, "generate", generated

    def _note_option(self, name: str, value: int) -> None:
        if len(self._options) < _MOST_OPTIONS:
            self._options[name] = value


def _batch_and_samples(loader: Any) -> tuple[int, int] | None:
    """Return the size of a loader's batches and the samples that it draws in one pass, if both are known."""
    sampler: Any = getattr(loader, "sampler", None)
    if not isinstance(loader.batch_size, int) or not hasattr(sampler, "__len__"):
        return None
    try:
        return loader.batch_size, len(sampler)
    except TypeError:  # of a stream, whose sampler has no end
        return None


def _is_large(module: nn.Module) -> bool:
    """Whether a module inside of another may be a whole model, which a sampler calls a thousand times."""
    return sum(1 for _ in islice(module.modules(), _PARTS_OF_A_MODEL)) == _PARTS_OF_A_MODEL


def _weights(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def _shape_of(values: Any) -> tuple[int, ...] | None:
    """Return the shape of the first tensor that a model was called with; of a list of objects, how many they are.

    >>> import numpy
    >>> _shape_of(((numpy.zeros((8, 3)), 5), {}))  # some models make tensors of what they are given
    (8, 3)
    """
    leaves = list(_leaves(values))
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return tuple(map(int, leaf.shape))  # as numbers: while torch.jit traces a module, they are tensors
    for leaf in leaves:
        shape = getattr(leaf, "shape", None)
        if not isinstance(leaf, nn.Module) and isinstance(shape, tuple) and shape:
            return tuple(map(int, shape))
    for leaf in leaves:
        # A batch of graphs says how many it has: torch_geometric's in one word, dgl's in another.
        for name in ("num_graphs", "batch_size"):
            if not isinstance(leaf, nn.Module) and isinstance(count := getattr(leaf, name, None), int):
                return (count,)
    args, kwargs = values
    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, list | tuple) and value]
    return (len(lists[0]),) if lists else None


def _leaves(values: Any) -> Iterator[Any]:
    """Yield what was handed to a model, out of mappings that are no dict too, such as a tokenizer's."""
    for leaf in tree_iter(values):
        if isinstance(leaf, Mapping):
            yield from _leaves(dict(leaf))
        else:
            yield leaf
