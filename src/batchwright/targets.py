"""Load a workload from the user's own file or module.

Promises:
- a target is `path.py:function` or `module:function`;
- one that is malformed, or whose file or module is not there, is refused before anything is imported;
- an error raised by the user's file keeps its traceback.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from batchwright.errors import InvalidInputError
from batchwright.units import shortened
from batchwright.users_code import is_installed_or_ours
from batchwright.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def load_workload(target: str) -> Workload:
    """Load a workload from `path.py:function` or `module:function`.

    >>> load_workload("train.py")
    Traceback (most recent call last):
    ...
    batchwright.errors.InvalidInputError: a target is written path.py:function or module:function; received 'train.py'.
      try: train.py:workload
    """
    place, function = find_target(target)
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    made = getattr(module, function, None)
    if made is None:
        public = sorted(name for name in vars(module) if not name.startswith("_"))
        candidates = [name for name in public if _can_be_a_target(vars(module)[name], module)]
        near = ", ".join(candidates[:6]) or "none that takes no arguments"
        raise InvalidInputError(f"'{place}' has no function '{function}'; it has: {near}.")
    workload = _called(made, target) if callable(made) and not isinstance(made, Workload) else made
    if not isinstance(workload, Workload):
        raise InvalidInputError(f"{target} returned {shortened(workload)}; a batchwright.Workload is expected.")
    return workload if workload.name != "workload" else replace(workload, name=target)


def find_target(target: str) -> tuple[str, str]:
    """Return the file or module that a target names, which is there, and the function; imports nothing.

    >>> find_target("json:loads")
    ('json', 'loads')
    """
    place, colon, function = target.rpartition(":")
    if not colon or not place or not function.isidentifier():
        remedy = f"{target}:workload" if target and ":" not in target else "train.py:workload"
        raise InvalidInputError(
            f"a target is written path.py:function or module:function; received {shortened(target)}.", remedy=remedy
        )
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise InvalidInputError(f"no file at '{place}'.")
        return place, function
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    # Only the package can be looked for: to look inside of it is to import it.
    package, *inner = place.split(".")
    if not all((package, *inner)) or (package not in sys.modules and importlib.util.find_spec(package) is None):
        raise _no_module(place)
    return place, function


def _can_be_a_target(value: object, module: ModuleType) -> bool:
    """Whether this is a workload, or a function of the user's that can be called without arguments."""
    if isinstance(value, Workload):
        return True
    # A cached function is an object around one. Looked up without running a line of the user's.
    function = inspect.getattr_static(value, "__wrapped__", value)
    if not inspect.isfunction(function):
        return False
    # An installed module may be the place itself; what a module has imported from others is not meant.
    if function.__module__ != module.__name__ and is_installed_or_ours(function.__code__.co_filename):
        return False
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    return True


def _called(function: Callable[[], object], target: str) -> object:
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise InvalidInputError(
            f"{target} cannot be called without arguments: {error}.",
            remedy="def workload() -> bw.Workload: ..., which takes none",
        ) from None
    except ValueError:
        pass  # some builtins have no signature
    return function()


def _load_file(path: Path) -> ModuleType:
    name = (
        path.stem
        if path.stem.isidentifier() and path.stem not in sys.modules
        else f"batchwright_target_{abs(hash(path))}"
    )
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a file that ends in .py always has a loader"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # As `python path.py` would have it: its neighbours import, and dataclasses and pickles find it by name.
    sys.modules[name] = module
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A package that the module itself imports and that is not installed is the user's own error.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise _no_module(name) from None


def _no_module(name: str) -> InvalidInputError:
    return InvalidInputError(f"no module '{name}'; a file is written with its ending, such as train.py:workload.")
