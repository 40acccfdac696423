"""The command: a group whose parts load only when they are called.

Promises:
- `--help` imports neither torch, numpy, rich nor any command;
- an error that was raised deliberately is one message on stderr and an exit code, never a traceback;
- what stands behind `--` is the target's, and click never sees it;
- a reader that goes away (`| head`) ends it with 0, Ctrl-C with 130;
- a closed stdout is refused at once: the answer would have nowhere to go; a closed stdin or stderr is the null device;
- no file that is opened later takes the number of a closed stream, where native code would write into it;
- a stream that cannot show a character (ASCII, Latin-1) shows the nearest it can, and never ends in a traceback.
"""

from __future__ import annotations

import codecs
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import Any, NoReturn

import click

from batchwright import __version__
from batchwright.errors import BatchwrightError, InvalidInputError
from batchwright.ranks.meeting import is_first_rank
from batchwright.targets import is_from_users_code, users_traceback_text

# Name and one-line help of each command, in the order a person asks. Kept here, so that `--help` need not
# import the commands; a test compares each line with the command's own.
COMMANDS = {
    "estimate": "Predict the peak memory of a training step before it runs, and on a card its time.",
    "fit": "Find the largest micro-batch that fits, by running it.",
    "plan": "Split an effective batch into micro-batch x accumulation x devices.",
    "audit": "Compare the accumulated gradient with that of the big batch.",
    "noise": "Train for some steps and measure the critical batch size, with its interval.",
    "tune": "Tune a workload: what fits, how fast, is accumulation right, how large pays, and what to type.",
    "report": "Draw a run of tune as one HTML page, or two runs side by side.",
    "recommend": "Recommend a micro-batch from a model's size and the memory there is.",
    "advise": "Say what to change when out of memory, unstable or slow.",
    "calibrate": "Profile this machine in a minute, so that estimates know its speed.",
    "explain": "Explain the concepts, in English or Chinese.",
    "check": "Try every part on this machine, and say what to paste into an issue.",
}


_NEEDED_PACKAGES = ("torch", "numpy")


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


class LazyGroup(click.Group):
    """A click group that imports a command when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order a person asks."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command of this name."""
        if cmd_name not in COMMANDS:
            return None
        import importlib

        command = importlib.import_module(f"batchwright.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from the table above."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Name the nearest command where the one typed does not exist."""
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f"Did you mean '{near[0]}'?" if near else f"Commands: {', '.join(COMMANDS)}."
            ctx.fail(f"no command '{args[0]}'. {hint}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; what the user's code raises passes click, which gives some errors a meaning of its own."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if not is_from_users_code(error) or _is_of_lost_reader(error):
                raise

            is_known = isinstance(error, ModuleNotFoundError) and error.name in _NEEDED_PACKAGES
            if is_known or isinstance(error, BatchwrightError):
                raise
            raise _UsersError(error) from error


class _UsersError(Exception):
    """Carries what the user's code raised."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="batchwright %(version)s")
def group() -> None:
    """Choose the batch size: what it costs, what fits, how to split it, and what to type."""


# The commands whose first argument is a target, which may be handed arguments of its own.
_WITH_TARGET = ("estimate", "fit", "audit", "noise", "tune")


def split_arguments(args: list[str]) -> tuple[list[str], list[str]]:
    """Split what was typed into our part and what stands behind `--`, which is the target's.

    >>> split_arguments(["fit", "train.py:workload", "--limit", "64", "--", "--layers", "4"])
    (['fit', 'train.py:workload', '--limit', '64'], ['--layers', '4'])
    """
    if not args or args[0] not in _WITH_TARGET or "--" not in args:
        return args, []
    place = args.index("--")
    return args[:place], args[place + 1 :]


def main(args: list[str] | None = None) -> NoReturn:
    """Run the command and exit with its code."""
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        # Where a rank dies, torch's stores print traces of C++ about the lost connection. Read when torch is imported.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # As an interrupt, so that every way out is taken: temporary folders, child processes, what is the user's.
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _terminate) if is_main else None
    try:
        sys.exit(_run(args))
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


class _Terminated(KeyboardInterrupt):
    """SIGTERM was received."""

    exit_code = 143


def _terminate(number: int, _: object) -> NoReturn:
    raise _Terminated


