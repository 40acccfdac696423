"""Watches a program from the inside: steps, backwards, forwards, loaders and options, by hooks that change nothing.

Promises:
- a run is cut after so many windows: steps of every optimizer that steps; zeroed gradients, if weights are updated by
  hand; forwards and calls of `generate`, if the program makes no optimizer and computes without gradients;
- forwards are those of top-level modules: what a module or `generate` calls inside is not counted;
- the program is ended by `finish`, from within the hook: frameworks catch every exception.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_iter
from torch.utils.data import DataLoader

from batchwright.scripts.script_run import ScriptRun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# A program that updates its weights by hand zeroes gradients once before its first window.
_WINDOWS_BEFORE_ZEROED = 1
_MOST_SHAPES = 512
_MOST_OPTIONS = 64


class Watch:
    """What a program does, as far as hooks see it."""

    def __init__(self, num_windows: int) -> None:
        self._wanted = num_windows
        self._start = time.perf_counter()
        self._steps: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._num_backwards, self._backwards_at, self._seconds_at = 0, [0], [self._start]
        self._is_in_backward = False
        self._zeroed_at: list[int] = []
        self._shapes: list[tuple[int, ...]] = []
        self._num_forwards, self._num_evaluated, self._depth = 0, 0, 0
        self._has_optimizer = False
        self._loaders: list[int] = []
        self._options: dict[str, int] = {}
        self.notes: dict[str, None] = {}
        self.num_made_up = 0
        self.enter_phase: Callable[[str], object] = lambda _: None
        self.finish: Callable[[], object] = lambda: None

    @property
    def num_steps(self) -> int:
        """Steps of the optimizer that made the fewest, of those that made any."""
        return min(self._steps.values(), default=0)

    def report(self) -> ScriptRun:
        """Return what was seen so far."""
        if self._steps:
            windows, count, ends = "optimizer steps", self.num_steps, self._backwards_at
        elif self._zeroed_at:
            windows, count, ends = "zeroed gradients", len(self._zeroed_at), [0, *self._zeroed_at]
        else:
            windows, count, ends = "forwards", self._num_evaluated, [0]
        return ScriptRun(
            windows=windows,
            num_windows=count,
            optimizers=tuple(sorted(set(self._names.values()))),
            backwards_per_window=tuple(after - before for before, after in pairwise(ends)),
            input_shapes=tuple(self._shapes),
            loader_batch_sizes=tuple(self._loaders),
            options=dict(self._options),
            window_seconds=tuple(b - a for a, b in pairwise(self._seconds_at)),
            seconds=time.perf_counter() - self._start,
            made_up_reads=self.num_made_up,
            notes=tuple(self.notes),
        )

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

    def _about_to_step(self, *_: Any) -> None:
        self.enter_phase("optimizer")

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        key = id(optimizer)
        self._steps[key] = self._steps.get(key, 0) + 1
        self._names[key] = type(optimizer).__name__
        self._backwards_at.append(self._num_backwards)
        self._seconds_at.append(time.perf_counter())
        self.enter_phase("batch")
        if self.num_steps >= self._wanted:
            self.finish()

    @contextmanager
    def _call(self, values: Any, *, is_evaluation: bool) -> Iterator[None]:
        """Look on while the program calls a model, or has one generate."""
        self._depth += 1
        if self._depth == 1:
            self.enter_phase("forward")
            self._num_forwards += 1
            shape = next((tuple(leaf.shape) for leaf in tree_iter(values) if _has_samples(leaf)), None)
            if shape is not None and len(self._shapes) < _MOST_SHAPES:
                self._shapes.append(shape)
        try:
            yield
        finally:
            self._depth -= 1
        if self._depth == 0 and is_evaluation and not (self._has_optimizer or self._num_backwards):
            self._num_evaluated += 1
            self._seconds_at.append(time.perf_counter())
            if self._num_evaluated >= self._wanted:
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
        backward, zero_grad = torch.autograd.backward, nn.Module.zero_grad
        parse, make_loader = argparse.ArgumentParser.parse_known_args, DataLoader.__init__
        call: Any = nn.Module.__call__
        make_optimizer = torch.optim.Optimizer.__init__

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._depth or next(module.parameters(), None) is None:
                return call(module, *args, **kwargs)
            with self._call((args, kwargs), is_evaluation=not torch.is_grad_enabled()):
                return call(module, *args, **kwargs)

        def create(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self._has_optimizer = True
            make_optimizer(optimizer, *args, **kwargs)

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

        def zeroed(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            self._zeroed()
            zero_grad(module, *args, **kwargs)

        def parsed(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
            space, rest = parse(parser, *args, **kwargs)
            self._note_options(parser, space)
            return space, rest

        def built(loader: Any, *args: Any, **kwargs: Any) -> None:
            make_loader(loader, *args, **kwargs)
            if isinstance(loader.batch_size, int) and len(self._loaders) < _MOST_OPTIONS:
                self._loaders.append(loader.batch_size)

        # Not by hooks: a module under hooks leaves fast paths, and global ones do not see named arguments.
        yield nn.Module, "__call__", called
        yield torch.optim.Optimizer, "__init__", create
        yield from self._generating()
        yield torch.autograd, "backward", counted
        yield nn.Module, "zero_grad", zeroed
        yield argparse.ArgumentParser, "parse_known_args", parsed
        yield DataLoader, "__init__", built

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

    def _note_options(self, parser: argparse.ArgumentParser, space: Any) -> None:
        for action in parser._actions:
            value = getattr(space, action.dest, None)
            if not isinstance(value, int) or isinstance(value, bool) or len(self._options) >= _MOST_OPTIONS:
                continue
            if _is_about_batches(action.dest):
                longest = max(action.option_strings, key=len, default=action.dest)
                self._options[longest] = value


def _has_samples(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _is_about_batches(name: str) -> bool:
    """Whether an option's name has to do with a batch size.

    >>> [_is_about_batches(name) for name in ("batch_size", "per_device_train_batch_size", "train_bs", "n_layer")]
    [True, True, True, False]
    """
    words = name.lower().replace("-", "_").replace(".", "_").split("_")
    return "batch" in name.lower() or bool({"bs", "bsz", "mbs"} & set(words))
