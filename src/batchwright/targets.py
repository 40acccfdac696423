"""Load a workload from the user's own file or module.

Promises:
- a target is `path.py:function` or `module:function`, with arguments of its own behind ` -- `;
- one that is malformed, or whose file or module is not there, is refused before anything is imported;
- while it loads, `sys.argv` is the target's: its argparse reads its own arguments, never batchwright's;
- an error raised by the user's file keeps its traceback.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import shlex
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, TracebackType

from batchwright.errors import InvalidInputError
from batchwright.units import shortened
from batchwright.workload import Workload


def is_from_users_code(error: BaseException) -> bool:
    """Whether the error passed through a file that is neither ours nor an installed package's."""
    # A file that does not parse has no frame of its own.
    return users_traceback(error) is not None or (
        isinstance(error, SyntaxError) and not is_installed_or_ours(error.filename)
    )


def users_traceback(error: BaseException) -> TracebackType | None:
    """Return the traceback from the user's first line on: what we did before it helps nobody."""
    frame = error.__traceback__.tb_next if error.__traceback__ is not None else None
    while frame is not None and is_installed_or_ours(frame.tb_frame.f_code.co_filename):
        frame = frame.tb_next
    return frame


def users_traceback_text(error: BaseException) -> str:
    """Return the error as Python prints it, from the user's first line on; whole where no line is the user's."""
    trace = users_traceback(error)
    if trace is None and not isinstance(error, SyntaxError):
        trace = error.__traceback__
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()


def is_installed_or_ours(filename: str | None) -> bool:
    """Whether a file is Python's, an installed package's, ours, or none at all; so not the user's."""
    paths = sysconfig.get_paths()
    known = (str(Path(__file__).parent), paths["purelib"], paths["platlib"], paths["stdlib"], "<")
    return filename is None or filename.startswith(known)


@dataclass(frozen=True)
class Target:
    """Where a workload is made: a file or module, a function in it, and the arguments the file reads."""

    place: str
    function: str
    arguments: tuple[str, ...] = ()

    @staticmethod
    def read(text: str) -> Target:
        """Read what a person typed; nothing is imported, nothing has to exist.

        >>> Target.read("train.py:workload -- --layers 4")
        Target(place='train.py', function='workload', arguments=('--layers', '4'))
        """
        # A target without arguments may end in the bare separator, as a command line may.
        name, separator, arguments = f"{text} ".partition(" -- ")
        name = name.strip() if separator else text
        place, colon, function = name.rpartition(":")
        if not colon or not place or not function.isidentifier():
            remedy = f"{name}:workload" if name and ":" not in name else "train.py:workload"
            raise InvalidInputError(
                f"a target is written path.py:function or module:function; received {shortened(name)}.", remedy=remedy
            )
        try:
            return Target(place, function, tuple(shlex.split(arguments)))
        except ValueError as error:
            raise InvalidInputError(f"the target's arguments cannot be read ({error}): {shortened(text)}.") from None

    @property
    def name(self) -> str:
        """The target without its arguments."""
        return f"{self.place}:{self.function}"

    @property
    def argv(self) -> list[str]:
        """What `sys.argv` is to the target's own code."""
        return [self.place, *self.arguments]

    def __str__(self) -> str:
        return f"{self.name} -- {shlex.join(self.arguments)}" if self.arguments else self.name


@contextmanager
def own_arguments(target: Target) -> Iterator[None]:
    """Give the target's code its own `sys.argv`, for as long as this lasts."""
    before, sys.argv = sys.argv, target.argv
    try:
        yield
    finally:
        sys.argv = before


def load_workload(target: str) -> Workload:
    """Load a workload from `path.py:function` or `module:function`, with arguments behind ` -- ` if it reads any.

    >>> load_workload("train.py")
    Traceback (most recent call last):
    ...
    batchwright.errors.InvalidInputError: a target is written path.py:function or module:function; received 'train.py'.
      try: train.py:workload
    """
    named = find_target(target)
    place, function = named.place, named.function
    with own_arguments(named):
        module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
        factory = getattr(module, function, None)
        if factory is None:
            public = sorted(name for name in vars(module) if not name.startswith("_"))
            candidates = [name for name in public if _can_be_a_target(vars(module)[name], module)]
            near = ", ".join(candidates[:6]) or "none that takes no arguments"
            raise InvalidInputError(f"'{place}' has no function '{function}'; it has: {near}.")
        workload = _called(factory, named.name) if callable(factory) and not isinstance(factory, Workload) else factory
    if not isinstance(workload, Workload):
        raise InvalidInputError(f"{named.name} returned {shortened(workload)}; a batchwright.Workload is expected.")
    return workload if workload.name != "workload" else replace(workload, name=str(named))


def find_target(text: str) -> Target:
    """Return the target, whose file or package is there; imports nothing.

    >>> find_target("json:loads")
    Target(place='json', function='loads', arguments=())
    """
    target = Target.read(text)
    place = target.place
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise InvalidInputError(f"no file at '{place}'.")
        return target
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    # Only the package can be looked for: to look inside of it is to import it.
    package, *inner = place.split(".")
    if not all((package, *inner)) or (package not in sys.modules and importlib.util.find_spec(package) is None):
        raise _no_module(place)
    return target


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
