"""What would hide a gradient from an audit is turned off for its time: clipping, and autocast.

Promises:
- it works wherever the functions were imported to: torch's own code is exchanged, and put back whatever happens;
- our own Accumulator listens to it as well.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grad

if TYPE_CHECKING:
    from collections.abc import Iterator

_MARK = "_batchwright_clipped"
_is_off = False


def clipping_is_off() -> bool:
    """Whether somebody looks at gradients before they are clipped; who asks was about to clip, which is noted."""
    if _is_off:
        clip_grad.__dict__[_MARK] = True
    return _is_off


@contextmanager
def without_clipping() -> Iterator[list[str]]:
    """Have torch's functions that clip do nothing but return the norm; the list handed out is filled at the end."""
    global _is_off
    clipped: list[str] = []
    functions = [
        (_innermost(clip_grad.clip_grad_norm_), _norm_only),
        (_innermost(clip_grad.clip_grad_value_), _nothing),
    ]
    before = [function.__code__ for function, _ in functions]
    was_off, _is_off = _is_off, True
    clip_grad.__dict__.pop(_MARK, None)
    for function, substitute in functions:
        function.__code__ = substitute.__code__
    try:
        yield clipped
    finally:
        for (function, _), code in zip(functions, before, strict=True):
            function.__code__ = code
        _is_off = was_off
        if clip_grad.__dict__.pop(_MARK, False):
            clipped.append("clipped")


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


def _innermost(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


# These two run with the names of torch.nn.utils.clip_grad around them, not with ours.
def _norm_only(parameters, max_norm, norm_type=2.0, error_if_nonfinite=False, foreach=None):  # type: ignore[no-untyped-def]
    globals()["_batchwright_clipped"] = True
    held = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    squares = [p.grad.detach().coalesce().values().square().sum() if p.grad.is_sparse else p.grad.detach().square().sum() for p in held if p.grad is not None]  # noqa: E501  # fmt: skip
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())


def _nothing(parameters, clip_value, foreach=None):  # type: ignore[no-untyped-def]
    globals()["_batchwright_clipped"] = True
