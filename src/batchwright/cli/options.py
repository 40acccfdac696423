"""What the commands take: targets, the options that several of them share, and the way from Python's words to flags.

Promises:
- an option that several commands take has one type, one help text and one spelling: `shared`;
- an option that moved into the library is answered with where it is now;
- an error of the library, which names arguments as Python does (`limit=64`), is printed with the command's flags.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from batchwright.errors import InvalidInputError
from batchwright.planning.dialects import FRAMEWORKS
from batchwright.targets import Target
from batchwright.units import parse_bytes, parse_whole_number, positive_number, shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from batchwright.scripts.script import Script


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


class Price(click.ParamType):  # type: ignore[type-arg]  # generic only since click 8.5
    """What one device costs in an hour, a number."""

    name = "price"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Read the text that was typed."""
        accepted = f"{name_of(param)} is what one device costs in an hour, a number above 0 such as 2.5"
        return positive_number(value, accepted, least=1e-9, most=1e9)


def name_of(param: click.Parameter | None) -> str:
    """Name a parameter as the person typed it: `--micro-batch`, `EFFECTIVE`."""
    if param is None:
        return "the value"
    return (param.name or "").upper() if isinstance(param, click.Argument) else max(param.opts, key=len)


def typed_options(ctx: click.Context) -> set[str]:
    """Return the options and arguments that the person typed, defaults left out, as they are spelled."""
    given = click.core.ParameterSource.COMMANDLINE
    return {name_of(param) for param in ctx.command.params if ctx.get_parameter_source(param.name or "") is given}


