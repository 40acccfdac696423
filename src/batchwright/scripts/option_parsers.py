"""The options that a program reads, by whatever parser: names as they are typed, with the whole numbers they have.

Promises:
- argparse and what is built on it (HfArgumentParser), jsonargparse, tyro, click, Hydra and absl are seen; one that is
  not installed costs nothing;
- a name is the one to type: `--data.batch_size`, `--per_device_train_batch_size`, or `train.batch_size=` for Hydra.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from batchwright.scripts.script_run import is_about_batches

if TYPE_CHECKING:
    Note = Callable[[str, Any], None]

_DEEPEST = 6


def seeing_options(note: Note) -> Iterator[tuple[Any, str, Any]]:
    """Yield what to replace, so that `note(name, value)` hears of every option that has to do with a batch."""

    def noting(name: str, value: Any) -> None:
        if isinstance(value, str) and value.isdecimal():
            value = int(value)  # a program may make a number of it itself
        if isinstance(value, int) and not isinstance(value, bool) and is_about_batches(name):
            note(name, value)

    yield from _argparse(noting)
    yield from _jsonargparse(noting)
    yield from _tyro(noting)
    yield from _click(noting)
    yield from _hydra(noting)
    yield from _absl(noting)


def _argparse(note: Note) -> Iterator[tuple[Any, str, Any]]:
    parse = argparse.ArgumentParser.parse_known_args

    def parsed(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        space, rest = parse(parser, *args, **kwargs)
        for action in parser._actions:
            note(max(action.option_strings, key=len, default=action.dest), getattr(space, action.dest, None))
        return space, rest

    yield argparse.ArgumentParser, "parse_known_args", parsed


def _jsonargparse(note: Note) -> Iterator[tuple[Any, str, Any]]:
    kind: Any = getattr(sys.modules.get("jsonargparse"), "ArgumentParser", None)
    if kind is None:
        return
    parse = kind.parse_args

    def parsed(parser: Any, *args: Any, **kwargs: Any) -> Any:
        space = parse(parser, *args, **kwargs)
        for name, value in _flat(space.as_dict()):
            note(f"--{name}", value)
        return space

    yield kind, "parse_args", parsed


def _tyro(note: Note) -> Iterator[tuple[Any, str, Any]]:
    tyro: Any = sys.modules.get("tyro")
    if tyro is None:
        return
    read = tyro.cli

    def called(*args: Any, **kwargs: Any) -> Any:
        values = read(*args, **kwargs)
        for name, value in _flat(values):
            note(f"--{name.replace('_', '-')}", value)
        return values

    yield tyro, "cli", called


def _click(note: Note) -> Iterator[tuple[Any, str, Any]]:
    kind: Any = getattr(sys.modules.get("click"), "Command", None)
    if kind is None:
        return
    invoke = kind.invoke

    def invoked(command: Any, context: Any) -> Any:
        for param in command.params:
            if param.param_type_name == "option":
                note(max(param.opts, key=len), context.params.get(param.name))
        return invoke(command, context)

    yield kind, "invoke", invoked


def _hydra(note: Note) -> Iterator[tuple[Any, str, Any]]:
    utils: Any = sys.modules.get("hydra.core.utils")
    if utils is None:
        return
    run_job = utils.run_job

    def run(*args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("config", args[1] if len(args) > 1 else {})
        for name, value in _flat(sys.modules["omegaconf"].OmegaConf.to_container(config)):
            note(f"{name}=", value)
        return run_job(*args, **kwargs)

    for place in [
        place for place in list(sys.modules.values()) if getattr(place, "__dict__", {}).get("run_job") is run_job
    ]:
        yield place, "run_job", run


def _absl(note: Note) -> Iterator[tuple[Any, str, Any]]:
    kind: Any = getattr(sys.modules.get("absl.flags"), "FlagValues", None)
    if kind is None:
        return
    parse = kind.__call__

    def parsed(flags: Any, argv: Any, *args: Any, **kwargs: Any) -> Any:
        rest = parse(flags, argv, *args, **kwargs)
        for name, value in flags.flag_values_dict().items():
            note(f"--{name}", value)
        return rest

    yield kind, "__call__", parsed


def _flat(values: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested settings by their names, joined by dots.

    >>> list(_flat({"data": {"batch_size": 8}, "lr": 0.1}))
    [('data.batch_size', 8), ('lr', 0.1)]
    """
    if dataclasses.is_dataclass(values) and not isinstance(values, type):
        values = {entry.name: getattr(values, entry.name) for entry in dataclasses.fields(values)}
    if isinstance(values, Mapping) and depth < _DEEPEST:
        for name, value in values.items():
            yield from _flat(value, f"{prefix}.{name}" if prefix else str(name), depth + 1)
    elif prefix:
        yield prefix, values
