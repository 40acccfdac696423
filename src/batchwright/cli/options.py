"""What the commands share: numbers and amounts as people type them, and answers as JSON."""

from __future__ import annotations

import codecs
import json
import os
import re
import shlex
import sys
from typing import Any

import click

from batchwright.errors import InvalidInputError
from batchwright.targets import Target
from batchwright.units import parse_bytes, parse_whole_number

# stdin, stdout and stderr as the command finds them, made fit to use.
#
# Promises:
# - a closed stdout is refused at once: the answer would have nowhere to go; a closed stdin or stderr is the null
#   device;
# - no file that is opened later takes the number of a closed stream, where native code would write into it;
# - a stream that cannot show a character (ASCII, Latin-1) shows the nearest it can, and never ends in a traceback.

# What we draw beyond ASCII, and what to draw instead.
_PLAIN = {"─": "-", "━": "-", "│": "|", "█": "#", "\N{MULTIPLICATION SIGN}": "x", "…": "...", "≥": ">=", "≤": "<="}
_HANDLER = "batchwright-plain"


def open_streams() -> None:
    """Make the three streams usable, or say why the answer cannot be written."""
    closed = [number for number in (0, 1, 2) if not _is_open(number)]
    for number in closed:
        null = os.open(os.devnull, os.O_RDONLY if number == 0 else os.O_WRONLY)
        if null != number:
            os.dup2(null, number)
            os.close(null)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - it lives as long as the process
    codecs.register_error(_HANDLER, _nearest)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=_HANDLER)
    if sys.stdout is None or 1 in closed:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        raise InvalidInputError(
            "stdout is closed, so the answer cannot be written.", remedy="> /dev/null if only the exit code is wanted"
        )


def can_show(text: str) -> bool:
    """Whether stdout has every character of a text.

    >>> can_show("batch")
    True
    """
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _nearest(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    return "".join(_PLAIN.get(character, "?") for character in text), error.end


class Count(click.ParamType):  # type: ignore[type-arg]  # generic only since click 8.5
    """A whole number; anything else is answered with the value received and what is accepted."""

    name = "count"

    def __init__(self, *, least: int = 1) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read the text that was typed."""
        return parse_whole_number(str(value), name_of(param), least=self.least)


class Amount(click.ParamType):  # type: ignore[type-arg]  # generic only since click 8.5
    """An amount of memory, in bytes."""

    name = "amount"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read the text that was typed."""
        return parse_bytes(value, name_of(param))


class NumbersCommand(click.Command):
    """A command whose arguments are counts: a negative one is a wrong count, not an unknown option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, and explain a negative number where click would call it an option."""
        typed = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            number = next((text for text in typed if re.fullmatch(r"-\d\S*", text)), None)
            if number is None or error.option_name[:2] != number[:2]:
                raise
            arguments = [name_of(p) for p in self.params if isinstance(p, click.Argument)]
            raise InvalidInputError(
                f"{arguments[0]} must be a whole number from 1 to 10^15, such as 32 or 10_000; received {number!r}."
            ) from None


def name_of(param: click.Parameter | None) -> str:
    """Name a parameter as the person typed it: `--micro-batch`, `EFFECTIVE`."""
    if param is None:
        return "the value"
    return (param.name or "").upper() if isinstance(param, click.Argument) else max(param.opts, key=len)


def _with_its_arguments(ctx: click.Context, _: click.Parameter, name: str) -> str:
    """Join a target with the arguments behind `--`, and give its code a `sys.argv` of its own."""
    arguments: list[str] = ctx.obj or []
    if ":" not in name:
        # A model by name, or a file without a function, which is explained where it is used.
        if arguments:
            raise InvalidInputError(
                f"the arguments behind -- go to the code of a target; {name!r} names no function of a file or module.",
                remedy=f"train.py:workload -- {shlex.join(arguments)}",
            )
        return name
    text = f"{name} -- {shlex.join(arguments)}" if arguments else name
    before, sys.argv = sys.argv, Target.read(text).argv
    ctx.call_on_close(lambda: setattr(sys, "argv", before))
    return text


target_argument = click.argument("target", metavar="TARGET [-- ARGUMENTS]", callback=_with_its_arguments)

# Said in the help of each command that runs something; the answer says which device it was.
DEFAULT_DEVICE = "[default: the accelerator, else cpu]"

json_option = click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")


def print_json(data: dict[str, Any]) -> None:
    """Print plain data as JSON on stdout."""
    text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
    click.echo(text if can_show(text) else json.dumps(data, indent=2, allow_nan=False))


def print_found(found: Any, *, as_json: bool) -> None:
    """Print a result: as JSON, or drawn for the terminal."""
    if as_json:
        print_json(found.to_dict())
        return
    from batchwright.report.display import print_answer

    print_answer(found)
