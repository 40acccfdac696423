"""What an audit overrides while it looks: clipping, autocast, dropout, batch statistics; and what it listens to.

Promises:
- everything is put back, whatever happens;
- clipping is off wherever its functions were imported to: torch's own code is exchanged; our Accumulator is told too;
- clips, scalers and schedules are heard in the thread that audits alone: another one that trains clips as ever.
"""

from __future__ import annotations

import functools
import math
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from batchwright.accumulate.boundary import CLIP_LISTENER

_CALLED = "_batchwright_clip"


class _Clipping:
    """Stands where torch clips: returns the norm, changes nothing, and calls the listener."""

    def __init__(self, originals: Sequence[Callable[..., Any]], listener: Callable[[list[Any]], None]) -> None:
        self._originals = originals
        self._thread = threading.get_ident()
        self._listener = listener

    def __call__(self, which: int, parameters: Any, limit: float, *rest: Any) -> Any:
        held = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if threading.get_ident() != self._thread:
            return self._originals[which](held, limit, *rest)
        # With no limit it is only asked for the norm.
        if math.isfinite(float(limit)):
            self._listener(held)
        if which != 0:
            return None
        gradients = [p.grad.coalesce().values() if p.grad.is_sparse else p.grad for p in held if p.grad is not None]
        return clip_grad._get_total_norm(gradients, *rest)


@contextmanager
def without_clipping(listener: Callable[[list[Any]], None]) -> Iterator[None]:
    """Have torch's functions that clip do nothing but return the norm; the listener gets the weights of each call."""
    functions = [
        _innermost(f) for f in (clip_grad.clip_grad_norm_, clip_grad.clip_grad_value_, clip_grad._clip_grads_with_norm_)
    ]
    codes = [function.__code__ for function in functions]
    originals = [
        types.FunctionType(code, f.__globals__, f.__name__, f.__defaults__)
        for f, code in zip(functions, codes, strict=True)
    ]
    outer = clip_grad.__dict__.get(_CALLED)
    setattr(clip_grad, _CALLED, _Clipping(originals, listener))
    token = CLIP_LISTENER.set(listener)
    try:
        for function, substitute in zip(functions, (_norm_only, _no_value, _no_norm), strict=True):
            function.__code__ = substitute.__code__
        yield
    finally:
        for function, code in zip(functions, codes, strict=True):
            function.__code__ = code
        if outer is None:
            delattr(clip_grad, _CALLED)
        else:
            setattr(clip_grad, _CALLED, outer)
        CLIP_LISTENER.reset(token)


@contextmanager
def listen_to_steps(
    unscales: Callable[[Any, Any], None], schedules: Callable[[Any], None], other_steps: Callable[[Any], None]
) -> Iterator[None]:
    """Call a listener before every `GradScaler.unscale_`, step of a schedule and real step of an optimizer here.

    The first is handed the scaler and the optimizer.
    """
    thread = threading.get_ident()

    def before_step(optimizer: Any, *_: Any) -> None:
        if threading.get_ident() == thread:
            other_steps(optimizer)

    with ExitStack() as stack:
        stack.enter_context(_preceded(torch.amp.GradScaler, "unscale_", unscales, thread))
        for kind in _all_kinds(lr_scheduler.LRScheduler):
            if "step" in vars(kind):
                stack.enter_context(_preceded(kind, "step", schedules, thread))
        handle = register_optimizer_step_pre_hook(before_step)
        stack.callback(handle.remove)
        yield


@contextmanager
def without_autocast() -> Iterator[list[str]]:
    """Have `torch.autocast` change nothing, also one that was made before; hands out what would have been used."""
    used: list[str] = []
    enter: Any = torch.autocast.__enter__

    def stay_wide(self: Any) -> Any:
        if self._enabled:
            used.append(str(self.fast_dtype))
            self._enabled = False
            try:
                return enter(self)
            finally:
                self._enabled = True
        return enter(self)

    torch.autocast.__enter__ = stay_wide  # type: ignore[method-assign]
    try:
        yield used
    finally:
        torch.autocast.__enter__ = enter  # type: ignore[method-assign]


@contextmanager
def frozen_statistics(model: nn.Module) -> Iterator[None]:
    """Have batch normalization use its running statistics, whatever mode the model is put in.

    >>> layer = nn.BatchNorm1d(2)
    >>> with frozen_statistics(layer):
    ...     print(layer.train().training)
    False
    >>> layer.training
    True
    """
    frozen = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]
    for module in frozen:
        module.eval()
        # model.train() goes through all modules and calls this on each.
        vars(module)["train"] = lambda mode=True, module=module: module
    try:
        yield
    finally:
        for module in frozen:
            del vars(module)["train"]
            module.train()


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[list[str]]:
    """Set every rate of dropout to 0 without leaving training mode; hands out the names of what was set.

    >>> layer = torch.nn.Dropout(0.5)
    >>> with without_dropout(layer) as names:
    ...     print(names, layer(torch.ones(2)))
    ['p'] tensor([1., 1.])
    >>> layer.p
    0.5
    """
    rates = []
    for path, module in model.named_modules():
        is_dropout = "dropout" in type(module).__name__.lower() or "droppath" in type(module).__name__.lower()
        for name, value in vars(module).items():
            if isinstance(value, float) and 0 < value <= 1 and ("drop" in name.lower() or (is_dropout and name == "p")):
                rates.append((module, f"{path}.{name}".lstrip("."), name, value))
    for module, _, name, _ in rates:
        setattr(module, name, 0.0)
    try:
        yield [shown for _, shown, _, _ in rates]
    finally:
        for module, _, name, value in rates:
            setattr(module, name, value)


@contextmanager
def _preceded(kind: type, name: str, listener: Callable[..., None], thread: int) -> Iterator[None]:
    original = vars(kind)[name]

    @functools.wraps(original)
    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        if threading.get_ident() == thread:
            listener(self, *arguments[:1]) if name == "unscale_" else listener(self)
        return original(self, *arguments, **options)

    setattr(kind, name, method)
    try:
        yield
    finally:
        setattr(kind, name, original)


def _all_kinds(kind: type) -> list[type]:
    children: list[type] = kind.__subclasses__()
    return [kind, *(below for child in children for below in _all_kinds(child))]


def _innermost(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


# These run with the names of torch.nn.utils.clip_grad around them, not with ours, and have torch's own arguments.
def _norm_only(parameters, max_norm, norm_type=2.0, error_if_nonfinite=False, foreach=None):  # type: ignore[no-untyped-def]
    return _batchwright_clip(0, parameters, max_norm, norm_type, error_if_nonfinite, foreach)  # type: ignore[name-defined]  # noqa: F821


def _no_value(parameters, clip_value, foreach=None):  # type: ignore[no-untyped-def]
    return _batchwright_clip(1, parameters, clip_value, foreach)  # type: ignore[name-defined]  # noqa: F821


def _no_norm(parameters, max_norm, total_norm, foreach=None):  # type: ignore[no-untyped-def]
    return _batchwright_clip(2, parameters, max_norm, total_norm, foreach)  # type: ignore[name-defined]  # noqa: F821
