"""What commands share: one spelling of an option, and the library's arguments as flags."""

from __future__ import annotations

import click
import pytest

from batchwright import cli
from batchwright.cli.options import SHARED, Command, to_flags

COMMANDS = {name: cli.group.get_command(click.Context(cli.group), name) for name in cli.COMMANDS}


@pytest.mark.parametrize(
    ("command", "text", "expected"),
    [
        ("fit", "limit=64", "--limit 64"),
        ("fit", "limit= is needed.", "--limit is needed."),
        ("fit", 'memory="16GiB", or limit=64.', "--memory 16GiB, or --limit 64."),
        ("fit", "start=3", "--start-at 3"),
        ("fit", 'shapes={"max_crops": [2, 4, 6]}', "--shape max_crops=2,4,6"),
        ("fit", 'scale="max_crops:2=1.0,else=0.5"', "--scale max_crops:2=1.0,else=0.5"),
        ("estimate", "what_if=True in place of find_max=True", "--what-if in place of --max"),
        ("tune", 'skip=["noise", "audit"] or file=FILE', "--skip noise,audit or --run-file FILE"),
        ("fit", "bw.fit(workload, limit=64)", "bw.fit(workload, limit=64)"),
        ("fit", "received 'limit=3'.", "received 'limit=3'."),
        ("fit", "isolate=True, and x.limit=3, no_limit=3", "isolate=True, and x.limit=3, no_limit=3"),
    ],
)
def test_arguments_of_the_library_are_written_as_flags(command: str, text: str, expected: str) -> None:
    chosen = COMMANDS[command]
    assert chosen is not None
    assert to_flags(text, chosen) == expected


def test_a_call_that_a_remedy_names_is_written_as_the_command_that_answers_the_same() -> None:
    remedy = "bw.fit(workload) runs the step; bw.estimate(workload, what_if=True) prints what limit=64 would save"
    expected = (
        "batchwright fit TARGET runs the step; batchwright estimate TARGET --what-if prints what --limit 64 would save"
    )
    assert cli._translate(remedy, "fit") == expected


@pytest.mark.parametrize(
    ("text", "typed"),
    [
        ('bw.advise("out-of-memory", micro_batch=8)', "batchwright advise out-of-memory --micro-batch 8"),
        ("bw.estimate(workload, what_if=True)", "batchwright estimate TARGET --what-if"),
        ('or bw.Script(["a.py", "--b={micro_batch}"])', "or -- python a.py --b={micro_batch}"),
        ("bw.pack(lengths)", "bw.pack(lengths)"),
        ("bw.fit(step, limit=8)", "bw.fit(step, limit=8)"),
    ],
)
def test_a_call_of_the_library_is_shown_as_a_command_where_there_is_one(text: str, typed: str) -> None:
    assert cli._translate(text, "tune") == typed


def test_an_option_of_several_commands_has_one_type_and_begins_with_the_same_words() -> None:
    options: dict[str, list[click.Option]] = {}
    for name, command in COMMANDS.items():
        assert command is not None
        for param in command.params:
            # recommend takes lists of sizes, memories and cards, none of which runs anything.
            if isinstance(param, click.Option) and name != "recommend":
                options.setdefault(max(param.opts, key=len), []).append(param)
    shared = {flag: uses for flag, uses in options.items() if len(uses) > 1}
    assert {"--on", "--memory", "--shape", "--devices", "--micro-batch", "--json"} <= set(shared)
    for flag, uses in shared.items():
        words = SHARED[flag]["help"].rstrip(".")
        assert all((use.help or "").startswith(words) for use in uses), flag
        assert len({type(use.type) for use in uses}) == 1, flag


def test_an_option_that_moved_is_in_no_command_that_names_it() -> None:
    for command in COMMANDS.values():
        assert command is not None
        if isinstance(command, Command):
            assert not set(command.moved) & {flag for param in command.params for flag in param.opts}
