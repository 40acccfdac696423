"""The user's own command, as it is typed behind `--`: taken apart, filled in, given another batch size.

Promises:
- only exact placeholders are replaced ({micro_batch}, {accumulation}, the name of a shape); any other brace stays;
- no shell is involved: words are never joined and split again;
- a launcher in front (python, python -m, torchrun, accelerate launch, deepspeed) is read by its own parser;
- a command that a package installed (`litgpt`, `tune`) is the Python file that it is.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchwright.errors import InvalidInputError
from batchwright.units import shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MICRO_BATCH, ACCUMULATION = "micro_batch", "accumulation"
_EXAMPLE = 'bw.Script(["train.py", "--batch-size", "{micro_batch}"])'
_PYTHON = re.compile(r"python(\d+(\.\d+)?)?(\.exe)?$")
# Options of the interpreter that are followed by a value of their own.
_PYTHON_VALUES = ("-W", "-X", "--check-hash-based-pycs")
# A size that stands in the program itself, where it makes its loader.
LOADER = re.compile(r"DataLoader\(batch_size=(\d+)\)")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


@dataclass(frozen=True)
class UserCommand:
    """A command that runs one Python program, and the words it was typed with."""

    words: tuple[str, ...]
    program: str
    """The path of a script, or the name of a module."""
    arguments: tuple[str, ...]
    is_module: bool = False
    interpreter: str = sys.executable
    interpreter_options: tuple[str, ...] = ()
    launcher: str = "python"
    num_processes: int = 1
    environment: tuple[tuple[str, str], ...] = ()
    loader_sizes: tuple[int, int] | None = None
    """Batches of the first size that the program asks a loader for are given the second."""

    def __str__(self) -> str:
        import shlex

        return shlex.join(self.words)

    @property
    def placeholders(self) -> frozenset[str]:
        """The names in braces, alone or inside a word.

        >>> sorted(read_command(["train.py", "--batch-size={micro_batch}", '{"lr": 1}']).placeholders)
        ['micro_batch']
        """
        words = (*self.arguments, *(value for _, value in self.environment))
        return frozenset(name for word in words for name in re.findall(r"\{([A-Za-z_]\w*)\}", word))

    def fill(self, values: Mapping[str, Any]) -> UserCommand:
        """Put values in the places that are named; what is not named stays as it is typed.

        >>> str(read_command(["train.py", "--bs={micro_batch}", "{x}"]).fill({"micro_batch": 8}))
        "train.py --bs=8 '{x}'"
        """

        def filled(words: Sequence[str]) -> tuple[str, ...]:
            return tuple(
                re.sub(r"\{([A-Za-z_]\w*)\}", lambda place: str(values.get(place[1], place[0])), word) for word in words
            )

        environment = tuple((name, filled([value])[0]) for name, value in self.environment)
        return replace(self, words=filled(self.words), arguments=filled(self.arguments), environment=environment)

    def with_option(self, option: str, value: object) -> UserCommand:
        """Set an option of the program: in its place if it is there, else at the end.

        >>> command = read_command(["train.py", "--batch-size", "4", "lr=0.1"])
        >>> str(command.with_option("--batch-size", 8))
        'train.py --batch-size 8 lr=0.1'
        >>> str(command.with_option("batch_size=", 8))
        'train.py --batch-size 4 lr=0.1 batch_size=8'
        >>> str(command.with_option("$BSZ", 8))
        'BSZ=8 train.py --batch-size 4 lr=0.1'
        >>> command.with_option("DataLoader(batch_size=4)", 8).loader_sizes
        (4, 8)
        """
        if option.startswith("$"):
            return self._with_variable(option[1:], str(value))
        if (loader := LOADER.fullmatch(option)) is not None:
            return replace(self, loader_sizes=(int(loader[1]), int(str(value))))
        arguments = set_option(self.arguments, option, value)
        kept = len(self.words) - len(self.arguments)
        return replace(self, words=(*self.words[:kept], *arguments), arguments=arguments)

    def _with_variable(self, name: str, value: str) -> UserCommand:
        others = tuple((known, held) for known, held in self.environment if known != name)
        words = self.words[len(self.environment) :]
        environment = (*others, (name, value))
        return replace(self, words=(*map("=".join, environment), *words), environment=environment)


def set_option(arguments: Sequence[str], option: str, value: object) -> tuple[str, ...]:
    """Return the arguments with one option set: `--name value`, `--name=value` or, with `name=`, an override.

    The last place counts, as it does for argparse; one that is not there is appended.
    """
    is_override = option.endswith("=")
    joined = option if is_override else f"{option}="
    for place in reversed(range(len(arguments))):
        word = arguments[place]
        if word.startswith(joined) or (is_override and word.lstrip("+").startswith(joined)):
            prefix = word[: word.index("=") + 1]
            return (*arguments[:place], f"{prefix}{value}", *arguments[place + 1 :])
        if word == option and place + 1 < len(arguments):
            return (*arguments[: place + 1], str(value), *arguments[place + 2 :])
    return (*arguments, f"{joined}{value}") if is_override else (*arguments, option, str(value))


def read_command(words: Sequence[str]) -> UserCommand:
    """Take a command apart.

    >>> command = read_command(["python", "-u", "-m", "package.train", "--lr", "3e-4"])
    >>> command.program, command.is_module, command.arguments, command.interpreter_options
    ('package.train', True, ('--lr', '3e-4'), ('-u',))
    >>> str(read_command(["env", "BSZ=8", "python", "train.py"]))
    'BSZ=8 python train.py'
    """
    if not words:
        raise InvalidInputError("the command is empty.", remedy=_EXAMPLE)
    if words[0] == "env" and len(words) > 1 and _ASSIGNMENT.match(words[1]):
        words = words[1:]
    rest = list(words)
    environment = []
    while rest and _ASSIGNMENT.match(rest[0]):
        name, _, value = rest.pop(0).partition("=")
        environment.append((name, value))
    if not rest:
        raise InvalidInputError(f"there is no program in {shortened(' '.join(words))}.", remedy=_EXAMPLE)
    if rest[0].startswith("-"):
        raise InvalidInputError(
            f"the command begins with {shortened(rest[0])}, which is neither a program nor the argument of a target.",
            remedy="a target before --, as in train.py:workload -- --layers 4; or a command: -- python train.py",
        )
    name = Path(rest[0]).name
    if _PYTHON.match(name):
        command = _read_python(tuple(words), rest[0], rest[1:])
    elif name == "torchrun":
        command = _read_launcher(tuple(words), name, rest[1:], _torchrun)
    elif name == "accelerate":
        if rest[1:2] != ["launch"]:
            raise InvalidInputError("of accelerate only `accelerate launch` runs a program.", remedy=_EXAMPLE)
        command = _read_launcher(tuple(words), "accelerate launch", rest[2:], _accelerate)
    elif name == "deepspeed":
        command = _read_launcher(tuple(words), name, rest[1:], _deepspeed)
    elif name.endswith(".py"):
        command = UserCommand(tuple(words), rest[0], tuple(rest[1:]))
    elif (installed := _find_installed(rest[0])) is not None:
        path, interpreter = installed
        command = UserCommand(tuple(words), path, tuple(rest[1:]), interpreter=interpreter)
    else:
        raise InvalidInputError(
            f"{shortened(rest[0])} is not a Python program or a launcher of one.",
            details=[
                "understood are python, torchrun, accelerate launch, deepspeed, a script's path, or a command that a "
                "package installed"
            ],
            remedy=_EXAMPLE,
        )
    return replace(command, environment=tuple(environment))


def _find_installed(word: str) -> tuple[str, str] | None:
    """Return the file of a command that is written in Python, and its interpreter; None if it is none.

    Beside this interpreter first, as its folder need not be on the path.
    """
    path = shutil.which(word, path=str(Path(sys.executable).parent)) or shutil.which(word)
    if path is None:
        return None
    with open(path, "rb") as file:
        first, second = (file.readline(1024).decode("utf-8", "replace") for _ in range(2))
    # pip and uv write what is too long for the first line into the second: '''exec' "/path/python" "$0" "$@"
    line = second if first.startswith("#!/bin/sh") and second.startswith("'''exec'") else first
    interpreter = re.search(r"[^\s\"'!]*\bpython[\d.]*(?=[\s\"'])", line)
    return (path, _find_interpreter(interpreter[0])) if line.startswith(("#!", "'''")) and interpreter else None


def _read_python(words: tuple[str, ...], interpreter: str, rest: list[str]) -> UserCommand:
    options: list[str] = []
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c", "-"):
        options.append(rest.pop(0))
        if options[-1] in _PYTHON_VALUES and rest:
            options.append(rest.pop(0))
    if not rest or rest[0] in ("-c", "-"):
        raise InvalidInputError(
            f"{shortened(' '.join(words))} runs no file: a program typed on the command line cannot be run again.",
            remedy='write it to a file: bw.Script(["train.py"])',
        )
    is_module = rest[0] == "-m"
    program = rest[1:] if is_module else rest
    if not program:
        raise InvalidInputError("python -m is followed by no module.", remedy="python -m package.train ...")
    return UserCommand(
        words,
        program[0],
        tuple(program[1:]),
        is_module,
        interpreter=_find_interpreter(interpreter),
        interpreter_options=tuple(options),
    )


def _find_interpreter(word: str) -> str:
    """Return the interpreter to run: this one for a bare `python`, as batchwright was installed beside the packages."""
    if os.sep not in word:
        return sys.executable
    path = shutil.which(word)
    if path is None:
        raise InvalidInputError(f"there is no interpreter at {shortened(word)}.", remedy="python, or its path")
    return path


@dataclass(frozen=True)
class _Launched:
    program: str
    arguments: tuple[str, ...]
    is_module: bool
    num_processes: int


def _read_launcher(
    words: tuple[str, ...], name: str, rest: list[str], read: Callable[[list[str]], _Launched]
) -> UserCommand:
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages), contextlib.redirect_stdout(messages):
            launched = read(rest)
    except ImportError as error:
        raise InvalidInputError(
            f"{name} is not installed here: {error}.", remedy=f"pip install {name.split()[0]}"
        ) from None
    except SystemExit:
        lines = messages.getvalue().strip().splitlines()
        raise InvalidInputError(
            f"{name} does not understand {shortened(' '.join(rest))}.", details=lines[-1:], remedy=f"{name} --help"
        ) from None
    return UserCommand(
        words,
        launched.program,
        launched.arguments,
        launched.is_module,
        launcher=name,
        num_processes=launched.num_processes,
    )


def _torchrun(rest: list[str]) -> _Launched:
    from torch.distributed.run import get_args_parser

    options = get_args_parser().parse_args(rest)
    per_node = str(options.nproc_per_node)
    nodes = str(options.nnodes).rpartition(":")[2]
    count = (int(per_node) if per_node.isdigit() else 1) * (int(nodes) if nodes.isdigit() else 1)
    if not count:
        raise InvalidInputError(
            f"torchrun would start no process: --nproc-per-node {per_node}, --nnodes {nodes}.",
            remedy="torchrun --nproc-per-node 1 train.py ...",
        )
    return _Launched(options.training_script, tuple(options.training_script_args), bool(options.module), count)


def _accelerate(rest: list[str]) -> _Launched:
    from accelerate.commands.launch import launch_command_parser

    options = launch_command_parser().parse_args(rest)
    return _Launched(
        options.training_script,
        tuple(options.training_script_args),
        bool(options.module),
        options.num_processes or 1,
    )


def _deepspeed(rest: list[str]) -> _Launched:
    from deepspeed.launcher.runner import parse_args

    options = parse_args(rest)
    count = options.num_gpus if isinstance(options.num_gpus, int) and options.num_gpus > 0 else 1
    return _Launched(options.user_script, tuple(options.user_args), bool(options.module), count)


def check_program(command: UserCommand, cwd: Path) -> None:
    """Refuse a script that does not exist; whether a module does is seen when it runs."""
    if not command.is_module and not (cwd / command.program).is_file():
        where = f" in {cwd}" if str(cwd) != "." else ""
        raise InvalidInputError(
            f"there is no script {shortened(command.program)}{where}.", remedy='its path, or cwd="FOLDER"'
        )