def _run(args: list[str] | None) -> int:
    own, of_target = split_arguments(sys.argv[1:] if args is None else args)
    try:
        open_streams()
        output = sys.stdout
        outcome: Any = group.main(args=own, prog_name="batchwright", standalone_mode=False, obj=of_target)
        sys.stdout.flush()  # here, where a reader that went away is understood
    except _UsersError as raised:
        return _show_users_error(raised.error)
    except click.exceptions.Exit as leaving:
        return leaving.exit_code
    except click.ClickException as error:
        error.show()
        if of_target and isinstance(error, click.MissingParameter):
            click.echo("  try: a target before --, as in train.py:workload -- --layers 4", err=True)
        return error.exit_code
    except SystemExit:
        if sys.stdout is not output:
            return 0  # click puts another stream there when the reader of a pipe went away
        raise
    except (click.Abort, KeyboardInterrupt) as stop:
        interrupt = stop.__cause__ or stop  # click's Abort stands for the interrupt itself
        code: int = getattr(interrupt, "exit_code", 130)
        is_printed_elsewhere = getattr(interrupt, "is_printed_elsewhere", None)
        if not is_printed_elsewhere:
            click.echo("Interrupted.", err=True)
            _show_notes(interrupt, own[0] if own else "")
        if is_printed_elsewhere is not None:
            _leave_at_once(code)
        return code
    except BrokenPipeError:
        # The reader went away (`| head`): not our error, and Python must not complain about it at exit either.
        sys.stderr.close()
        return 0
    except OSError as error:
        # What we read is read elsewhere, with messages of its own: this is the output (a full disk).
        if error.filename is not None:
            click.echo(f"Error: {error.filename}: {error.strerror or error}.", err=True)
            return 1
        click.echo(f"Error: cannot write the answer: {error.strerror or error}.", err=True)
        sys.stdout = None  # or Python would try again at exit
        return 1
    except Exception as error:
        if isinstance(error, BatchwrightError):
            # Ranks share their errors: one message is enough, that of the rank that failed.
            if not error.is_printed_elsewhere and (error.is_printed_elsewhere is False or is_first_rank()):
                _show_error(error, own[0] if own else "")
            if error.is_printed_elsewhere is not None:
                _leave_at_once(error.exit_code)
            return error.exit_code
        if isinstance(error, ModuleNotFoundError) and error.name in _NEEDED_PACKAGES:
            click.echo(
                f"Error: {error.name} is not installed in {sys.prefix}.\n  try: pip install {error.name}", err=True
            )
            return 2
        return _show_own_error(error)
    return outcome if isinstance(outcome, int) else 0


def _leave_at_once(code: int) -> NoReturn:
    """End a rank by its own exit code: torch takes a second to clean up, and torchrun ends those that are late."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def _show_users_error(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        click.echo(f"Error: the code that was run called sys.exit({error.code!r}).", err=True)
        return 3
    click.echo(users_traceback_text(error), err=True)
    return 1 if _is_out_of_memory(error) else 3


def _is_of_lost_reader(error: BaseException) -> bool:
    """Whether a print of the user's failed because nobody reads our output any more, which is no mistake of theirs."""
    import select

    if not isinstance(error, BrokenPipeError) or not hasattr(select, "poll"):
        return False
    streams = select.poll()
    for number in (1, 2):
        streams.register(number, 0)  # errors are told without being asked for
    return any(event & select.POLLERR for _, event in streams.poll(0))


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether the user's code found no room: a clean "no", if torch was there to say so."""
    if isinstance(error, MemoryError) or "torch" not in sys.modules:
        return isinstance(error, MemoryError)
    from batchwright.device.outcome import is_out_of_memory

    return is_out_of_memory(error)


def _show_own_error(error: BaseException) -> int:
    """Admit a mistake of batchwright's own in one message; the traceback is for whoever mends it."""
    import traceback

    if os.environ.get("BATCHWRIGHT_TRACEBACK"):
        traceback.print_exception(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    click.echo(
        f"Error: batchwright itself failed, not your code: {type(error).__name__}: {error} "
        f"({place.name}, {os.path.basename(place.filename)}:{place.lineno}).\n"
        "  try: BATCHWRIGHT_TRACEBACK=1 in front of the command shows where; please report it",
        err=True,
    )
    return 1


def _show_error(error: BatchwrightError, command: str) -> None:
    """Print an error that was raised deliberately, with the command's flags for the library's arguments."""
    # If the user's step failed in a child process, the message is their traceback.
    text = str(error) if error.exit_code == 3 else f"Error: {_translate(str(error), command)}"
    click.echo(text, err=True)
    _show_notes(error, command)


def _show_notes(error: BaseException, command: str) -> None:
    """Print what was added to an error on its way; a traceback has it at its end by itself."""
    for note in getattr(error, "__notes__", ()):
        click.echo(_translate(note, command), err=True)


def _translate(text: str, name: str) -> str:
    from batchwright.cli.options import to_command_lines, to_flags

    context = click.Context(group)
    text = to_command_lines(text, lambda of: group.get_command(context, of))
    command = group.get_command(context, name)
    return text if command is None else to_flags(text, command)
