"""A hook that neither keeps its owner alive nor travels with a copy of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

if TYPE_CHECKING:
    from collections.abc import Callable


class WeakHook:
    """Calls a method as long as its object lives; pickled or copied it calls nothing.

    >>> import copy
    >>> class Counter:
    ...     number = 0
    ...     def count(self, *_):
    ...         self.number += 1
    >>> counter = Counter()
    >>> hook = WeakHook(counter.count)
    >>> hook(), copy.deepcopy(hook)(), counter.number
    (None, None, 1)
    """

    def __init__(self, method: Callable[..., Any] | None = None) -> None:
        self._method = None if method is None else WeakMethod(method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method, if there is one still."""
        method = None if self._method is None else self._method()
        return None if method is None else method(*args, **kwargs)

    def __reduce__(self) -> tuple[type[WeakHook], tuple[()]]:
        return WeakHook, ()