class Command(click.Command):
    """A command that explains what click would only call an unknown option.

    `moved` holds options that this command no longer has, each with what to write instead.
    """

    def __init__(self, *args: Any, moved: Mapping[str, str] | None = None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.moved = dict(moved or {})

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse; a negative number is a wrong count, and an option that moved says where it is now."""
        typed = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            number = next((text for text in typed if re.fullmatch(r"-\d\S*", text)), None)
            arguments = [param for param in self.params if isinstance(param, click.Argument)]
            if number is not None and error.option_name[:2] == number[:2] and isinstance(arguments[0].type, Count):
                raise InvalidInputError(
                    f"{name_of(arguments[0])} must be a whole number from 1 to 10^15, such as 32 or 10_000; "
                    f"received {number!r}."
                ) from None
            if error.option_name in self.moved:
                message = f"No such option: {error.option_name}\n  try: {self.moved[error.option_name]}"
                raise click.NoSuchOption(error.option_name, message, ctx=ctx) from None
            raise


def _join_arguments(ctx: click.Context, _: click.Parameter, name: str) -> str:
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


def _join_or_read_script(ctx: click.Context, param: click.Parameter, name: str | None) -> str | Script:
    """Join a target with its arguments; without a target, what stands behind `--` is the user's own command."""
    if name is not None:
        return _join_arguments(ctx, param, name)
    if not ctx.obj:
        raise InvalidInputError(
            "there is neither a target nor a command.", remedy="train.py:workload, or -- python train.py"
        )
    from batchwright.scripts.script import Script

    return Script(list(ctx.obj))


target_or_script = click.argument(
    "target", metavar="TARGET [-- ARGUMENTS] | -- COMMAND", required=False, callback=_join_or_read_script
)


def settle_target(
    ctx: click.Context, target: str | Script, options: dict[str, Any], *, for_scripts: Iterable[str]
) -> str | Script:
    """Refuse options that say nothing about such a target, and take those of `OF_SCRIPTS` out of `options`.

    A command of the user's own comes back with what was said about it; `for_scripts` are the others it understands.
    """
    typed = typed_options(ctx)
    of_scripts = {option: options.pop(option.lstrip("-").replace("-", "_"), None) for option in OF_SCRIPTS}
    if isinstance(target, str):
        if refused := sorted(typed & set(OF_SCRIPTS)):
            raise InvalidInputError(
                f"{', '.join(refused)} cannot be used with a target: a command of your own goes behind --.",
                remedy="-- python train.py --batch-size {micro_batch}",
            )
        return target
    if refused := sorted(typed - {"TARGET", "--json", *OF_SCRIPTS, *for_scripts}):
        raise InvalidInputError(
            f"{', '.join(refused)} cannot be used with a command of your own.",
            details=[f"understood are {', '.join(sorted(for_scripts))}"],
            remedy="a workload for the rest: train.py:workload",
        )
    if not os.path.isdir(cwd := of_scripts["--cwd"] or "."):
        raise InvalidInputError(f"--cwd {shortened(cwd)} is no folder.")
    return replace(
        target,
        cwd=cwd,
        batch_option=of_scripts["--batch-flag"],
        accumulation_option=of_scripts["--accumulation-flag"],
        show_output=of_scripts["--show-output"],
    )


SHARED: dict[str, dict[str, Any]] = {
    "--on": {"metavar": "DEVICE", "help": "Where to run: cpu, cuda, cuda:1, mps, xpu."},
    "--memory": {"type": Amount(), "metavar": "AMOUNT", "help": "A memory budget, such as 16GiB."},
    "--micro-batch": {"type": Count(), "help": "Samples in one forward and backward on one device."},
    "--accumulation": {"type": Count(), "help": "Micro-batches per optimizer step."},
    "--devices": {"type": Count(), "help": "Data-parallel ranks."},
    "--network": {"metavar": "BANDWIDTH", "help": "What joins nodes of 8 devices, such as 400Gb/s for each node."},
    "--effective-batch": {"type": Count(), "help": "Samples per optimizer step, over all devices."},
    "--samples": {"type": Count(), "help": "Samples to train on."},
    "--steps": {"type": Count(), "default": 200, "help": "Optimizer steps to train."},
    "--limit": {"type": Count(), "help": "The largest micro-batch of interest."},
    "--for": {"metavar": "FRAMEWORK", "help": f"Print what to paste into: {', '.join(FRAMEWORKS)}."},
    "--shape": {
        "metavar": "NAME=VALUE",
        "multiple": True,
        "help": "An argument of the workload's batch, such as seq_len=512.",
    },
    "--batch-flag": {"metavar": "FLAG", "help": "The option of your command that sets its micro-batch."},
    "--accumulation-flag": {"metavar": "FLAG", "help": "The option of your command that sets its accumulation."},
    "--cwd": {"metavar": "FOLDER", "default": ".", "help": "The folder your command runs in."},
    "--show-output": {"is_flag": True, "help": "Show on stderr what your command prints."},
    "--json": {"is_flag": True, "help": "Print the answer as JSON."},
}
# What is said about a command of the user's own.
OF_SCRIPTS = ("--batch-flag", "--accumulation-flag", "--cwd", "--show-output")
RANKS_ON_CARD = "Data-parallel ranks. On a simulated card: simulate one of N."
PLACES = "Where to run: cpu, cuda, cuda:1, mps, xpu, or a simulated card, such as a100-40gb."
# Where the name of the argument is another than the option's.
_NAMES = {"--shape": "shapes", "--json": "as_json", "--for": "framework"}


def shared(option: str, *, help: str = "", **more: Any) -> Callable[[Any], Any]:  # noqa: A002 - click's own word
    """Return the decorator of an option that several commands take.

    `more` adds to its settings. `help` is what it means for this command, or, in brackets, its default there.
    """
    usual = SHARED[option]["help"]
    settings = {
        **SHARED[option],
        **more,
        "help": help if help and not help.startswith("[") else f"{usual}  {help}".strip(),
    }
    if settings.get("default") is not None:
        settings["show_default"] = True
    return click.option(option, *([_NAMES[option]] if option in _NAMES else []), **settings)


def own_command(*flags: str) -> Callable[[Any], Any]:
    """Return the decorator of the options that go with a command of the user's own, and of some `flags`."""
    options = [shared(option) for option in (*flags, "--cwd", "--show-output")]

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def parse_shapes(pairs: Iterable[str]) -> dict[str, list[int]]:
    """Read `max_crops=2,4,6` and its like.

    >>> parse_shapes(["max_crops=2,4,6", "seq_len=512"])
    {'max_crops': [2, 4, 6], 'seq_len': [512]}
    """
    shapes: dict[str, list[int]] = {}
    for pair in pairs:
        name, equals, values = pair.partition("=")
        if not equals or not name.isidentifier():
            raise InvalidInputError(f"--shape is written name=value, such as seq_len=512; received {shortened(pair)}.")
        if name in shapes:
            raise InvalidInputError(f"--shape {name} was given twice.", remedy=f"--shape {name}=2,4,6")
        numbers = [parse_whole_number(value, f"--shape {name}") for value in values.split(",")]
        if len(set(numbers)) < len(numbers):
            raise InvalidInputError(f"--shape {name} names a value twice; received {shortened(numbers)}.")
        shapes[name] = numbers
    return shapes


def parse_shape(pairs: Iterable[str]) -> dict[str, int]:
    """Read `seq_len=512` and its like, one value each.

    >>> parse_shape(("seq_len=512", "crops=4"))
    {'seq_len': 512, 'crops': 4}
    """
    shapes = parse_shapes(pairs)
    for name, values in shapes.items():
        if len(values) > 1:
            raise InvalidInputError(
                f"--shape {name} takes one value here; received {','.join(map(str, values))}.",
                remedy=f"--shape {name}={values[0]}; several values give a table in `batchwright fit`",
            )
    return {name: values[0] for name, values in shapes.items()}


_CALL = re.compile(r"bw\.(?P<name>\w+)\([^()]*\)")
# A call is the reader's own Python and stays; an argument stands outside of one.
_ARGUMENT = re.compile(
    r"""[\w.]+\([^()]*\)                                   # a call: left as it is
    |(?<![\w.'"-])(?P<name>[a-z][a-z_]*)=
     (?P<value>"[^"]*"|\[[^\]]*\]|\{[^}]*\}|\.\.\.|(?:[\w./%+*:-]*\w)?)""",
    re.VERBOSE,
)


def to_flags(text: str, command: click.Command) -> str:
    """Write arguments of the library as the flags of a command.

    >>> fit = click.Command("fit", params=[click.Option(["--limit"]), click.Option(["--max", "find_max"])])
    >>> to_flags("limit= is needed; try: limit=64, find_max=True, or bw.fit(step, limit=64)", fit)
    '--limit is needed; try: --limit 64, --max, or bw.fit(step, limit=64)'
    """
    flags = {param.name: name_of(param) for param in command.params if isinstance(param, click.Option)}
    flags["shape"] = flags.get("shapes", "")

    def translate(match: re.Match[str]) -> str:
        flag = flags.get(match["name"] or "")
        if not flag:
            return match[0]
        try:
            value = ast.literal_eval(match["value"])
        except (ValueError, SyntaxError):
            value = match["value"]
        if isinstance(value, dict):
            return " ".join(f"{flag} {name}={_typed(part)}" for name, part in value.items())
        return flag if value is True or value == "" else f"{flag} {_typed(value)}"

    return _ARGUMENT.sub(translate, text)


def to_command_lines(text: str, command_named: Callable[[str], click.Command | None]) -> str:
    """Write calls of the library as the commands that answer the same; a call that no command answers stays.

    >>> fit = click.Command("fit", params=[click.Option(["--limit"])])
    >>> to_command_lines("try bw.fit(workload, limit=64), or bw.fit(step)", {"fit": fit}.get)
    'try batchwright fit TARGET --limit 64, or bw.fit(step)'
    >>> to_command_lines('bw.Script(["train.py", "--bs", "{micro_batch}"])', {}.get)
    '-- python train.py --bs {micro_batch}'
    """

    def translate(match: re.Match[str]) -> str:
        try:
            call = ast.parse(match[0], mode="eval").body
            assert isinstance(call, ast.Call)
            if match["name"] == "Script":
                return " ".join(("-- python", *ast.literal_eval(call.args[0])))
            words = ["TARGET" if ast.unparse(value) == "workload" else ast.literal_eval(value) for value in call.args]
        except (ValueError, SyntaxError):
            return match[0]
        command = command_named(match["name"])
        if command is None:
            return match[0]
        typed = (to_flags(ast.unparse(keyword), command) for keyword in call.keywords)
        return " ".join(("batchwright", match["name"], *map(str, words), *typed))

    return _CALL.sub(translate, text)


def _typed(value: object) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return "..." if value is ... else str(value)
