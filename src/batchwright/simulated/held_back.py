"""Errors inside a backward pass on the simulated device, held back until the pass is over.

An error that Python raises from within torch's engine while tensors are on a device registered from Python ends the
process: on its way out torch asks that device for its type, in Python, with the error still pending. So the operator
that fails answers nothing, all further ones of the pass do the same, and the error is raised where the pass began.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class HeldBack:
    """The first error of a backward pass."""

    def __init__(self) -> None:
        self._depth = 0
        self._error: BaseException | None = None

    def run(self, work: Callable[[], Any]) -> Any:
        """Run an operator; within a backward pass an error of it is held back, and nothing runs after it."""
        if not self._depth:
            return work()
        if self._error is not None:
            return None
        try:
            return work()
        except BaseException as error:
            self._error = error
            return None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch every backward pass, and what torch calls in it to get back what it saved."""
        engine: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
        hooks: Any = torch.autograd.graph.saved_tensors_hooks

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                found = engine(*args, **kwargs)
            except BaseException:
                self._raise_held()
                raise
            finally:
                self._depth -= 1
            self._raise_held()
            return found

        def with_safe_unpacking(this: Any, pack_hook: Any, unpack_hook: Any) -> None:
            def unpack(packed: Any) -> Any:
                found = self.run(lambda: unpack_hook(packed))
                return torch.empty(0) if found is None else found

            plain_init(this, pack_hook, unpack)

        plain_init = hooks.__init__
        with ExitStack() as stack:
            stack.enter_context(patch.object(torch.autograd, "_engine_run_backward", run_backward))
            stack.enter_context(patch.object(hooks, "__init__", with_safe_unpacking))
            yield

    def _raise_held(self) -> None:
        error = self._error
        if error is not None and self._depth <= 1:
            self._error = None
            raise error
